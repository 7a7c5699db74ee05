"""Triton twin of `reference.scatter_rows_`: one contiguous source into many strided places, in one launch.

Knows nothing of adapters. Called through `kernels`.

K places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def"

_BLOCK = 4096


def scatter_rows_(source: torch.Tensor, table: torch.Tensor, max_elements: int) -> None:
    """As `reference.scatter_rows_`, which describes the arguments."""
    if len(table) == 0 or max_elements == 0:
        return
    _scatter_rows_kernel[(len(table), triton.cdiv(max_elements, _BLOCK))](source, table, BLOCK=_BLOCK, num_warps=8)


@triton.jit
def _scatter_rows_kernel(source_ptr, table_ptr, BLOCK: tl.constexpr):
    p_place = table_ptr + tl.program_id(0).to(tl.int64) * 5
    address, source_start = tl.load(p_place), tl.load(p_place + 1)
    num_rows, row_len, stride = tl.load(p_place + 2), tl.load(p_place + 3), tl.load(p_place + 4)
    o_element = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_element = o_element < num_rows * row_len
    target_ptr = address.to(tl.pointer_type(source_ptr.dtype.element_ty))
    # A place has far fewer than 2^31 elements, and 32-bit division is much cheaper.
    i_element, i_row_len = o_element.to(tl.int32), row_len.to(tl.int32)
    o_target = (i_element // i_row_len).to(tl.int64) * stride + i_element % i_row_len
    numbers = tl.load(source_ptr + source_start + o_element, mask=m_element)
    tl.store(target_ptr + o_target, numbers, mask=m_element)
