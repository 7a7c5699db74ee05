"""One request's life inside the engine: the frozen input and the mutable state.

`EngineRequest` is what `engine/intake` hands to the loop; `RequestState` is what the scheduler, batch and loop work on.
Touched by the engine thread only, once submitted.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.block_pool import hash_block, root_hash
from engine.request import Modality, Receipt, SamplingParams

if TYPE_CHECKING:
    from adapters.generation import GenerationHandle
    from engine.adapter_text import TextSide
    from engine.answer import Answer
    from engine.detokenizer import Detokenizer, StopMatcher
    from engine.guides import Guide
    from engine.logprobs import PackedPart
    from engine.sampler import SamplerRow
    from engine.tools.parser import CallParser


@dataclass(frozen=True)
class MediaInput:
    """One media item, ready for the model's tower.

    Attributes:
        digest: content digest of the decoded media and of the preprocessing.
        features: what the tower takes, by the names of its arguments.
        num_tokens: placeholders that it fills in the prompt.
        modality: audio or image.
        is_silent: whether there is nothing in it to hear.
        grid: rows and columns in which an image's placeholders stand, where their positions follow from that.
        is_mutual: whether its placeholders see each other in both directions, so that they belong in one chunk.
    """

    digest: str
    features: Mapping[str, torch.Tensor]
    num_tokens: int
    modality: Modality = "audio"
    is_silent: bool = False
    grid: tuple[int, int] | None = None
    is_mutual: bool = False

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Equal for items that a tower may take in one call: of one modality, and of equal shapes."""
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in self.features.items())
        return (self.modality, self.grid, *shapes)


@dataclass(frozen=True)
class MediaSpan:
    """Prompt tokens [start, start + media.num_tokens) are placeholders of `media`."""

    start: int
    media: MediaInput

    @property
    def end(self) -> int:
        """First token after the span."""
        return self.start + self.media.num_tokens


