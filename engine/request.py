"""What a caller asks for and what it gets back: the dataclasses at the engine's border.

`Prompt` kinds and `SamplingParams` go in; `Delta`s and a `Receipt` come out. Nothing here computes anything. Used by
`engine/llm` (offline), `api` (HTTP) and `ui`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from engine.errors import InvalidRequest
from engine.tools.spec import ToolCall, ToolUse

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as PILImage

FinishReason = Literal["stop", "length", "abort", "error"]
Modality = Literal["audio", "image"]


@dataclass(frozen=True)
class TextPart:
    """Text inside a message."""

    text: str


@dataclass(frozen=True)
class AudioPart:
    """Audio inside a message, not decoded yet.

    `source` is the bytes of a file in any container, a path to such a file, or `(samples, rate)` with
    samples [S] or [S, channels] float32 in -1..1 and rate in Hz. `param` names the request field, for errors.
    """

    source: bytes | Path | tuple[np.ndarray, int]
    param: str | None = None


@dataclass(frozen=True)
class ImagePart:
    """An image inside a message, not decoded yet: bytes of a file, a path, a PIL image or uint8 pixels [H, W, 3]."""

    source: bytes | Path | PILImage | np.ndarray
    param: str | None = None


Part = TextPart | AudioPart | ImagePart


@dataclass(frozen=True)
class Message:
    """One turn: `role` is system, user, assistant or tool; `content` is text or parts in order.

    `tool_calls` are an assistant's calls of functions; `tool_call_id` and `name` say which call a tool's turn answers.
    """

    role: str
    content: str | Sequence[Part]
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ChatPrompt:
    """Messages that the model's chat template turns into text.

    `add_generation_prompt` opens the assistant's turn; `continue_final_message` leaves the last message open instead.
    `tools` are functions that the model may call, where the template takes any.
    `is_transcript` bounds an answer without `max_tokens` by the length of the audio, so that silence does not run on.
    """

    messages: Sequence[Message]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    is_transcript: bool = False
    tools: ToolUse | None = None


@dataclass(frozen=True)
class TextPrompt:
    """A raw prompt. Each placeholder in the text (such as `<|audio|>`) takes the next item of `audio` or `images`.

    `is_transcript` is as in `ChatPrompt`; such a text is complete: no token is put before it.
    """

    text: str
    audio: Sequence[AudioPart] = ()
    images: Sequence[ImagePart] = ()
    is_transcript: bool = False


@dataclass(frozen=True)
class TokenPrompt:
    """A raw prompt as token ids [P]."""

    token_ids: Sequence[int]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


def modalities_of(prompt: Prompt) -> set[Modality]:
    """The media that a prompt holds, as its parts say; nothing is decoded."""
    if isinstance(prompt, TokenPrompt):
        return set()
    parts: list[Part] = []
    if isinstance(prompt, TextPrompt):
        parts += [*prompt.audio, *prompt.images]
    else:
        parts += [part for each in prompt.messages if not isinstance(each.content, str) for part in each.content]
    kinds: dict[type, Modality] = {AudioPart: "audio", ImagePart: "image"}
    return {kinds[type(part)] for part in parts if type(part) in kinds}


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Names and defaults are those of the OpenAI API and vLLM.

    `temperature` 0 is greedy; `top_k` 0 or -1 means all tokens. `max_tokens` None means up to the context's end.
    `seed` makes a request reproducible whatever shares its batch. `logprobs` None means none; 0 means the chosen
    token's alone; n means also the n likeliest. `prompt_logprobs` is the same for the prompt's own tokens, each given those
    before it; the prompt is then computed whole, and `max_tokens` may be 0. `logit_bias` maps token id to a value added to
    its logit. `json_schema`, as JSON text, lets the answer be nothing but JSON of that schema.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    json_schema: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, is_allowed, allowed in (
            ("temperature", 0.0 <= self.temperature <= 100.0, "0 or more (0 is greedy)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "-1 or 0 (all tokens) or a positive number"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100.0, "between 0.01 and 100"),
            ("max_tokens", self._may_have_max_tokens(), "1 or more (0 only with prompt_logprobs)"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "between 0 and 20"),
            ("prompt_logprobs", self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "between 0 and 20"),
        ):
            if not is_allowed:
                raise InvalidRequest(f"{name} is {getattr(self, name)}, but must be {allowed}.", param=name)
        for field_name, count, most in (("stop", len(self.stop), 64), ("logit_bias", len(self.logit_bias or {}), 1024)):
            if count > most:
                raise InvalidRequest(
                    f"{field_name} has {count} entries, but may have {most} at most.", param=field_name
                )
        if any(len(text) > 1000 for text in self.stop):
            raise InvalidRequest("stop holds a string of more than 1000 characters.", param="stop")
        if self.json_schema is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos lets no JSON end; leave it out, or ask for plain text.", param="ignore_eos"
            )
        if any(not text for text in self.stop):
            raise InvalidRequest("stop holds an empty string; remove it.", param="stop")

    def _may_have_max_tokens(self) -> bool:
        least = 1 if self.prompt_logprobs is None else 0
        return self.max_tokens is None or self.max_tokens >= least


@dataclass(frozen=True)
class LoRARequest:
    """An adapter for the offline API, in vLLM's argument order: a name, a caller's id (not used), and a path.

    Without a path the name must be loaded already, or known to a source of `lora_resolver`.

    Attributes:
        load_inplace: read the adapter from its path at each call that is given this, and replace what the name meant before;
            without it a name that is loaded is used as it is. Answers that have begun keep what they began with.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    load_inplace: bool = field(default=False, kw_only=True)


