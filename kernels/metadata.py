"""Per-step inputs of the kernels: built once a step, whole, and shared by all layers.

Owns the two descriptions of a packed batch: which tokens belong to which request and where their keys and values lie
(`AttentionMetadata`), and which tokens use which adapter (`LoraSegment`). Built by `engine/batch`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NULL_BLOCK = 0
"""The block that padded reads point at: never handed out, always zero."""


class LoraSegment(NamedTuple):
    """Packed tokens [token_start, token_end) use row `lora_slot` of the LoRA buffers. Base tokens are in no segment."""

    lora_slot: int
    token_start: int
    token_end: int | None


class Prefill(NamedTuple):
    """A request with several query tokens in this step: packed tokens [token_start, token_end)."""

    token_start: int
    token_end: int
    kv_index: torch.Tensor
    """[L] int64: positions in the pool of the request's keys, oldest first; the queries are the last of them."""


class AttentionMetadata:
    """Where each packed token's keys and values lie.

    Requests with one query token (decodes) are attended together through a padded index; those with more (prefill
    chunks) one by one. Masks depend on the layer's sliding window and are made once a step for each window.

    Args:
        query_lens: B counts of query tokens; their sum is T.
        kv_lens: B counts of keys, this step's included; at least the query's count.
        block_table: [B, M] int64, the pool blocks of each request in order; rows are padded with `NULL_BLOCK`.
        block_size: P, tokens in a block.
    """

    def __init__(self, query_lens: list[int], kv_lens: list[int], block_table: torch.Tensor, block_size: int) -> None:
        self.query_lens = query_lens
        self.kv_lens = kv_lens
        self.block_size = block_size
        self._block_table = block_table
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

        starts = [0]
        for query_len in query_lens:
            starts.append(starts[-1] + query_len)
        decode_rows = [row for row, query_len in enumerate(query_lens) if query_len == 1]
        self.num_tokens = starts[-1]
        self.num_decodes = len(decode_rows)
        self.prefills = [
            Prefill(starts[row], starts[row + 1], self._pool_positions(row, kv_lens[row]))
            for row, query_len in enumerate(query_lens)
            if query_len > 1
        ]
        device = block_table.device
        self.decode_tokens = torch.tensor([starts[row] for row in decode_rows], dtype=torch.int64, device=device)
        """[Bd] int64: the packed token of each decode."""
        longest = max((kv_lens[row] for row in decode_rows), default=0)
        self.decode_kv_len = torch.tensor([kv_lens[row] for row in decode_rows], dtype=torch.int64, device=device)
        """[Bd] int64."""
        self.decode_kv_index = self._decode_index(decode_rows, longest)
        """[Bd, L] int64: pool positions of each decode's keys, padded with positions of the null block or stale ones."""

    def _pool_positions(self, row: int, kv_len: int) -> torch.Tensor:
        position = torch.arange(kv_len, device=self._block_table.device)
        return self._block_table[row, position // self.block_size] * self.block_size + position % self.block_size

    def _decode_index(self, rows: list[int], longest: int) -> torch.Tensor:
        num_blocks = -(-longest // self.block_size)
        offset = torch.arange(self.block_size, device=self._block_table.device)
        blocks = self._block_table[rows, :num_blocks]
        return (blocks[:, :, None] * self.block_size + offset).flatten(1)[:, :longest]

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """[Bd, 1, 1, L] bool: True where a decode's query may look at a key; `window` counts keys, the query's included."""
        key = (-1, window)
        if key not in self._masks:
            position = torch.arange(self.decode_kv_index.shape[1], device=self.decode_kv_len.device)
            kv_len = self.decode_kv_len[:, None]
            mask = position < kv_len
            if window is not None:
                mask &= position >= kv_len - window
            self._masks[key] = mask[:, None, None]
        return self._masks[key]

    def prefill_mask(self, row: int, window: int | None) -> torch.Tensor | None:
        """[Q, L] bool of prefill `row`, or None where plain causal attention over equal lengths is meant."""
        prefill = self.prefills[row]
        query_len, kv_len = prefill.token_end - prefill.token_start, prefill.kv_index.shape[0]
        if query_len == kv_len and (window is None or kv_len <= window):
            return None
        key = (row, window)
        if key not in self._masks:
            device = prefill.kv_index.device
            query = torch.arange(kv_len - query_len, kv_len, device=device)[:, None]
            position = torch.arange(kv_len, device=device)
            mask = position <= query
            if window is not None:
                mask &= position > query - window
            self._masks[key] = mask
        return self._masks[key]
