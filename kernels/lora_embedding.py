"""Batched LoRA of an embedding on a GPU: one Triton launch for any mix of adapters, ranks and base rows.

The twin of `reference.lora_embedding_add_`: gathers rows of A by token, multiplies with B and adds to the embeddings.
Walks over the step's token tiles as `kernels/lora` does. Called through `kernels`.

T packed tokens, N LoRA rows, V vocabulary, R rank of the buffers, H width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.lora import MAX_BLOCK_RANK, _in_rank, _load_b, _load_tile, num_processors
from kernels.metadata import LoraMetadata

# mypy: disable-error-code="no-untyped-def"

_BLOCK_OUT = 128
_PROGRAMS_PER_PROCESSOR = 16


def lora_embedding_add_(
    output: torch.Tensor,
    token_ids: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[int],
    metadata: LoraMetadata,
) -> None:
    """As `kernels.lora_embedding_add_`, which describes the arguments; `host_ranks` is not read.

    Rows of `output` may be strided, its columns not; the other tensors are contiguous.
    """
    num_tokens, width = output.shape
    max_rank = lora_a.shape[2]
    assert num_tokens == metadata.num_tokens == len(token_ids), "the metadata describes another step"
    assert output.stride(1) == 1 and lora_a.is_contiguous() and lora_b.is_contiguous() and token_ids.is_contiguous()
    max_tiles = tuning.num_tiles_of(num_tokens, metadata.max_segments)
    num_items = max_tiles * triton.cdiv(width, _BLOCK_OUT)
    _embedding_kernel[(min(num_items, num_processors(output.device) * _PROGRAMS_PER_PROCESSOR),)](
        output, token_ids, lora_a, lora_b, ranks, metadata.tiles, output.stride(0), width, lora_a.shape[1],
        R=max_rank, BLOCK_T=tuning.kind_of(num_tokens).block_tokens,
        BLOCK_R=max(16, min(MAX_BLOCK_RANK, triton.next_power_of_2(max_rank))), BLOCK_O=_BLOCK_OUT,
    )  # fmt: skip


@triton.jit
def _embedding_kernel(
    p_out, p_tokens, p_a, p_b, p_ranks, p_tiles, out_stride, width, vocab_size,
    R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """`output[t] += A[n, token_ids[t], :r] @ B[n, :, :r].T`; accumulates."""
    num_blocks = tl.cdiv(width, BLOCK_O)
    num_items = tl.load(p_tiles) * num_blocks
    for i_item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        lora_slot, t_start, t_end = _load_tile(p_tiles, i_item // num_blocks, True)
        i_row = lora_slot.to(tl.int64)
        rank = tl.load(p_ranks + i_row)
        if rank > 0:
            t = t_start + tl.arange(0, BLOCK_T)
            o = (i_item % num_blocks) * BLOCK_O + tl.arange(0, BLOCK_O)
            m_t, m_o = t < t_end, o < width
            m_out = m_t[:, None] & m_o[None, :]
            p_block = p_out + (t.to(tl.int64) * out_stride)[:, None] + o[None, :]
            b_out = tl.load(p_block, mask=m_out, other=0.0)  # [BLOCK_T, BLOCK_O]
            o_a = (i_row * vocab_size + tl.load(p_tokens + t, mask=m_t, other=0)) * R  # [BLOCK_T]
            acc = tl.zeros([BLOCK_T, BLOCK_O], dtype=tl.float32)
            for r_start in tl.range(0, rank, BLOCK_R, num_stages=1):
                r = r_start + tl.arange(0, BLOCK_R)
                m_h = m_t[:, None] & _in_rank(r, rank, R)[None, :]
                # What lies above the rank meets zeros of B, but zero times NaN is NaN.
                b_h = tl.load(p_a + o_a[:, None] + r[None, :], mask=m_h, other=0.0)  # [BLOCK_T, BLOCK_R]
                b_h = tl.where(r[None, :] < rank, b_h, 0.0)
                b_b = _load_b(p_b, i_row, o, m_o, r, rank, width, R)  # [BLOCK_R, BLOCK_O]
                acc = tl.dot(b_h, b_b, acc, input_precision="ieee")
            tl.store(p_block, (b_out.to(tl.float32) + acc).to(b_out.dtype), mask=m_out)
