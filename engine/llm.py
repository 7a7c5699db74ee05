"""The offline API: prompts in, finished answers out, with vLLM's names.

    from engine import LLM, SamplingParams, LoRARequest

Goes through the same intake, routing and engine thread as the server. Adapters given as `LoRARequest` are loaded from
their path (a folder, a hub id, an `s3://` address) at first use and kept; a name that was loaded from elsewhere is an error,
unless `load_inplace` asks for it to be replaced.
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.answer import Answer
from engine.config import EMBEDDED_MODEL, EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.recording import Joint
from engine.request import (
    AudioPart,
    ChatPrompt,
    CompletionOutput,
    ImagePart,
    LoRARequest,
    Message,
    Prompt,
    RequestOutput,
    SamplingParams,
    TextPart,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
    TranscribedSegment,
    TranscriptOutput,
)

PromptInput = str | Mapping[str, Any]


class LLM:
    """A base model with adapters, for use inside a program.

    Args:
        model: Hugging Face id or folder; the embedded model where it is left out.
        settings: any field of `EngineConfig`, by name, such as `max_lora_rank=64` or `default_mm_loras={"audio": …}`.

    Raises:
        InvalidRequest: a setting does not exist.
        AppError: the model or an adapter cannot be served.
    """

    def __init__(self, model: str = str(EMBEDDED_MODEL), **settings: Any) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise InvalidRequest(f"LLM has no setting {', '.join(unknown)}; see engine.EngineConfig.", param=unknown[0])
        self.engine = Engine(EngineConfig(model=model, **settings))

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; all run in one batch, whatever their adapters.

        Args:
            prompts: a text; `{"prompt": text, "multi_modal_data": {"audio": (samples, rate), "image": pixels}}` or
                lists of them, an image being a PIL image, uint8 pixels [H, W, 3], a path or bytes; or
                `{"prompt_token_ids": ids}`.
            sampling_params: for all prompts, or one each.
            lora_request: for all prompts, or one each; where it is None the routing rule decides, and the name "none"
                asks for the base model.

        Returns:
            One output a prompt, in order; `lora_request` names the adapter that answered.
        """
        items: Sequence[PromptInput] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        return self._run([_to_prompt(item) for item in items], sampling_params, lora_request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, given as OpenAI messages.

        A content part is `{"type": "text", "text": …}`, `{"type": "audio", "audio": path, bytes or (samples, rate)}` or
        `{"type": "image", "image": path, bytes, pixels or a PIL image}`.
        """
        is_single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_single else messages
        return self._run([_to_chat(conversation) for conversation in conversations], sampling_params, lora_request)

    def transcribe(
        self,
        audio: Any,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        language: str | None = None,
        prompt: str | None = None,
    ) -> TranscriptOutput:
        """Write down what is said in a recording of any length, cut at silence into pieces that run together.

        Args:
            audio: a path, a file's bytes, or (samples, rate).
            sampling_params: for each piece; greedy, to a bound that follows a piece's length, where it is left out.
            lora_request: as in `generate`.
            language: what is spoken, for models that take it.
            prompt: words to expect, for models that take them.

        Raises:
            AppError: the recording cannot be read, or the model takes no audio, language or prompt.
        """
        self._ensure_loaded([lora_request])
        part, engine = _audio(audio), self.engine
        engine.transcription_prompt(part, language=language, prompt=prompt)
        recording = engine.recordings.read(part)
        prompts = (
            engine.transcription_prompt(recording.part(piece), language=language, prompt=prompt)
            for piece in recording.pieces
        )
        sampling = sampling_params or SamplingParams(temperature=0.0, max_tokens=None)
        num_at_once = max(1, engine.config.max_num_seqs)
        segments, text, used, joint = list[TranscribedSegment](), "", None, Joint()
        outputs = self._outputs(((each, sampling, lora_request) for each in prompts), num_at_once)
        for index, (piece, output) in enumerate(zip(recording.pieces, outputs, strict=True)):
            said, used = output.outputs[0].text, output.lora_request
            text += joint.before(index, said) + said if said else ""
            segments.append(TranscribedSegment(*recording.times(piece), said))
        return TranscriptOutput(text, recording.seconds, tuple(segments), used)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        sampling = _one_each(sampling_params or SamplingParams(), len(prompts), "sampling_params")
        loras = _one_each(lora_request, len(prompts), "lora_request")
        self._ensure_loaded(loras)
        return list(self._outputs(zip(prompts, sampling, loras, strict=True), len(prompts)))

    def _outputs(
        self, items: Iterable[tuple[Prompt, SamplingParams, LoRARequest | None]], num_at_once: int
    ) -> Iterator[RequestOutput]:
        """Outputs in order, with so many prompts under way."""
        started: deque[tuple[Prompt, Answer, LoRARequest | None]] = deque()
        try:
            for prompt, params, lora in items:
                name = None if lora is None else lora.lora_name
                started.append((prompt, self.engine.start_sync(prompt, params, lora=name)[0], lora))
                if len(started) == num_at_once:
                    yield self._collect_first(started)
            while started:
                yield self._collect_first(started)
        finally:
            for _, answer, _ in started:
                answer.abort()

    def _collect_first(self, started: deque[tuple[Prompt, Answer, LoRARequest | None]]) -> RequestOutput:
        output = self._collect(*started[0])
        started.popleft()
        return output

    def _ensure_loaded(self, loras: Iterable[LoRARequest | None]) -> None:
        """Load what one call asks for, replacements first; nothing is loaded where the call contradicts itself."""
        wanted = list(dict.fromkeys(lora for lora in loras if lora is not None))
        places: dict[str, str] = {}
        for lora in wanted:
            if lora.load_inplace and not lora.lora_path:
                raise InvalidRequest(
                    f"lora_request asks for load_inplace of {lora.lora_name!r} without a lora_path; give the path.",
                    param="lora_request",
                )
            place = _place(lora.lora_path)
            if lora.lora_path and places.setdefault(lora.lora_name, place) != place:
                raise InvalidRequest(
                    f"lora_request gives the adapter {lora.lora_name!r} two paths in one call; use another name for one of them.",
                    param="lora_request",
                )
        for lora in sorted(wanted, key=lambda lora: not lora.load_inplace):
            self._load(lora)

    def _load(self, lora: LoRARequest) -> None:
        """One without a path is left to the sources of `lora_resolver`."""
        name, path, adapters = lora.lora_name, lora.lora_path, self.engine.adapters
        if not path:
            return
        if lora.load_inplace or not adapters.contains(name):
            adapters.load(name, path, load_inplace=lora.load_inplace)
        elif _place(path) != _place(source := adapters.get(name).source):
            raise InvalidRequest(
                f"lora_request gives the adapter {name!r} the path {path!r}, but that name was loaded from {source!r}; use "
                "another name, or LoRARequest(…, load_inplace=True) to replace it.",
                param="lora_request",
            )

    def _collect(self, prompt: Prompt, answer: Answer, lora: LoRARequest | None) -> RequestOutput:
        text, token_ids, logprobs = "", list[int](), list[TokenLogprob]()
        prompt_logprobs: list[TokenLogprob | None] = []
        stop_reason: str | int | None = None
        for delta in answer:
            text += delta.text
            token_ids += delta.token_ids
            logprobs += delta.logprobs
            prompt_logprobs += delta.prompt_logprobs
            stop_reason = delta.stop_reason
        receipt = answer.receipt
        if receipt.name is None:
            lora = None
        elif lora is None:
            info = self.engine.adapters.get(receipt.name)
            lora = LoRARequest(receipt.name, info.lora_int_id, info.source)
        output = CompletionOutput(0, text, token_ids, answer.finish_reason, stop_reason, logprobs)
        return RequestOutput(
            request_id=answer.request_id,
            prompt=prompt.text if isinstance(prompt, TextPrompt) else None,
            prompt_token_ids=list(answer.prompt_token_ids),
            outputs=[output],
            finished=True,
            lora_request=lora,
            receipt=receipt,
            prompt_logprobs=prompt_logprobs,
        )


def _place(address: str) -> str:
    """The same for all spellings of a folder's path; other addresses change with the path that they look like."""
    return os.path.realpath(os.path.expanduser(address))


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    """A single value for all, or a sequence of the prompts' number."""
    if isinstance(value, Sequence):
        if len(value) != count:
            raise InvalidRequest(f"{name} has {len(value)} items for {count} prompts.", param=name)
        return list(value)
    return [value] * count


def _to_prompt(item: PromptInput) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(item)
    if "prompt_token_ids" in item:
        return TokenPrompt(item["prompt_token_ids"])
    media = dict(item.get("multi_modal_data") or {})
    clips, images = (_listed(media.pop(modality, [])) for modality in ("audio", "image"))
    if media:
        raise InvalidRequest(
            f"multi_modal_data holds {', '.join(media)}; only audio and image are served.", param="multi_modal_data"
        )
    return TextPrompt(item["prompt"], [_audio(clip) for clip in clips], [ImagePart(image) for image in images])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _audio(source: Any) -> AudioPart:
    """A clip; a text is a path."""
    return AudioPart(Path(source) if isinstance(source, str) else source)


def _to_chat(messages: Sequence[Mapping[str, Any]]) -> ChatPrompt:
    return ChatPrompt([Message(message["role"], _to_content(message["content"])) for message in messages])


def _to_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    parts: list[TextPart | AudioPart | ImagePart] = []
    for part in content:
        if part.get("type") == "text":
            parts.append(TextPart(part["text"]))
        elif part.get("type") == "audio":
            parts.append(_audio(part["audio"]))
        elif part.get("type") == "image":
            parts.append(ImagePart(part["image"]))
        else:
            raise InvalidRequest(f"A content part has the type {part.get('type')!r}; known are text, audio and image.")
    return parts
