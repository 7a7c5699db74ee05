"""Makes a request ready to run: decode media and route, get the adapter, build the prompt.

The same steps in the same order serve the HTTP routes, the browser and the offline API. The first and the last work on
the caller's thread; between them the caller waits for the adapter in its own way, so that a slow one need not hold a
thread. Everything that a user sent is read and checked here, so that the engine's steps see only what is known to work.
Called by `engine/starter`.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from adapters.errors import AdapterNotFound
from engine.adapter_text import AdapterTexts, TextSide
from engine.errors import AppError, ContextTooLong, InvalidRequest, MediaError, ModelNotFound
from engine.frontend import Frontend, modality_of
from engine.guides import Guide, GuideCompiler
from engine.positions import LONG, grid_positions
from engine.prompt import BuiltPrompt, media_parts
from engine.request import AudioPart, ImagePart, Prompt, Receipt, SamplingParams
from engine.routing import Route, choose_route
from engine.sampler import check_logit_bias
from engine.state import EngineRequest, MediaInput
from engine.tools.format import ToolFormat
from engine.tools.parser import CallParser
from engine.tools.spec import ToolUse

if TYPE_CHECKING:
    from adapters.generation import GenerationHandle
    from adapters.manager import AdapterManager


_TRANSCRIPT_MARGIN = 32


@dataclass(frozen=True)
class Limits:
    """Bounds on one request."""

    max_model_len: int
    max_media: Mapping[str, int]
    max_audio_seconds: float
    max_media_bytes: int
    max_mutual_tokens: int
    """Longest span whose tokens see each other, since it belongs in one step."""


@dataclass(frozen=True)
class RoutedPrompt:
    """A prompt whose media are decoded, and who answers it."""

    prompt: Prompt
    sampling: SamplingParams
    media: Sequence[MediaInput]
    route: Route
    n: int


@dataclass(frozen=True)
class HeldRoute:
    """Who answers a set of prompts, decided once: the version of the adapter stays the same until it is released."""

    route: Route
    handle: GenerationHandle | None

    @property
    def receipt(self) -> Receipt:
        """As the prompts' own, before any of them has run."""
        return make_receipt(self.route, self.handle)

    def fork(self) -> HeldRoute:
        """The same, to be released on its own."""
        return HeldRoute(self.route, None if self.handle is None else self.handle.fork())

    def release(self) -> None:
        """Give the adapter back; prompts that have started keep theirs."""
        if self.handle is not None:
            self.handle.release()