@dataclass(frozen=True)
class EngineRequest:
    """A prompt that is ready to be scheduled.

    Attributes:
        prompt_token_ids: [P], placeholders included.
        spans: media in the prompt, in order, not overlapping.
        max_tokens: tokens to generate at most; P + max_tokens fits the context.
        eos_token_ids: tokens that end the answer (unless `sampling.ignore_eos`).
        handle: the adapter's generation, held until the request ends; None for the base model.
        on_logits: called on the engine thread with the logits [V] float32 of each token that is sampled, which it must
            copy; it must be quick and never raise. None for users' requests.
        receipt: without queue time and cached tokens, which are not known yet.
        guide: what the answer may be; None for anything.
        call_parser: reads calls of functions out of the answer's text, for whoever has the answer; None for plain text.
        shown_ids: special tokens that the answer's text shows.
        text: the tokenizer that made the prompt, with what decodes the answer; None for the loop's own.
        prompt_positions: [K, P] int64, what the rotary embedding takes for the prompt; None where that is a token's
            place plus `position_delta`, as for all tokens after the prompt.
    """

    request_id: str
    prompt_token_ids: list[int]
    spans: tuple[MediaSpan, ...]
    sampling: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int]
    handle: GenerationHandle | None
    receipt: Receipt
    text: TextSide | None = None
    guide: Guide | None = None
    call_parser: CallParser | None = None
    shown_ids: frozenset[int] = frozenset()
    on_logits: Callable[[torch.Tensor], None] | None = None
    prompt_positions: np.ndarray[Any, np.dtype[np.int64]] | None = None
    position_delta: int = 0

    @property
    def generation_digest(self) -> str | None:
        """Digest of the adapter's content, None for the base model."""
        return self.handle.generation.digest if self.handle else None

    def end_of_chunk(self, start: int, end: int) -> int:
        """The last place at or before `end` where a chunk from `start` may end: not inside a span of mutual tokens.

        `start` itself where there is none between.
        """
        for span in self.spans:
            if span.media.is_mutual and span.start < end < span.end:
                return max(start, span.start)
        return end


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class RequestState:
    """The mutable side of a request.

    Attributes:
        token_ids: prompt and answer so far.
        output_token_ids: the answer alone; the sampler row sees the same list.
        num_in_flight: tokens that were sampled on the device and are not known on the host yet (0 or 1).
        flight_row: row of the token in flight among those that its step sampled.
        num_computed: tokens whose keys and values lie in `blocks`, or will once the launched steps have run.
        block_hashes: hashes of the full blocks of `token_ids` so far, in order.
        num_published: how many of `blocks` have been offered to the prefix cache.
        lora_slot: row of the LoRA buffers while running; -1 for the base model.
        num_scored: the prompt's first tokens whose log probabilities are known; None where nobody asks for them.
        scored_parts: those log probabilities, until they are delivered.
        media_features: tower outputs by digest, kept until the request ends so that preemption recomputes none.
        times_passed: how often a later request was admitted while this one waited for a LoRA slot.
    """

    request: EngineRequest
    answer: Answer
    sampler_row: SamplerRow
    detokenizer: Detokenizer
    stop_matcher: StopMatcher
    token_ids: list[int]
    output_token_ids: list[int]
    status: Status = Status.WAITING
    num_in_flight: int = 0
    flight_row: int = -1
    num_computed: int = 0
    num_published: int = 0
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    lora_slot: int = -1
    num_scored: int | None = None
    scored_parts: list[PackedPart] = field(default_factory=list)
    media_features: dict[str, torch.Tensor] = field(default_factory=dict)
    times_passed: int = 0
    num_preemptions: int = 0
    submitted_at: float = field(default_factory=time.monotonic)
    has_started: bool = False
    _row_source: list[int] | None = None
    _row: np.ndarray[Any, np.dtype[np.int32]] = field(default_factory=lambda: np.zeros(0, np.int32))
    _row_len: int = 0

    @property
    def prompt_len(self) -> int:
        """P, in tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def num_outputs(self) -> int:
        """How many tokens were generated so far."""
        return len(self.output_token_ids)

    def append(self, token_id: int) -> None:
        """Add a generated token; its keys and values are pending until the next step."""
        self.token_ids.append(token_id)
        self.output_token_ids.append(token_id)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer, one in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are not computed yet; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_reusable(self) -> int:
        """Tokens that need not be computed where their keys are cached: the next token depends on the last one's hidden
        state, and a prompt token's log probability on that of the token before it."""
        if self.num_scored is None or self.num_scored >= self.prompt_len:
            return len(self.token_ids) - 1
        return self.num_scored - 1

    @property
    def is_sampled_out(self) -> bool:
        """Whether the token in flight is the last that the request may have."""
        return self.num_in_flight > 0 and self.num_outputs + self.num_in_flight >= self.request.max_tokens

    def block_row(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """`blocks` as [n] int32; only what is new since the last call is converted."""
        if self._row_source is not self.blocks:
            self._row_source, self._row, self._row_len = self.blocks, np.zeros(16, np.int32), 0
        length = len(self.blocks)
        if length > self._row_len:
            if length > self._row.shape[0]:
                self._row = np.resize(self._row, 2 * length)
            self._row[self._row_len : length] = self.blocks[self._row_len :]
        self._row_len = length
        return self._row[:length]

    def update_hashes(self, block_size: int) -> None:
        """Extend `block_hashes` over all full blocks of `token_ids`."""
        while (len(self.block_hashes) + 1) * block_size <= len(self.token_ids):
            start = len(self.block_hashes) * block_size
            end = start + block_size
            parent = self.block_hashes[-1] if self.block_hashes else self._root_hash()
            media_keys = [
                f"{span.media.digest}@{span.start - start}"
                for span in self.request.spans
                if span.start < end and start < span.end
            ]
            self.block_hashes.append(hash_block(parent, self.token_ids[start:end], media_keys))

    def _root_hash(self) -> bytes:
        """Start of the hash chain; keys turned by other frequencies are never shared."""
        request = self.request
        return root_hash(
            request.generation_digest, is_long=request.prompt_positions is None and request.position_delta > 0
        )
