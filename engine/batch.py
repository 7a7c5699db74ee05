"""Turns a plan into the step's numbers: the only place where batch metadata is built, whole, once a step.

Everything is made on the host and sent by the runner in one transfer. Owns no state. Called by `engine/runner`.

T packed tokens, padding included, B requests, R sampled rows, M blocks of the longest request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.scheduler import Plan, PlanItem
from engine.state import RequestState
from kernels import NULL_BLOCK, LoraSegment

TOKEN_IDS, KV_INDEX, FLIGHT_ROWS, POSITIONS = range(4)
"""Rows of `Batch.inputs`; from `POSITIONS` on, there is one row for each number that places a token."""


MAX_PROMPT_ROWS = 128
"""Prompt tokens whose logits are there at a time: enough for the head to be read seldom, few enough to need little memory."""


@dataclass(frozen=True)
class PromptPart:
    """A request's prompt tokens [start, end), which a step scores: gives the log probability of each.

    Attributes:
        scored: those that are no placeholders of media, in order.
        num_top: likeliest tokens that the request asks for.
    """

    state: RequestState
    start: int
    end: int
    scored: list[int]
    num_top: int


@dataclass(frozen=True)
class PromptSlice:
    """S prompt tokens to be scored at once, at most `MAX_PROMPT_ROWS`; as arrays, which are pickled faster than tensors.

    Attributes:
        rows: [S] int64, the packed token before each.
        token_ids: [S] int64.
        head_segments: adapters of the S rows.
        num_top: likeliest tokens to tell of, the same for all slices of a step.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    head_segments: tuple[LoraSegment, ...]
    num_top: int


@dataclass(frozen=True)
class Batch:
    """One step's input, on the host.

    Attributes:
        inputs: [3 + K, T] int64: token ids; where their keys and values go in the pool (-1 for padding); their rows among
            the tokens that the step before sampled, -1 where the id is known; and the K rows of positions that the
            rotary embedding takes (`engine/positions`).
        query_lens, kv_lens: B counts of query tokens and of keys, this step's included.
        block_table: [B, M] int32, padded with the null block.
        lora_segments: adapters of the packed tokens.
        logits_at: [R] int64, packed tokens whose logits are needed.
        head_segments: adapters of the R rows.
        sampled: the R items that `logits_at` belongs to, in order.
        mutual_spans: [T, 2] int32 or None: `[start, end)` of the keys that a token sees although they follow it, as
            places in its request; (0, 0) for none. None where no token does.
        prompt_parts: prompt tokens to be scored, by request.
        prompt_slices: the same tokens in the same order, by what is computed at a time.
    """

    inputs: torch.Tensor
    query_lens: list[int]
    kv_lens: list[int]
    block_table: torch.Tensor
    lora_segments: tuple[LoraSegment, ...]
    logits_at: torch.Tensor
    head_segments: tuple[LoraSegment, ...]
    sampled: tuple[PlanItem, ...]
    mutual_spans: torch.Tensor | None = None
    prompt_parts: tuple[PromptPart, ...] = ()
    prompt_slices: tuple[PromptSlice, ...] = ()

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.inputs.shape[1])

    @property
    def is_decode(self) -> bool:
        """Whether each request has one token, and all are sampled."""
        return sum(self.query_lens) == len(self.query_lens) == len(self.logits_at)


