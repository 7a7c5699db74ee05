"""Causal attention of whole prompts over the step's own keys and values, which lie packed rather than in blocks.

For requests of which nothing is cached yet: what they attend to is exactly what the step computes, so keys and values
come in whole tiles (by the tensor memory accelerator where the device has one) instead of through the block table.
An online softmax over tiles of queries (FlashAttention-2, Dao 2023) as in `kernels/paged_attention`, which calls this.

Dimension letters: T packed tokens, B requests, D head dim, Hq/Hkv query/KV heads, G = Hq / Hkv.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention_parts import STEP_POINTERS, Tile, accumulate, load_rows, log2_scales, row_of_tile
from kernels.metadata import AttentionMetadata


def can_attend_prompts(k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetadata, window: int | None) -> bool:
    """Whether the batch has whole prompts that `attend_prompts_` takes: half precision, a head dim that is a power of
    two, and a window that none of them reaches. Decided on the host alone."""
    head_dim = k.shape[-1]
    return (
        metadata.num_prompts > 0
        and (window is None or metadata.max_prompt_len <= window)
        and k.element_size() == 2
        and 16 <= head_dim == triton.next_power_of_2(head_dim)
    )


def prompt_tile(group: int, head_dim: int) -> Tile:
    """The tile for heads in groups of `group` query heads a KV head."""
    smallest = max(16, triton.next_power_of_2(group))
    return Tile(max(smallest, 128), 64, 8, 2) if head_dim <= 128 else Tile(max(smallest, 64), 64, 4, 2)


def attend_prompts_(
    output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    soft_cap: float | None,
) -> None:
    """Write the rows of `output` [T, Hq, D] of all requests whose keys are the step's own.

    Args:
        q: [T, Hq, D].
        k, v: [T, Hkv, D], this step's; copied where a token's heads are not neighbours.
        metadata: the packed batch, with prompts.
        scale, soft_cap: as in `kernels.paged_attention`.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads = len(metadata.query_lens), k.shape[1]
    group = num_heads // num_kv_heads
    k, v = (tensor if tensor.stride()[1:] == (head_dim, 1) else tensor.contiguous() for tensor in (k, v))
    tile = prompt_tile(group, head_dim)
    tile_tokens = tile.rows // group
    has_descriptors = _has_descriptors(q.device) and _is_aligned(k) and _is_aligned(v)
    block = [tile.keys, head_dim]
    rows = [
        TensorDescriptor(tensor, [num_tokens, num_kv_heads * head_dim], [tensor.stride(0), 1], block)
        if has_descriptors
        else tensor
        for tensor in (k, v)
    ]
    logit_scale, cap = log2_scales(scale, soft_cap)
    # Two programs on a processor: one's softmax runs beside the other's products.
    options = {"maxnreg": 128} if has_descriptors and (tile.num_warps, head_dim) == (8, 128) else {}
    # Request b's tiles begin at cu_query_len[b] // tile_tokens + b: room for all, found without another tensor.
    num_tiles = num_tokens // tile_tokens + num_rows
    _prompt_kernel[(num_tiles * num_kv_heads,)](
        output, q, *rows, k, v, *metadata.tensors[:2], logit_scale, cap, num_rows, num_kv_heads,
        *output.stride()[:2], *q.stride()[:2], k.stride(0), v.stride(0),
        GROUP=group, HEAD_DIM=head_dim, HAS_CAP=soft_cap is not None, HAS_DESCRIPTORS=has_descriptors,
        ROWS=tile.rows, TOKENS=tile_tokens, KEYS=tile.keys, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **options,
    )  # fmt: skip


@cache
def _has_descriptors(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=STEP_POINTERS)
def _prompt_kernel(  # type: ignore[no-untyped-def]
    out_ptr, q_ptr, k_rows, v_rows, k_ptr, v_ptr, cu_query_len_ptr, kv_len_ptr, logit_scale, cap, num_rows, num_kv_heads,
    stride_out_token, stride_out_head, stride_q_token, stride_q_head, stride_k_token, stride_v_token,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """TOKENS queries of one prompt for the query heads of one KV head."""
    # The last tiles of a prompt have the most keys: begin with them.
    i_program = tl.num_programs(0) - 1 - tl.program_id(0)
    i_kv_head = i_program % num_kv_heads
    i_tile = i_program // num_kv_heads
    i_row = row_of_tile(cu_query_len_ptr, i_tile, num_rows, TOKENS)
    query_start = tl.load(cu_query_len_ptr + i_row)
    query_len = tl.load(cu_query_len_ptr + i_row + 1) - query_start
    tile_start = (i_tile - query_start // TOKENS - i_row) * TOKENS
    if query_len == 1:
        return
    if tile_start >= query_len:
        return
    if tl.load(kv_len_ptr + i_row) != query_len:
        return

    o_row, o_dim, o_turn = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM), tl.arange(0, KEYS)
    o_query = tile_start + o_row // GROUP
    o_head = i_kv_head.to(tl.int64) * GROUP + o_row % GROUP
    m_row = (o_query < query_len) & (o_row < TOKENS * GROUP)
    o_token = query_start.to(tl.int64) + o_query
    # [ROWS, HEAD_DIM]
    b_q = load_rows(q_ptr + o_token * stride_q_token + o_head * stride_q_head, m_row, HEAD_DIM, HEAD_DIM, True)
    b_out = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    column = i_kv_head * HEAD_DIM
    p_k = k_ptr + query_start.to(tl.int64) * stride_k_token + column
    p_v = v_ptr + query_start.to(tl.int64) * stride_v_token + column

    end = tl.minimum(tile_start + TOKENS, query_len)
    unmasked_end = (tile_start + 1) // KEYS * KEYS
    for turn in range(0, unmasked_end, KEYS):
        if HAS_DESCRIPTORS:
            b_k = k_rows.load([query_start + turn, column])
            b_v = v_rows.load([query_start + turn, column])
        else:
            o_key = (turn + o_turn).to(tl.int64)
            b_k = load_rows(p_k + o_key * stride_k_token, o_key, HEAD_DIM, HEAD_DIM, False)
            b_v = load_rows(p_v + o_key * stride_v_token, o_key, HEAD_DIM, HEAD_DIM, False)
        b_out, b_sum, b_max = accumulate(b_out, b_sum, b_max, b_q, b_k, b_v, o_turn, logit_scale, cap, HAS_CAP, False)
    # Rows behind the prompt's end are another request's, whose numbers must not meet even a weight of zero.
    for turn in range(unmasked_end, end, KEYS):
        o_key = (turn + o_turn).to(tl.int64)
        m_visible = o_key[None, :] <= o_query[:, None]
        b_k = load_rows(p_k + o_key * stride_k_token, o_key < end, HEAD_DIM, HEAD_DIM, True)
        b_v = load_rows(p_v + o_key * stride_v_token, o_key < end, HEAD_DIM, HEAD_DIM, True)
        b_out, b_sum, b_max = accumulate(b_out, b_sum, b_max, b_q, b_k, b_v, m_visible, logit_scale, cap, HAS_CAP, True)
    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    p_out = out_ptr + o_token[:, None] * stride_out_token + o_head[:, None] * stride_out_head + o_dim[None, :]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_row[:, None])
