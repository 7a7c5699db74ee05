"""Triton twin of `reference.write_kv_`: keys and values of a step into the paged pools, in one launch.

Knows nothing of requests or blocks; positions come ready-made. Called through `kernels`.

T packed tokens, P block size, D head dim, Hkv KV heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention_parts import STEP_POINTERS

_BLOCK = 1024


def write_kv_(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, kv_index: torch.Tensor
) -> None:
    """`k_pool[kv_index] = k; v_pool[kv_index] = v`, where an index of -1 (padding) writes nothing.

    Args:
        k, v: [T, Hkv, D], any strides.
        k_pool, v_pool: [num_blocks * P, Hkv, D], written in place.
        kv_index: [T] int64, all different but for -1.
    """
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    block = min(_BLOCK, triton.next_power_of_2(num_heads * head_dim))
    grid = (num_tokens, triton.cdiv(num_heads * head_dim, block), 2)
    _write_kv_kernel[grid](
        k, v, k_pool, v_pool, kv_index,
        *k.stride(), *v.stride(), *k_pool.stride(), *v_pool.stride(),
        num_heads, HEAD_DIM=head_dim, BLOCK=block,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=STEP_POINTERS)
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, kv_index_ptr,
    stride_k_token, stride_k_head, stride_k_dim,
    stride_v_token, stride_v_head, stride_v_dim,
    stride_k_pool_token, stride_k_pool_head, stride_k_pool_dim,
    stride_v_pool_token, stride_v_pool_head, stride_v_pool_dim,
    num_heads, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    position = tl.load(kv_index_ptr + i_token)
    if position < 0:
        return
    o_element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_element = o_element < num_heads * HEAD_DIM
    o_head, o_dim = o_element // HEAD_DIM, o_element % HEAD_DIM
    if tl.program_id(2) == 0:
        p_source = k_ptr + i_token * stride_k_token + o_head * stride_k_head + o_dim * stride_k_dim
        p_pool = k_pool_ptr + position * stride_k_pool_token + o_head * stride_k_pool_head + o_dim * stride_k_pool_dim
        tl.store(p_pool, tl.load(p_source, mask=m_element), mask=m_element)
    else:
        p_source = v_ptr + i_token * stride_v_token + o_head * stride_v_head + o_dim * stride_v_dim
        p_pool = v_pool_ptr + position * stride_v_pool_token + o_head * stride_v_pool_head + o_dim * stride_v_pool_dim
        tl.store(p_pool, tl.load(p_source, mask=m_element), mask=m_element)