class Intake:
    """Turns prompts into `EngineRequest`s.

    Args:
        texts: prompts, decoding and end tokens of the base model and of each adapter.
        frontends: one for each modality that the model takes.
        adapters: the adapter manager, which knows the defaults too; None when adapters are off.
        base_names: names of the base model.
        limits: bounds on one request.
        has_grid_positions: whether images are placed by row and column.
        short_len: longest request, in tokens, that takes the frequencies for short ones; None where there is one set.
    """

    def __init__(
        self,
        *,
        texts: AdapterTexts,
        frontends: Sequence[Frontend],
        adapters: AdapterManager | None,
        base_names: Sequence[str],
        limits: Limits,
        has_grid_positions: bool = False,
        short_len: int | None = None,
    ) -> None:
        self._texts = texts
        self._frontends = {frontend.modality: frontend for frontend in frontends}
        self._adapters = adapters
        self._base_names = tuple(base_names)
        self._limits = limits
        self._has_grid_positions = has_grid_positions
        self._short_len = short_len
        self._guides = GuideCompiler()

    def route(
        self, prompt: Prompt, sampling: SamplingParams, *, model: str | None, lora: str | None, n: int
    ) -> RoutedPrompt:
        """First step: decode the prompt's media and choose who answers.

        Raises:
            AppError: whatever is wrong with the request, with the field at fault.
        """
        if n < 1:
            raise InvalidRequest(f"n is {n}, but must be 1 or more.", param="n")
        media = self._decode(media_parts(prompt))
        route = self.choose({item.modality for item in media}, model=model, lora=lora)
        return RoutedPrompt(prompt, sampling, media, route, n)

    def choose(self, modalities: Collection[str], *, model: str | None, lora: str | None) -> Route:
        """Who answers a prompt that holds these modalities; raises as `choose_route` does."""
        adapters = self._adapters
        return choose_route(
            model=model,
            lora=lora,
            modalities=modalities,
            base_names=self._base_names,
            defaults={} if adapters is None else adapters.defaults(),
            is_adapter=lambda name: adapters is not None and adapters.contains(name),
        )

    def acquire(self, route: Route) -> Future[GenerationHandle] | None:
        """Second step: the route's adapter, done at once where it is in memory; None for the base model. Never blocks.

        Whoever gets the handle must pass it on to `build` or release it.
        """
        if route.name is None:
            return None
        assert self._adapters is not None, "only adapters that exist are routed to"
        return self._adapters.acquire_soon(route.name)

    def build(
        self, routed: RoutedPrompt, handle: GenerationHandle | None, *, request_id: str | None
    ) -> list[EngineRequest]:
        """Last step: one request for each of n answers, all ready to be submitted. Releases `handle`.

        Each request holds the adapter's generation; whoever gets them must submit them or release their handles.

        Raises:
            AppError: the prompt cannot be served as asked.
        """
        sampling, route = routed.sampling, routed.route
        try:
            receipt = make_receipt(route, handle)
            text = self._texts.of(None if handle is None else handle.generation)
            check_logit_bias(sampling, text.vocab_size)
            built = text.builder.build(routed.prompt, routed.media)
            max_tokens = self._max_tokens(sampling, built, getattr(routed.prompt, "is_transcript", False))
            prompt_positions, position_delta = self.positions(built, max_tokens)
            tools = getattr(routed.prompt, "tools", None)
            guide = self._guide(sampling, tools, text)
            base_id = request_id or uuid.uuid4().hex
            return [
                EngineRequest(
                    request_id=base_id if routed.n == 1 else f"{base_id}-{index}",
                    prompt_token_ids=built.token_ids,
                    spans=built.spans,
                    sampling=_reseeded(sampling, index),
                    max_tokens=max_tokens,
                    eos_token_ids=text.eos_token_ids,
                    handle=None if handle is None else handle.fork(),
                    receipt=receipt,
                    text=text,
                    prompt_positions=prompt_positions,
                    position_delta=position_delta,
                    guide=None if guide is None else guide.fork(),
                    call_parser=None if tools is None else _call_parser(tools, text, guide),
                    shown_ids=frozenset() if tools is None else _mark_ids(text),
                )
                for index in range(routed.n)
            ]
        finally:
            if handle is not None:
                handle.release()

    def build_only(self, prompt: Prompt, text: TextSide) -> BuiltPrompt:
        """Token ids of a prompt, without routing or running anything."""
        return text.builder.build(prompt, self._decode(media_parts(prompt)))

    def _decode(self, parts: Sequence[AudioPart | ImagePart]) -> list[MediaInput]:
        counts = {"audio": 0, "image": 0}
        for part in parts:
            modality = modality_of(part)
            if modality not in self._frontends:
                raise MediaError(f"The model takes no {modality}; leave the {modality} part out.", param=part.param)
            counts[modality] += 1
            limit = self._limits.max_media.get(modality, 8)
            if counts[modality] > limit:
                raise MediaError(
                    f"The prompt holds more than {limit} {modality} item(s), which is the limit for one prompt; "
                    f"send fewer, earlier turns included, or start with --limit-mm-per-prompt '{{\"{modality}\": N}}'.",
                    param=part.param,
                )
        items = [self._frontends[modality_of(part)].read(part, self._limits) for part in parts]
        modalities = {item.modality for item in items}
        return [self._frontends[item.modality].beside(item, modalities) for item in items]

    def _guide(self, sampling: SamplingParams, tools: ToolUse | None, text: TextSide) -> Guide | None:
        """What the answer may be; None for anything."""
        schema = sampling.json_schema
        if tools is None or (schema is None and not tools.needs_guide):
            return None if schema is None else self._guides.compile(schema, text)
        if sampling.ignore_eos:
            raise InvalidRequest(
                "ignore_eos lets no call end; leave it out, or send tool_choice: none.", param="ignore_eos"
            )
        return self._guides.compile_calls(tools, _tool_format(text), schema, text)

    def positions(self, built: BuiltPrompt, max_tokens: int) -> tuple[np.ndarray | None, int]:
        """`EngineRequest.prompt_positions` and `position_delta`."""
        prompt_len = len(built.token_ids)
        if self._has_grid_positions and any(span.media.grid for span in built.spans):
            return grid_positions(prompt_len, built.spans)
        # The last token of the answer is never read.
        is_long = self._short_len is not None and prompt_len + max(max_tokens, 1) - 1 > self._short_len
        return None, LONG if is_long else 0

    def _max_tokens(self, sampling: SamplingParams, built: BuiltPrompt, is_transcript: bool) -> int:
        prompt_len = len(built.token_ids)
        longest_span = max((span.media.num_tokens for span in built.spans if span.media.is_mutual), default=0)
        if longest_span > self._limits.max_mutual_tokens:
            raise MediaError(
                f"An image takes {longest_span} tokens in one step, but a step holds {self._limits.max_mutual_tokens}; "
                "start with a larger --max-num-batched-tokens."
            )
        room = self._limits.max_model_len - prompt_len
        if room < 0 or (1 if sampling.max_tokens is None else sampling.max_tokens) > room:
            wanted = f" and max_tokens is {sampling.max_tokens}" if sampling.max_tokens else ""
            raise ContextTooLong(
                f"The prompt has {prompt_len} tokens{wanted}, but the context holds {self._limits.max_model_len}; "
                "shorten the prompt or lower max_tokens.",
                param="messages" if room < 1 else "max_tokens",
            )
        if sampling.max_tokens is None and is_transcript:
            # Ten placeholders stand for a second or less; nobody speaks as many tokens.
            return min(room, _TRANSCRIPT_MARGIN + sum(span.media.num_tokens for span in built.spans))
        return room if sampling.max_tokens is None else sampling.max_tokens