def build_batch(plan: Plan, block_size: int, num_tokens: int | None = None, *, num_position_rows: int = 1) -> Batch:
    """The numbers of `plan`, whose items are ordered by LoRA row; padded to `num_tokens` tokens where that is given."""
    items = plan.items
    starts = np.fromiter((item.start for item in items), np.int64, len(items))
    ends = np.fromiter((item.end for item in items), np.int64, len(items))
    query_lens = ends - starts
    token_ends = np.cumsum(query_lens)
    num_packed = int(token_ends[-1])

    inputs = np.zeros((POSITIONS + num_position_rows, num_packed if num_tokens is None else num_tokens), np.int64)
    inputs[KV_INDEX, num_packed:] = -1
    inputs[FLIGHT_ROWS] = -1
    table = _block_table(plan, block_size)
    row_of_token = np.repeat(np.arange(len(items)), query_lens)
    positions = np.arange(num_packed) + np.repeat(ends - token_ends, query_lens)
    deltas = np.fromiter((item.state.request.position_delta for item in items), np.int64, len(items))
    inputs[POSITIONS:, :num_packed] = positions + np.repeat(deltas, query_lens)
    in_block = positions % block_size
    inputs[KV_INDEX, :num_packed] = (
        table[row_of_token, positions // block_size].astype(np.int64) * block_size + in_block
    )
    places, flight_rows = list[int](), list[int]()  # of tokens in flight: most, where steps run ahead
    for item, token_end in zip(items, token_ends.tolist(), strict=True):
        state, start, end, _ = item
        token_start = token_end - (end - start)
        num_known = len(state.token_ids) - start
        if num_known < end - start:
            places.append(token_end - 1)
            flight_rows.append(state.flight_row)
        if num_known > 0:
            known = state.token_ids[start:end]
            inputs[TOKEN_IDS, token_start : token_start + len(known)] = known
        prompt_positions = state.request.prompt_positions
        if prompt_positions is not None and start < prompt_positions.shape[1]:
            own = prompt_positions[:, start:end]
            inputs[POSITIONS:, token_start : token_start + own.shape[1]] = own
    inputs[FLIGHT_ROWS, places] = flight_rows

    sampled = [row for row, item in enumerate(items) if item.is_sampled]
    slots = [item.state.lora_slot for item in items]
    lens: list[int] = query_lens.tolist()
    parts = _prompt_parts(plan)
    segments = _segments(slots, lens)
    is_decode = len(sampled) == len(items) == num_packed
    return Batch(
        inputs=torch.from_numpy(inputs),
        query_lens=lens,
        kv_lens=ends.tolist(),
        block_table=torch.from_numpy(table),
        lora_segments=segments,
        logits_at=torch.from_numpy(token_ends[sampled] - 1),
        head_segments=segments if is_decode else _segments([slots[row] for row in sampled], [1] * len(sampled)),
        sampled=tuple(items[row] for row in sampled),
        mutual_spans=_mutual_spans(plan, num_packed),
        prompt_parts=tuple(part for _, part in parts),
        prompt_slices=_prompt_slices(parts) if parts else (),
    )


def _prompt_parts(plan: Plan) -> list[tuple[int, PromptPart]]:
    """Prompt tokens to be scored, each part with the packed place that its request's first token has or would have."""
    parts, chunk_start = list[tuple[int, PromptPart]](), 0
    if all(item.state.num_scored is None for item in plan.items):
        return parts
    for item in plan.items:
        scored, state = item.scored(), item.state
        if scored:
            spans = state.request.spans
            places = [place for place in scored if not any(span.start <= place < span.end for span in spans)]
            num_top = state.request.sampling.prompt_logprobs or 0
            parts.append((chunk_start - item.start, PromptPart(state, scored.start, scored.stop, places, num_top)))
        chunk_start += item.end - item.start
    return parts


def _prompt_slices(parts: list[tuple[int, PromptPart]]) -> tuple[PromptSlice, ...]:
    """All tokens of the parts, cut into slices of bounded size whatever request they belong to."""
    num_top = max(part.num_top for _, part in parts)
    rows = np.array([offset + place - 1 for offset, part in parts for place in part.scored], np.int64)
    ids = np.array([part.state.token_ids[place] for _, part in parts for place in part.scored], np.int64)
    slots = [part.state.lora_slot for _, part in parts for _ in part.scored]
    return tuple(
        PromptSlice(rows[start:end], ids[start:end], _segments(slots[start:end], [1] * len(slots[start:end])), num_top)
        for start in range(0, len(rows), MAX_PROMPT_ROWS)
        for end in (start + MAX_PROMPT_ROWS,)
    )


def _mutual_spans(plan: Plan, num_tokens: int) -> torch.Tensor | None:
    """`Batch.mutual_spans`; a chunk never ends inside such a span, so all its keys are there."""
    spans: np.ndarray | None = None
    offset = 0
    if not any(item.state.request.spans for item in plan.items):
        return None
    for item in plan.items:
        for span, start, end in item.media():
            if span.media.is_mutual:
                assert end == span.end, "a chunk ends inside a span whose tokens see each other"
                spans = np.zeros((num_tokens, 2), np.int32) if spans is None else spans
                spans[start - item.start + offset : end - item.start + offset] = (span.start, span.end)
        offset += item.end - item.start
    return None if spans is None else torch.from_numpy(spans)


def _block_table(plan: Plan, block_size: int) -> np.ndarray:
    """[B, M] int32, padded with the null block."""
    counts = [-(-item.end // block_size) for item in plan.items]
    table = np.full((len(counts), max(counts)), NULL_BLOCK, np.int32)
    for row, (item, count) in enumerate(zip(plan.items, counts, strict=True)):
        table[row, :count] = item.state.block_row()[:count]
    return table


def _segments(slots: list[int], lens: list[int]) -> tuple[LoraSegment, ...]:
    """Neighbouring requests on the same LoRA row become one segment; base requests (row -1) none."""
    segments: list[LoraSegment] = []
    start = 0
    for lora_slot, length in zip(slots, lens, strict=True):
        end = start + length
        if lora_slot >= 0:
            if segments and segments[-1].lora_slot == lora_slot and segments[-1].token_end == start:
                segments[-1] = LoraSegment(lora_slot, segments[-1].token_start, end)
            else:
                segments.append(LoraSegment(lora_slot, start, end))
        start = end
    return tuple(segments)
