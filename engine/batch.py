"""Turns a plan into the step's tensors: the only place where batch metadata is built, whole, once a step.

Owns no state. Called by `engine/runner`.

T packed tokens, B requests, R sampled rows, M blocks of the longest request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.scheduler import Plan, PlanItem
from kernels import NULL_BLOCK, AttentionMetadata, LoraSegment


@dataclass(frozen=True)
class Batch:
    """One step's input.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, each token's place in its request.
        kv_index: [T] int64, where each token's keys and values go in the pool.
        attention: where keys lie.
        lora_segments: adapters of the packed tokens.
        logits_at: [R] int64, packed tokens whose logits are needed.
        head_segments: adapters of the R rows.
        sampled: the R items that `logits_at` belongs to, in order.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_index: torch.Tensor
    attention: AttentionMetadata
    lora_segments: tuple[LoraSegment, ...]
    logits_at: torch.Tensor
    head_segments: tuple[LoraSegment, ...]
    sampled: tuple[PlanItem, ...]


def build_batch(plan: Plan, block_size: int, device: torch.device) -> Batch:
    """The tensors of `plan`, whose items are ordered by LoRA row."""
    token_ids: list[int] = []
    positions: list[int] = []
    last_tokens: list[int] = []
    for item in plan.items:
        token_ids += item.state.token_ids[item.start : item.end]
        positions += range(item.start, item.end)
        last_tokens.append(len(token_ids) - 1)
    query_lens = [item.end - item.start for item in plan.items]
    sampled = [row for row, item in enumerate(plan.items) if item.is_sampled]
    slots = [item.state.lora_slot for item in plan.items]

    block_table = _block_table(plan, block_size)
    row_of_token = torch.repeat_interleave(torch.arange(len(plan.items)), torch.tensor(query_lens))
    position = torch.tensor(positions, dtype=torch.int64)
    kv_index = block_table[row_of_token, position // block_size] * block_size + position % block_size
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64).to(device),
        positions=position.to(device),
        kv_index=kv_index.to(device),
        attention=AttentionMetadata(query_lens, [item.end for item in plan.items], block_table.to(device), block_size),
        lora_segments=_segments(slots, query_lens),
        logits_at=torch.tensor([last_tokens[row] for row in sampled], dtype=torch.int64).to(device),
        head_segments=_segments([slots[row] for row in sampled], [1] * len(sampled)),
        sampled=tuple(plan.items[row] for row in sampled),
    )


def _block_table(plan: Plan, block_size: int) -> torch.Tensor:
    """[B, M] int64, padded with the null block."""
    used = [item.state.blocks[: -(-item.end // block_size)] for item in plan.items]
    width = max(len(blocks) for blocks in used)
    return torch.tensor([blocks + [NULL_BLOCK] * (width - len(blocks)) for blocks in used], dtype=torch.int64)


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