PROBE = "probe"
"""The reason on the receipts of the engine's own requests, which try an adapter out."""


@dataclass(frozen=True)
class Receipt:
    """Which adapter answered, why, and what it cost to get there.

    Attributes:
        name: the adapter's name, None for the base model.
        generation: digest of the adapter's content (`sha256:…`), None for the base model.
        reason: `explicit`, `base`, `default:audio`, `conflict:audio=x,image=y` or `opt-out`.
        load_ms: milliseconds spent on making the adapter ready in CPU memory; 0 when it was.
        queue_ms: milliseconds from submission to the first scheduled step.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    name: str | None
    generation: str | None
    reason: str
    load_ms: float = 0.0
    queue_ms: float = 0.0
    cached_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The `lora` object of API answers."""
        return {
            "name": self.name,
            "generation": self.generation,
            "reason": self.reason,
            "load_ms": round(self.load_ms, 3),
            "queue_ms": round(self.queue_ms, 3),
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability (natural logarithm) of one token, given those before it, and of its likeliest rivals."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Delta(NamedTuple):  # One a token, and made in a third of a frozen dataclass's time.
    """One event of an answer's stream.

    The first event of an answer has `text == ""`, no tokens and a complete `receipt`: it is sent when the request is
    first scheduled. The last one has `finish_reason`. `text` never splits a character and never holds the beginning of
    a stop string that completes later. `token_ids` are the new tokens, which may run ahead of `text`. `prompt_logprobs`,
    where they are asked for, come all at once, with the first token or with the end of an answer without one: [P] entries,
    None for the prompt's first token and for placeholders of media. They are made while they are iterated over.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    receipt: Receipt | None = None
    prompt_logprobs: Collection[TokenLogprob | None] = ()


@dataclass(frozen=True)
class CompletionOutput:
    """One finished answer of the offline API."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its answers, as `LLM.generate` and `LLM.chat` return it.

    `prompt_logprobs` has an entry for each prompt token where they are asked for, None for the first and for placeholders of
    media; else it is empty.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    lora_request: LoRARequest | None
    receipt: Receipt
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)


@dataclass(frozen=True)
class TranscribedSegment:
    """A piece of a recording: when its sound begins and ends, in seconds, and what is said in it."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class TranscriptOutput:
    """A recording's transcript, as `LLM.transcribe` returns it.

    Attributes:
        text: all that is said.
        duration: of the recording, in seconds.
        segments: its pieces, in order; none where all is silent.
        lora_request: the adapter that answered, None for the base model or where all is silent.
    """

    text: str
    duration: float
    segments: tuple[TranscribedSegment, ...]
    lora_request: LoRARequest | None
