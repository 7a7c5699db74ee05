"""Makes a request ready to run: decode media and route, get the adapter, build the prompt.

The same steps in the same order serve the HTTP routes, the browser and the offline API. The first and the last work on
the caller's thread; between them the caller waits for the adapter in its own way, so that a slow one need not hold a
thread. Everything that a user sent is read and checked here, so that the engine's steps see only what is known to work.
Called by `engine/engine`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from adapters.errors import AdapterNotFound
from engine.adapter_text import AdapterTexts, TextSide
from engine.audio import AudioFrontend
from engine.errors import AppError, ContextTooLong, InvalidRequest, MediaError, ModelNotFound
from engine.media import decode_audio
from engine.prompt import BuiltPrompt, media_parts
from engine.request import AudioPart, ImagePart, Prompt, Receipt, SamplingParams
from engine.routing import Route, choose_route
from engine.sampler import check_logit_bias
from engine.state import EngineRequest, MediaInput

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


@dataclass(frozen=True)
class RoutedPrompt:
    """A prompt whose media are decoded, and who answers it."""

    prompt: Prompt
    sampling: SamplingParams
    media: Sequence[MediaInput]
    route: Route
    n: int


class Intake:
    """Turns prompts into `EngineRequest`s.

    Args:
        texts: prompts, decoding and end tokens of the base model and of each adapter.
        audio: the model's audio frontend, None when it takes no audio.
        adapters: the adapter manager, which knows the defaults too; None when adapters are off.
        base_names: names of the base model.
        limits: bounds on one request.
    """

    def __init__(
        self,
        *,
        texts: AdapterTexts,
        audio: AudioFrontend | None,
        adapters: AdapterManager | None,
        base_names: Sequence[str],
        limits: Limits,
    ) -> None:
        self._texts = texts
        self._audio = audio
        self._adapters = adapters
        self._base_names = tuple(base_names)
        self._limits = limits

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
        adapters = self._adapters
        route = choose_route(
            model=model,
            lora=lora,
            modalities={"audio"} if media else set(),
            base_names=self._base_names,
            defaults={} if adapters is None else adapters.defaults(),
            is_adapter=lambda name: adapters is not None and adapters.contains(name),
        )
        return RoutedPrompt(prompt, sampling, media, route, n)

    def acquire(self, routed: RoutedPrompt) -> Future[GenerationHandle] | None:
        """Second step: the route's adapter, done at once where it is in memory; None for the base model. Never blocks.

        Whoever gets the handle must pass it on to `build` or release it.
        """
        if routed.route.name is None:
            return None
        assert self._adapters is not None, "only adapters that exist are routed to"
        return self._adapters.acquire_soon(routed.route.name)

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
            receipt = Receipt(None, None, route.reason)
            if handle is not None:
                receipt = Receipt(route.name, handle.generation.digest, route.reason, load_ms=handle.load_ms)
            text = self._texts.of(None if handle is None else handle.generation)
            check_logit_bias(sampling, text.vocab_size)
            built = text.builder.build(routed.prompt, routed.media)
            max_tokens = self._max_tokens(sampling, built, getattr(routed.prompt, "is_transcript", False))
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
            modality = "audio" if isinstance(part, AudioPart) else "image"
            if modality == "image" or self._audio is None:
                raise MediaError(f"The model takes no {modality}; leave the {modality} part out.", param=part.param)
            counts[modality] += 1
            limit = self._limits.max_media.get(modality, 8)
            if counts[modality] > limit:
                raise MediaError(
                    f"The prompt holds more than {limit} {modality} item(s), which is the limit for one prompt; "
                    f"send fewer, earlier turns included, or start with --limit-mm-per-prompt '{{\"{modality}\": N}}'.",
                    param=part.param,
                )
        media = []
        for part in parts:
            assert isinstance(part, AudioPart) and self._audio is not None
            clip = decode_audio(
                part,
                rate=self._audio.rate,
                max_seconds=self._limits.max_audio_seconds,
                max_bytes=self._limits.max_media_bytes,
            )
            media.append(self._audio.prepare(clip))
        return media

    def _max_tokens(self, sampling: SamplingParams, built: BuiltPrompt, is_transcript: bool) -> int:
        prompt_len = len(built.token_ids)
        room = self._limits.max_model_len - prompt_len
        if room < 1 or (sampling.max_tokens or 1) > room:
            wanted = f" and max_tokens is {sampling.max_tokens}" if sampling.max_tokens else ""
            raise ContextTooLong(
                f"The prompt has {prompt_len} tokens{wanted}, but the context holds {self._limits.max_model_len}; "
                "shorten the prompt or lower max_tokens.",
                param="messages" if room < 1 else "max_tokens",
            )
        if sampling.max_tokens is None and is_transcript:
            # Ten placeholders stand for a second or less; nobody speaks as many tokens.
            return min(room, _TRANSCRIPT_MARGIN + sum(span.media.num_tokens for span in built.spans))
        return sampling.max_tokens or room


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


def _reseeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The n answers to a seeded request differ, and each is reproducible."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + index)
