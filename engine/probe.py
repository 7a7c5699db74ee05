"""Measures how much an adapter changes the base model's answers: a few fixed prompts, answered by both.

The base model begins an answer to each prompt, and both then say how likely they find each next token of it, as ordinary
requests of one token, one at a time, so that a probe never takes more than one place in a batch. What they compute is
exactly what requests of users compute. Called by `engine/engine` on a caller's thread.

N positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from adapters.errors import AppError
from adapters.generation import GenerationHandle
from adapters.upload import ProbeReport
from engine.answer import Answer
from engine.architectures import Architecture
from engine.config import EMBEDDED_ASSETS
from engine.errors import EngineClosed
from engine.prompt import BuiltPrompt
from engine.request import (
    PROBE,
    AudioPart,
    ChatPrompt,
    ImagePart,
    Message,
    Part,
    Prompt,
    Receipt,
    SamplingParams,
    TextPart,
    TextPrompt,
)
from engine.state import EngineRequest

PROBE_TIMEOUT_S = 20.0
NUM_POSITIONS = 4  # of each prompt
TEXTS = (
    "What is the capital of France?",
    "Write a SQL query that counts the users of each country.",
    "Translate into German: good morning, everyone.",
)
# Mean KL in nats that the order of additions alone can make, by the width of the model's numbers in bytes.
NOISE = {4: 1e-6, 2: 1e-3}
SLIGHT_KL = 0.01


def probe_prompts(architecture: Architecture, *, has_template: bool) -> list[Prompt]:
    """Texts, a clip where the model takes audio and the project's own clips are there, a picture where it takes images."""
    if not has_template:
        return [TextPrompt(text) for text in TEXTS]
    prompts: list[Prompt] = [ChatPrompt([Message("user", text)]) for text in TEXTS]
    clip = next(iter(sorted((EMBEDDED_ASSETS / "audio").glob("*.wav"))), None)
    if clip is not None and "audio" in architecture.modalities:
        parts: list[Part] = [AudioPart(clip), TextPart(architecture.transcription[-1].request)]
        prompts.append(ChatPrompt([Message("user", parts)]))
    if "image" in architecture.modalities:
        prompts.append(ChatPrompt([Message("user", [ImagePart(_picture()), TextPart("What is shown in this image?")])]))
    return prompts


