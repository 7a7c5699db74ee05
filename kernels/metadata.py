"""Per-step inputs of the kernels: built once a step, whole, and shared by all layers.

Owns the two descriptions of a packed batch: which tokens belong to which request and where their keys and values lie
(`AttentionMetadata`), and which tokens use which adapter (`LoraSegment`, `LoraMetadata`). Built by `engine/batch`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from kernels import tuning

NULL_BLOCK = 0
"""The block that padded reads point at: never handed out, always zero."""
MAX_KV_HEADS = 128
MAX_DELTA_TOKENS = 64
"""Of steps in which what LoRA adds has memory of its own: 4 bytes for each token and column of the widest group."""
_FLAG_ROWS = MAX_DELTA_TOKENS // 4  # of four words, as tiles have


class LoraSegment(NamedTuple):
    """Packed tokens [token_start, token_end) use row `lora_slot` of the LoRA buffers. Base tokens are in no segment."""

    lora_slot: int
    token_start: int
    token_end: int | None


class LoraMetadata:
    """Which packed tokens use which adapter, for all grouped LoRA calls of a step.

    Made once and updated in place, so that a captured CUDA graph finds the current step's adapters at the same
    addresses. On a device the segments are cut into token tiles, whose size depends on the step's token count alone.
    Calls that share an object share its scratch: they belong on one stream, the one on which `update` was called.

    Args:
        max_tokens: of a step, padding included.
        max_segments: of a step; with tokens ordered by adapter, the number of LoRA rows.
        device: where the kernels run.
        max_columns: slices x R of the widest group.
        max_in: input columns of the widest group.
        has_tiles: whether to keep tiles and scratch; by default on CUDA devices only, as the plain twin needs neither.
    """

    def __init__(
        self,
        max_tokens: int,
        max_segments: int,
        device: torch.device,
        *,
        max_columns: int,
        max_in: int,
        has_tiles: bool | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_segments = max_segments
        self.segments: tuple[LoraSegment, ...] = ()
        self.num_tokens = 0
        self.num_tiles = 0
        self.is_recording = False
        """Whether launches are recorded in a CUDA graph, or tried out for that: what can run beside something else then does."""
        self.is_delta_apart = False
        """Whether the step is recorded and small enough for `kernels.product_and_delta` in compiled layers."""
        self.has_tiles = device.type == "cuda" if has_tiles is None else has_tiles
        if not self.has_tiles:
            self.is_adapted = torch.zeros(MAX_DELTA_TOKENS, dtype=torch.int32, device=device)
            return
        is_cuda = device.type == "cuda"
        # Of high priority: the product would else take all processors first, and the work come after it.
        self.side_stream = torch.cuda.Stream(device, priority=-1) if is_cuda else None
        """For work of a call that may run beside the base layers' product where that is recorded."""
        self.late_stream = torch.cuda.Stream(device) if is_cuda else None
        """The same for work that is to come after the product's beginning."""
        self.family = tuning.device_family(torch.cuda.get_device_capability(device) if is_cuda else None)
        capacity = 1 + max(tuning.num_tiles_of(size, max_segments) for size in tuning.step_sizes(max_tokens))
        # Flags and tiles lie one after the other, so that one copy sends both.
        self._words = torch.zeros(_FLAG_ROWS + capacity, 4, dtype=torch.int32, device=device)
        self.is_adapted = self._words[:_FLAG_ROWS].view(-1)
        """[64] int32, of steps of up to 64 tokens: 1 for tokens with a LoRA row, else 0."""
        self.tiles = self._words[_FLAG_ROWS:]
        """[1 + tiles, 4] int32: the number of tiles, then `lora_slot, token_start, token_end, 0` of each."""
        num_floats = tuning.scratch_rows(max_tokens, max_in) * max_columns
        self.scratch = torch.empty(num_floats, dtype=torch.float32, device=device)
        """[splits * T * slices * R] float32 at most: partial sums between a call's two kernels."""
        # Two, taken in turns: the host fills one while the copy out of the other may still be waiting for the device.
        self._staging = [torch.zeros_like(self._words, device="cpu", pin_memory=is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)] if is_cuda else []

    def step_sizes(self, max_tokens: int | None = None) -> list[int]:
        """Token counts which between them need every variant of the kernels that steps of up to `max_tokens` need."""
        return tuning.step_sizes(self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Steps that are described within are recorded, or tried out for that."""
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

    def update(self, segments: Sequence[LoraSegment], num_tokens: int) -> None:
        """Describe the next step; on CUDA one asynchronous copy on the current stream, no synchronisation.

        Args:
            segments: disjoint ranges of packed tokens.
            num_tokens: rows of the step's tensors, padding included; a captured graph's own count at each replay.

        Raises:
            ValueError: more tokens or segments than the object was made for.
        """
        if num_tokens > self.max_tokens or len(segments) > self.max_segments:
            raise ValueError(
                f"{num_tokens} tokens in {len(segments)} segments, but this LoraMetadata holds at most "
                f"{self.max_tokens} tokens in {self.max_segments} segments; make a larger one"
            )
        self.segments = tuple(segments)
        self.num_tokens = num_tokens
        self.is_delta_apart = self.is_recording and bool(segments) and num_tokens <= MAX_DELTA_TOKENS
        flags = _adapted_tokens(self.segments, num_tokens)
        if self.has_tiles:
            self._copy(flags, _token_tiles(self.segments, num_tokens))
        elif self.is_delta_apart:
            self.is_adapted.copy_(torch.tensor(flags))

    def _copy(self, flags: list[int], tiles: list[tuple[int, int, int, int]]) -> None:
        self.num_tiles = len(tiles)
        self._staging.reverse()
        self._copied.reverse()
        if self._copied:
            self._copied[0].synchronize()
        words = torch.tensor([*flags, len(tiles), 0, 0, 0, *itertools.chain(*tiles)], dtype=torch.int32).view(-1, 4)
        staging = self._staging[0][: len(words)]
        staging.copy_(words)
        self._words[: len(words)].copy_(staging, non_blocking=True)
        if self._copied:
            self._copied[0].record()


def _adapted_tokens(segments: Sequence[LoraSegment], num_tokens: int) -> list[int]:
    """`LoraMetadata.is_adapted`; larger steps do not use it."""
    flags = [0] * MAX_DELTA_TOKENS
    if num_tokens <= MAX_DELTA_TOKENS:
        for _, start, end in segments:
            stop = num_tokens if end is None else end
            flags[start:stop] = [1] * (stop - start)
    return flags


def _token_tiles(segments: Sequence[LoraSegment], num_tokens: int) -> list[tuple[int, int, int, int]]:
    """Rows of `LoraMetadata.tiles`: segments cut where they are longer than a tile."""
    block = tuning.kind_of(num_tokens).block_tokens
    return [
        (lora_slot, start, min(start + block, end), 0)
        for lora_slot, token_start, token_end in segments
        for end in (num_tokens if token_end is None else token_end,)
        for start in range(token_start, end, block)
    ]


class Prefill(NamedTuple):
    """A request with several query tokens in this step: packed tokens [token_start, token_end)."""

    token_start: int
    token_end: int
    kv_index: torch.Tensor
    """[L] int64: positions in the pool of the request's keys, oldest first; the queries are the last of them."""


class AttentionTensors(NamedTuple):
    """A packed batch as the GPU kernels read it."""

    cu_query_len: torch.Tensor
    """[B+1] int32: packed tokens [cu_query_len[b], cu_query_len[b + 1]) are request b's."""
    kv_len: torch.Tensor
    """[B] int32: keys of each request, this step's included; 0 for a row of padding."""
    block_table: torch.Tensor
    """[B, M] int32: pool blocks of each request, in order."""
    max_kv_len: int
    """No request has more keys; launches are sized by it, so with static buffers it never changes."""


class AttentionMetadata:
    """Where each packed token's keys and values lie.

    Kernels on a GPU read `tensors` and the counts known on the host; the padded indices and masks of the plain PyTorch
    path are made only when that path asks for them. Everything is made on the block table's device; `on` has the same
    batch for another. Nothing here waits for the device: what comes from the host is copied out of pinned memory of its
    own, which is not used again before the copy is done.

    Attributes:
        num_tokens: T.
        num_decodes: requests with one query token.
        num_prompts: requests with several query tokens and no other keys, so whole prompts without a cached beginning;
            0 where the tensors are static, since a replay may be of other requests, and where tokens see what follows.
        max_prompt_len: tokens of the longest of them.
        max_decodes, max_chunks, max_query_len: what launches are sized by: the numbers of requests with one query token and
            with more, and the most of one. Of this batch, or of any that a recorded launch may be replayed on.

    Args:
        query_lens: B counts of query tokens; their sum is T.
        kv_lens: B counts of keys, this step's included; at least the query's count.
        block_table: [B, M] int32 or int64, on the host or a device: the pool blocks of each request in order; rows are
            padded with `NULL_BLOCK`.
        block_size: P, tokens in a block.
        tensors: the same batch where it is on the device already (`AttentionBuffers`); made on first use otherwise.
        mutual_spans: [T, 2] int32 or None, where the block table lies: `[start, end)` of the keys, counted in the
            request, that a token sees beside those before it; (0, 0) for none. Such a span is no longer than any
            window, and its keys are in the pool.
        is_open: whether each row may have any number of query tokens at a replay.
        arrivals: see the property, where static tensors have one.
    """

    def __init__(
        self,
        query_lens: list[int],
        kv_lens: list[int],
        block_table: torch.Tensor,
        block_size: int,
        tensors: AttentionTensors | None = None,
        mutual_spans: torch.Tensor | None = None,
        *,
        is_open: bool = False,
        arrivals: torch.Tensor | None = None,
    ) -> None:
        self.query_lens = query_lens
        self._arrivals = arrivals
        self.kv_lens = kv_lens
        self.block_size = block_size
        self.num_tokens = sum(query_lens)
        self.num_decodes = sum(query_len == 1 for query_len in query_lens)
        num_rows = len(query_lens)
        self.max_decodes = num_rows if is_open else self.num_decodes
        self.max_chunks = num_rows if is_open else num_rows - self.num_decodes
        self.max_query_len = self.num_tokens if is_open else max(query_lens, default=0)
        self.block_table = block_table
        pairs = zip(query_lens, kv_lens, strict=True)
        is_known = tensors is None and mutual_spans is None
        prompts = [query_len for query_len, kv_len in pairs if query_len == kv_len > 1] if is_known else []
        self.num_prompts = len(prompts)
        self.max_prompt_len = max(prompts, default=0)
        self._tensors = tensors
        self.mutual_spans = mutual_spans
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._decode_keys: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._elsewhere: AttentionMetadata | None = None

    def on(self, device: torch.device) -> AttentionMetadata:
        """The batch with its block table on `device`: itself where it lies there, else a copy made on first use."""
        if self.block_table.device == device:
            return self
        if self._elsewhere is None or self._elsewhere.block_table.device != device:
            table = self.block_table if self.block_table.is_cuda else _host_int32(self.block_table, device)
            table = table.to(device, non_blocking=True)
            spans = self.mutual_spans
            if spans is not None:
                spans = _host_int32(spans, device).to(device, non_blocking=True)
            self._elsewhere = AttentionMetadata(
                self.query_lens, self.kv_lens, table, self.block_size, mutual_spans=spans
            )
        return self._elsewhere

    @property
    def tensors(self) -> AttentionTensors:
        """The batch on the block table's device, made on first use and kept."""
        if self._tensors is None:
            device, num_rows = self.block_table.device, len(self.query_lens)
            lens = _host_int32([*_prefix_sum(self.query_lens), *self.kv_lens], device).to(device, non_blocking=True)
            table = self.block_table.to(torch.int32)
            max_kv_len = max(self.kv_lens, default=0)
            self._tensors = AttentionTensors(lens[: num_rows + 1], lens[num_rows + 1 :], table, max_kv_len)
        return self._tensors

    @property
    def arrivals(self) -> torch.Tensor:
        """[B, 128] int32 where the block table lies: how many of its splits have ended, for each request and KV head.

        Zeros whenever no launch runs; launches on this batch must follow one another.
        """
        if self._arrivals is None:
            shape = len(self.query_lens), MAX_KV_HEADS
            self._arrivals = torch.zeros(shape, dtype=torch.int32, device=self.block_table.device)
        return self._arrivals

    @cached_property
    def prefills(self) -> list[Prefill]:
        """Requests with several query tokens, in order, without padding."""
        starts = _prefix_sum(self.query_lens)
        return [
            Prefill(starts[row], starts[row + 1], self._pool_positions(row, self.kv_lens[row]))
            for row, query_len in enumerate(self.query_lens)
            if query_len > 1 and self.kv_lens[row] > 0
        ]

    @cached_property
    def decode_tokens(self) -> torch.Tensor:
        """[Bd] int64: the packed token of each decode."""
        starts = _prefix_sum(self.query_lens)
        tokens = [starts[row] for row in self._decode_rows]
        return torch.tensor(tokens, dtype=torch.int64, device=self.block_table.device)

    @cached_property
    def decode_kv_len(self) -> torch.Tensor:
        """[Bd] int64."""
        kv_lens = [self.kv_lens[row] for row in self._decode_rows]
        return torch.tensor(kv_lens, dtype=torch.int64, device=self.block_table.device)

    def decode_keys(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Which keys the decodes look at: at most the last `window` of each request, the query's own included.

        Returns:
            [Bd, L] int64 pool positions; padding points at the null block, which is always zero.
            [Bd, 1, 1, L] bool, False where there is padding.
        """
        if window not in self._decode_keys:
            longest = max((self.kv_lens[row] for row in self._decode_rows), default=0)
            kv_len = self.decode_kv_len[:, None]
            position = torch.arange(longest if window is None else min(longest, window), device=kv_len.device)
            position = position if window is None else position + (kv_len - window).clamp(min=0)
            is_there = position < kv_len
            blocks = self.block_table[self._decode_rows].to(torch.int64)
            place = position.clamp(max=blocks.shape[1] * self.block_size - 1).expand(is_there.shape)
            index = blocks.gather(1, place // self.block_size) * self.block_size + place % self.block_size
            index.masked_fill_(~is_there, NULL_BLOCK * self.block_size)
            self._decode_keys[window] = (index, is_there[:, None, None])
        return self._decode_keys[window]

    @cached_property
    def _decode_rows(self) -> list[int]:
        return [row for row, query_len in enumerate(self.query_lens) if query_len == 1]

    def _pool_positions(self, row: int, kv_len: int) -> torch.Tensor:
        position = torch.arange(kv_len, device=self.block_table.device)
        blocks = self.block_table[row].to(torch.int64)
        return blocks[position // self.block_size] * self.block_size + position % self.block_size

    def prefill_mask(self, row: int, window: int | None) -> torch.Tensor | None:
        """[Q, L] bool of prefill `row`, or None where plain causal attention over equal lengths is meant."""
        prefill = self.prefills[row]
        query_len, kv_len = prefill.token_end - prefill.token_start, prefill.kv_index.shape[0]
        is_causal_alone = self.mutual_spans is None
        if is_causal_alone and query_len == kv_len and (window is None or kv_len <= window):
            return None
        key = (row, window)
        if key not in self._masks:
            device = prefill.kv_index.device
            query = torch.arange(kv_len - query_len, kv_len, device=device)[:, None]
            position = torch.arange(kv_len, device=device)
            mask = position <= query
            if window is not None:
                mask &= position > query - window
            if self.mutual_spans is not None:
                span = self.mutual_spans[prefill.token_start : prefill.token_end]
                mask |= (position >= span[:, :1]) & (position < span[:, 1:])
            self._masks[key] = mask
        return self._masks[key]


class AttentionBuffers:
    """Attention metadata at addresses that never change, so that a captured CUDA graph can be replayed on new requests.

    Every `fill` writes the same tensors and returns a view of their first rows; a graph captured with one such view
    sees the next. Launches are sized by the capacity, not by the requests at hand: a result therefore does not depend
    on whether it came from a replay.

    Args:
        max_batch: most rows of a step, padding included.
        max_blocks: most blocks of a request.
        block_size: P, tokens in a block.
        device: where the tensors live.
    """

    def __init__(self, max_batch: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.max_batch = max_batch
        self.max_blocks = max_blocks
        self.block_size = block_size
        self._lens = torch.zeros(2 * max_batch + 1, dtype=torch.int32, device=device)
        self._cu_query_len, self._kv_len = self._lens[: max_batch + 1], self._lens[max_batch + 1 :]
        self._block_table = torch.full((max_batch, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(max_batch, MAX_KV_HEADS, dtype=torch.int32, device=device)

    def fill(
        self, query_lens: list[int], kv_lens: list[int], block_table: torch.Tensor, num_rows: int | None = None
    ) -> AttentionMetadata:
        """Overwrite the buffers with a step; never waits for the device.

        Args:
            query_lens, kv_lens: B counts each, as in `AttentionMetadata`.
            block_table: [B, M] int32 or int64, on the host or on the device, M at most `max_blocks`.
            num_rows: rows of the view, at least B (the default). The others are padding of one query token and no
                keys; `paged_attention` writes zeros for them.

        Returns:
            A view of the first `num_rows` rows, whose packed tokens are sum(query_lens) + num_rows - B.
        """
        num_rows = len(query_lens) if num_rows is None else num_rows
        num_padding = num_rows - len(query_lens)
        return self._fill(query_lens + [1] * num_padding, kv_lens + [0] * num_padding, block_table)

    def fill_open(
        self, query_lens: list[int], kv_lens: list[int], block_table: torch.Tensor, num_tokens: int
    ) -> AttentionMetadata:
        """`fill` for a step in which requests have any number of query tokens, B of them, less than `max_batch`.

        Args:
            query_lens, kv_lens, block_table: as in `fill`.
            num_tokens: packed tokens of the view, at least sum(query_lens). The others are padding: one more row without
                keys, for which `paged_attention` writes zeros.

        Returns:
            A view of all rows; those after the padding have no tokens. Launches are sized by `num_tokens` and `max_batch`.
        """
        num_padding, num_unused = num_tokens - sum(query_lens), self.max_batch - len(query_lens) - 1
        assert num_padding >= 0 and num_unused >= 0, "buffers are too small"
        lens = query_lens + [num_padding] + [0] * num_unused, kv_lens + [0] * (num_unused + 1)
        return self._fill(*lens, block_table, is_open=True)

    def _fill(
        self, query_lens: list[int], kv_lens: list[int], block_table: torch.Tensor, *, is_open: bool = False
    ) -> AttentionMetadata:
        """Overwrite the buffers with these rows, of which the first have rows in `block_table`."""
        num_rows, (num_requests, width) = len(query_lens), block_table.shape
        assert len(kv_lens) == num_rows, "one row for each request"
        assert num_requests <= num_rows <= self.max_batch and width <= self.max_blocks, "buffers are too small"
        device, unused = self._lens.device, self.max_batch - num_rows
        cu_query_len = _prefix_sum(query_lens)
        lens = [*cu_query_len, *[cu_query_len[-1]] * unused, *kv_lens, *[0] * unused]
        self._lens.copy_(_host_int32(lens, device), non_blocking=True)
        if not block_table.is_cuda:
            block_table = _host_int32(block_table, device).to(device, non_blocking=True)
        self._block_table[:num_requests, :width].copy_(block_table)

        table = self._block_table[:num_rows]
        tensors = AttentionTensors(
            self._cu_query_len[: num_rows + 1], self._kv_len[:num_rows], table, self.max_blocks * self.block_size
        )
        return AttentionMetadata(
            query_lens, kv_lens, table, self.block_size, tensors, is_open=is_open, arrivals=self._arrivals[:num_rows]
        )


def _prefix_sum(lens: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lens)]


def _host_int32(values: list[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values` as int32 on the host, in pinned memory where `device` could otherwise not copy without waiting."""
    tensor = torch.as_tensor(values, dtype=torch.int32)
    return tensor.pin_memory() if device.type == "cuda" else tensor
