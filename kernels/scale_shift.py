"""Scale and shift of a linear's output by adapter on a GPU: one Triton launch for any mix of adapters and base rows.

The twin of `reference.scale_shift_`. Programs walk over the step's token tiles (`LoraMetadata.tiles`), so a captured
graph follows the adapters of the step. Adapters that only add a LoRA product cost one load of their flag.

T packed tokens, O output columns, N LoRA rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.metadata import LoraMetadata

# mypy: disable-error-code="no-untyped-def"

_BLOCK_O = 256
_NUM_AT_ONCE = 8


def scale_shift_(
    output: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    is_used: torch.Tensor,
    host_is_used: Sequence[bool],
    metadata: LoraMetadata,
) -> None:
    """As `reference.scale_shift_`, which describes the arguments; `host_is_used` is not read.

    Rows of `output` may be strided, its columns not; the other tensors are contiguous.
    """
    num_tokens, num_columns = output.shape
    assert num_tokens == metadata.num_tokens, "the metadata describes another step"
    assert output.stride(1) == 1 and scale.is_contiguous() and shift.is_contiguous()
    max_tiles = tuning.num_tiles_of(num_tokens, metadata.max_segments)
    _scale_shift_kernel[(max_tiles, -(-num_columns // _BLOCK_O))](
        output, scale, shift, is_used, metadata.tiles, output.stride(0), num_columns,
        BLOCK_T=_NUM_AT_ONCE, BLOCK_O=_BLOCK_O,
    )  # fmt: skip


@triton.jit
def _scale_shift_kernel(
    p_out, p_scale, p_shift, p_is_used, p_tiles, out_stride, num_columns,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """`output[t] = output[t] * scale[n] + shift[n]` for the tokens t of tile `program_id(0)`, in float32."""
    i_tile = tl.program_id(0)
    is_there = i_tile < tl.load(p_tiles)
    p_tile = p_tiles + 4 + 4 * i_tile
    lora_slot = tl.load(p_tile, mask=is_there, other=0).to(tl.int64)
    t_start = tl.load(p_tile + 1, mask=is_there, other=0)
    t_end = tl.load(p_tile + 2, mask=is_there, other=0)
    if is_there & (tl.load(p_is_used + lora_slot) != 0):
        o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        m_o = o < num_columns
        b_scale = tl.load(p_scale + lora_slot * num_columns + o, mask=m_o, other=1.0)  # [BLOCK_O]
        b_shift = tl.load(p_shift + lora_slot * num_columns + o, mask=m_o, other=0.0)  # [BLOCK_O]
        for t_first in tl.range(t_start, t_end, BLOCK_T):
            t = t_first + tl.arange(0, BLOCK_T)
            mask = (t < t_end)[:, None] & m_o[None, :]
            p_block = p_out + (t.to(tl.int64) * out_stride)[:, None] + o[None, :]
            b_out = tl.load(p_block, mask=mask, other=0.0)  # [BLOCK_T, BLOCK_O]
            b_new = b_out.to(tl.float32) * b_scale[None, :] + b_shift[None, :]
            tl.store(p_block, b_new.to(b_out.dtype), mask=mask)