def _picture() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[224, 224, 3]: a bright disc on colours that change from corner to corner."""
    rows, columns = np.mgrid[0:224, 0:224]
    image = np.stack([rows, columns, 223 - rows], axis=-1)
    image[(rows - 90) ** 2 + (columns - 130) ** 2 < 50**2] = (250, 220, 40)
    return image.astype(np.uint8)


class _TooLate(Exception):
    """The time for the probe is over, or the engine does not answer at all."""


@dataclass
class _Row:
    """Takes the logits [V] of the first token that a request samples; further ones were launched ahead."""

    logits: torch.Tensor | None = field(default=None)

    def __call__(self, logits: torch.Tensor) -> None:
        if self.logits is None:
            self.logits = logits.clone()


class Prober:
    """Probes one adapter at a time.

    Args:
        submit: queues a request whose events go to the answer.
        build: token ids of a prompt; called when the first probe needs them.
        place: `EngineRequest.prompt_positions` and `position_delta` of a prompt.
        prompts: what adapters are tried on.
        max_model_len: prompts that do not fit are left out.
        max_mutual_tokens: so are those with a longer span of tokens that see each other, which belongs in one step.
        num_bytes: of one number of the model's, which sets how much of a difference is noise.
    """

    def __init__(
        self,
        submit: Callable[[EngineRequest, Answer], None],
        build: Callable[[Prompt], BuiltPrompt],
        place: Callable[[BuiltPrompt], tuple[np.ndarray[Any, Any] | None, int]],
        prompts: Sequence[Prompt],
        *,
        max_model_len: int,
        max_mutual_tokens: int,
        num_bytes: int,
    ) -> None:
        self._submit = submit
        self._build = build
        self._place = place
        self._prompts = tuple(prompts)
        self._built: list[BuiltPrompt] | None = None
        self._max_model_len = max_model_len
        self._max_mutual_tokens = max_mutual_tokens
        self._noise = NOISE.get(num_bytes, NOISE[2])
        self._turn = threading.Lock()

    def measure(self, handle: GenerationHandle, timeout_s: float) -> ProbeReport:
        """The difference that the adapter makes; the handle stays the caller's. Takes `timeout_s` seconds at most.

        What was measured by then counts; where that is nothing, or the engine is closing, the verdict is `not measured`.
        """
        end = time.monotonic() + timeout_s
        differences: list[tuple[float, bool]] = []
        if not self._turn.acquire(timeout=timeout_s):
            return self._judge([], handle)
        try:
            for built in self.built_prompts():
                if self._fits(built):
                    self._compare(built, handle, end, differences)
        except (_TooLate, EngineClosed):
            pass
        except AppError:  # The base model answers these prompts, so it is the adapter whose numbers are broken.
            return ProbeReport(None, None, len(differences), "broken")
        finally:
            self._turn.release()
        return self._judge(differences, handle)

    def built_prompts(self) -> list[BuiltPrompt]:
        """What adapters are tried on, as the model sees it, without what this server's settings refuse."""
        if self._built is None:
            self._built = []
            for prompt in self._prompts:
                with contextlib.suppress(AppError):  # such as media of which a prompt may hold none
                    self._built.append(self._build(prompt))
        return self._built

    def _fits(self, built: BuiltPrompt) -> bool:
        longest = max((span.media.num_tokens for span in built.spans if span.media.is_mutual), default=0)
        return len(built.token_ids) + NUM_POSITIONS < self._max_model_len and longest <= self._max_mutual_tokens

    def _compare(
        self, built: BuiltPrompt, handle: GenerationHandle, end: float, differences: list[tuple[float, bool]]
    ) -> None:
        """Add (KL in nats, whether the likeliest token differs) of each position of one prompt."""
        token_ids = list(built.token_ids)
        for _ in range(NUM_POSITIONS):
            base = self._logits(built, token_ids, None, end)
            adapted = self._logits(built, token_ids, handle, end)
            differences.append(_difference(adapted, base))
            token_ids.append(int(base.argmax()))

    def _logits(
        self, built: BuiltPrompt, token_ids: list[int], handle: GenerationHandle | None, end: float
    ) -> torch.Tensor:
        """[V] float64 of the token after `token_ids`. Raises `_TooLate` and `AppError`."""
        row = _Row()
        digest = None if handle is None else handle.generation.digest
        receipt = Receipt(None if handle is None else handle.name, digest, PROBE)
        prompt_positions, position_delta = self._place(replace(built, token_ids=token_ids))
        request = EngineRequest(
            request_id=f"probe-{uuid.uuid4().hex}",
            prompt_token_ids=list(token_ids),
            spans=built.spans,
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            max_tokens=1,
            eos_token_ids=frozenset(),
            handle=None if handle is None else handle.fork(),
            receipt=receipt,
            on_logits=row,
            prompt_positions=prompt_positions,
            position_delta=position_delta,
        )
        answer = Answer(request.request_id, receipt, request.prompt_token_ids)
        self._submit(request, answer)
        timer = threading.Timer(max(0.0, end - time.monotonic()), answer.abort)
        timer.start()
        try:
            for _ in answer:
                pass
        except AppError as error:
            if handle is None:
                raise _TooLate from error
            raise
        finally:
            timer.cancel()
        if answer.finish_reason == "abort" or row.logits is None:
            raise _TooLate
        return row.logits.double().cpu()

    def _judge(self, differences: Sequence[tuple[float, bool]], handle: GenerationHandle) -> ProbeReport:
        if not differences:
            is_zero = handle.generation.report.is_zero_effect
            return ProbeReport(None, None, 0, "no effect" if is_zero else "not measured")
        mean_kl = sum(kl for kl, _ in differences) / len(differences)
        top1_changed = sum(changed for _, changed in differences) / len(differences)
        if handle.generation.report.is_zero_effect or mean_kl <= self._noise:
            verdict = "no effect"
        elif mean_kl < SLIGHT_KL and not top1_changed:
            verdict = "slight effect"
        else:
            verdict = "effect"
        return ProbeReport(mean_kl, top1_changed, len(differences), verdict)


def _difference(adapted: torch.Tensor, base: torch.Tensor) -> tuple[float, bool]:
    """KL(adapted || base) in nats, and whether the likeliest token differs, of two [V] float64 rows of logits.

    Over the tokens that the base model has: those that an adapter brings along it can never give.
    """
    is_shared = base.isfinite()
    log_p, log_q = adapted[is_shared].log_softmax(-1), base[is_shared].log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).nansum()
    return max(0.0, float(kl)), bool(adapted.argmax() != base.argmax())