def make_receipt(route: Route, handle: GenerationHandle | None) -> Receipt:
    """What is known of an answer before it has run."""
    if handle is None:
        return Receipt(None, None, route.reason)
    return Receipt(route.name, handle.generation.digest, route.reason, load_ms=handle.load_ms)


def explain_missing(error: AppError, route: Route) -> AppError:
    """What to tell where an adapter could not be had: a default that is gone is an error of its own."""
    if not isinstance(error, AdapterNotFound) or route.reason == "explicit":
        return error
    modality = route.reason.partition(":")[2].replace("+", " and ")
    return ModelNotFound(
        f"The default adapter for {modality}, {route.name!r}, is not loaded; load it again, or ask with lora none for "
        "the base model.",
        param="lora",
    )


def _tool_format(text: TextSide) -> ToolFormat:
    """How calls are written, for a prompt with tools that was built."""
    assert text.builder.tools is not None and text.builder.tools.tool_format is not None, "building refuses others"
    return text.builder.tools.tool_format


def _call_parser(tools: ToolUse, text: TextSide, guide: Guide | None) -> CallParser:
    return CallParser(
        _tool_format(text), tools.callable_names, is_parallel=tools.is_parallel, is_guided=guide is not None
    )


def _mark_ids(text: TextSide) -> frozenset[int]:
    """Special tokens that the text of an answer with calls must show."""
    tool_format = _tool_format(text)
    marks = {*tool_format.marks, *tool_format.starts, *tool_format.ends}
    return frozenset(id_ for id_, token in text.tokenizer.added_tokens_decoder.items() if token.content in marks)


def _reseeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The n answers to a seeded request differ, and each is reproducible."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + index)
