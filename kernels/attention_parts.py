"""What the attention kernels have in common: tiles, scales of logits, one turn of the online softmax.

Used by `kernels/paged_attention` and `kernels/prompt_attention`. Logits are kept in units of log2, so that the softmax
needs exp2 alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

_LOG2E = math.log2(math.e)

STEP_POINTERS = ["cu_query_len_ptr", "kv_len_ptr", "table_ptr", "kv_index_ptr"]
"""Arguments of kernels that point into a step's tensors. How they are aligned differs from step to step, and for each
combination Triton would compile a variant of its own, while requests wait; nothing is gained by it."""


class Tile(NamedTuple):
    """How one program works: rows (query tokens times heads of a group), keys a turn, warps, pipeline depth."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def log2_scales(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Factors before and after tanh, or the one factor and nothing where there is no cap."""
    return (scale * _LOG2E, 0.0) if soft_cap is None else (scale / soft_cap, soft_cap * _LOG2E)


@triton.jit
def load_rows(p_rows, m_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, BLOCK_D] from a pointer a row; zeros where masked and beyond HEAD_DIM."""
    o_dim = tl.arange(0, BLOCK_D)
    p_element = p_rows[:, None] + o_dim[None, :]
    if IS_MASKED and HEAD_DIM == BLOCK_D:
        b_rows = tl.load(p_element, mask=m_row[:, None], other=0.0)
    elif IS_MASKED:
        b_rows = tl.load(p_element, mask=m_row[:, None] & (o_dim[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM == BLOCK_D:
        b_rows = tl.load(p_element)
    else:
        b_rows = tl.load(p_element, mask=o_dim[None, :] < HEAD_DIM, other=0.0)
    return b_rows


@triton.jit
def capped(b_logit, logit_scale, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits up to a positive factor, and the factor."""
    factor = logit_scale
    if HAS_CAP:
        # tanh, with no overflow at either end.
        b_logit = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * logit_scale * b_logit))
        factor = cap
    return b_logit, factor


@triton.jit
def accumulate(  # type: ignore[no-untyped-def]
    b_out, b_sum, b_max, b_q, b_k, b_v, m_visible, logit_scale, cap, HAS_CAP: tl.constexpr, IS_MASKED: tl.constexpr
):
    """One turn of the online softmax: [ROWS, BLOCK_D] weighted values, [ROWS] sum of weights, [ROWS] largest logit."""
    b_logit, factor = capped(tl.dot(b_q, tl.trans(b_k), input_precision="ieee"), logit_scale, cap, HAS_CAP)
    if IS_MASKED:
        b_logit = tl.where(m_visible, b_logit, float("-inf"))
    # The factor is positive: it may follow the maximum, and in the exponent it is part of a fused multiply-add.
    b_new_max = tl.maximum(b_max, tl.max(b_logit, 1) * factor)
    b_shift = b_new_max
    if IS_MASKED:
        # A row that has seen no key yet: -inf minus -inf is not a number.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_weight = tl.exp2(b_logit * factor - b_shift[:, None])
    b_decay = tl.exp2(b_max - b_shift)
    b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
    b_out = tl.dot(b_weight.to(b_v.dtype), b_v, b_out * b_decay[:, None], input_precision="ieee")
    return b_out, b_sum, b_new_max


@triton.jit
def row_of_tile(cu_query_len_ptr, i_tile, num_rows, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last request whose tiles begin at or before `i_tile`."""
    low, high = 0, num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_query_len_ptr + middle) // TOKENS + middle <= i_tile:
            low = middle + 1
        else:
            high = middle
    return low - 1
