"""Triton twin of `reference.paged_attention`: attention over the paged KV pools, for decodes and prefill chunks alike.

Decodes (one query token) split a request's keys over several programs, of which the last to end merges the parts, in a
fixed order (flash-decoding, Dao et al. 2023; arrivals are counted as in CUDA's threadFenceReduction sample). Prefill chunks
use tiles of queries with an online softmax (FlashAttention-2, Dao 2023).
Both pack the query heads that share a KV head into the rows of one tile. Called through `kernels`.

Dimension letters: T packed tokens, B requests, M blocks of the longest request, P block size, D head dim, Hq/Hkv
query/KV heads, G = Hq / Hkv, S splits. Logits are kept in units of log2, so that the softmax needs exp2 alone.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention_parts import STEP_POINTERS, Tile, accumulate, capped, load_rows, log2_scales, row_of_tile
from kernels.dependent_launch import can_depend, launch_options, wait
from kernels.kv_write import write_kv_
from kernels.metadata import MAX_KV_HEADS, AttentionMetadata, AttentionTensors
from kernels.prompt_attention import attend_prompts_, can_attend_prompts

MAX_HEAD_DIM = 256
_MAX_SPLIT_LEN = 4096
_MAX_SPLITS = 64
_PROGRAMS_PER_PROCESSOR = 2
_MERGE_NUMBERS = 8192
"""Numbers of splits' parts that a program holds at once while it merges them: 64 registers a thread."""


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    kv_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out[t] = softmax(cap(scale * q[t] . K)) V` over the keys of t's own request at positions up to t's, in the window.

    `cap(x) = soft_cap * tanh(x / soft_cap)`, or x where there is none. Sums are in float32 and do not depend on the
    order in which programs run. Never waits for the device, so it can be captured in a CUDA graph; see
    `AttentionBuffers` for one that is replayed on other requests.

    Args:
        q: [T, Hq, D], the pools' dtype (float32, bfloat16 or float16); Hq is a multiple of Hkv, D at most 256.
        k_pool, v_pool: [num_blocks * P, Hkv, D]; positions that belong to no key of a request are never read into a
            result, whatever they hold.
        metadata: the packed batch.
        scale: factor of the logits.
        window: sliding window in keys, the query's own included; None means all.
        soft_cap: bound of the logits; None means none.
        k, v: [T, Hkv, D], this step's keys and values; prompts of which nothing is cached read them rather than the
            pools.
        kv_index: [T] int64, where k and v are written in the pools, -1 (padding) for nowhere; None where they are there
            already. In a step of decodes alone the same launch does it.

    A token of a mutual span (`metadata.mutual_spans`) sees all of it too.

    Returns:
        [T, Hq, D] contiguous, every row written: zeros for a request without keys (padding).
    """
    num_tokens, num_heads, head_dim = q.shape
    assert q.dtype == k_pool.dtype == v_pool.dtype, "queries and pools differ in dtype"
    num_kv_heads = k_pool.shape[1]
    assert num_heads % num_kv_heads == 0 and num_kv_heads <= MAX_KV_HEADS and head_dim <= MAX_HEAD_DIM, (
        "unsupported heads"
    )
    assert num_tokens == metadata.num_tokens, "the metadata is of another batch"
    assert scale > 0 and (soft_cap is None or soft_cap > 0), "factors of the logits must be positive"
    q, k_pool, v_pool = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k_pool, v_pool))
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    metadata = metadata.on(q.device)
    new = None
    if kv_index is not None:
        assert k is not None and v is not None, "nothing to write"
        if metadata.max_chunks:
            write_kv_(k, v, k_pool, v_pool, kv_index)
        else:
            k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (k, v))
            new = _NewKeys(k, v, kv_index)
    if metadata.max_decodes:
        _attend_decodes(output, q, k_pool, v_pool, metadata, scale, window, soft_cap, new)
    num_chunks = metadata.max_chunks
    has_prompts = k is not None and v is not None and can_attend_prompts(k, v, metadata, window)
    if has_prompts:
        assert k is not None and v is not None
        attend_prompts_(output, q, k, v, metadata, scale, soft_cap)
        num_chunks -= metadata.num_prompts
    if num_chunks:
        _attend_prefills(output, q, k_pool, v_pool, metadata, scale, window, soft_cap, skips_prompts=has_prompts)
    return output


class _NewKeys(NamedTuple):
    """What a step of decodes writes to the pools: [T, Hkv, D] keys and values, [T] places."""

    k: torch.Tensor
    v: torch.Tensor
    kv_index: torch.Tensor


def plan_splits(num_decodes: int, num_kv_heads: int, max_kv_len: int, num_processors: int) -> tuple[int, int]:
    """S and the fewest keys of a split: enough programs to fill the device, but none with next to nothing to do.

    From the batch and the bound of its lengths alone, so that a captured launch fits every step. How many of the S
    splits have keys is up to each request's own length.
    """
    filling = triton.cdiv(_PROGRAMS_PER_PROCESSOR * num_processors, num_decodes * num_kv_heads)
    # A batch that fills the device as it is gains from splits only where some request is much longer than others.
    min_split_len = 64 if filling >= 4 else 256 if filling > 1 else 2048
    wanted = max(triton.next_power_of_2(filling), triton.cdiv(max_kv_len, _MAX_SPLIT_LEN))
    return min(wanted, max(triton.cdiv(max_kv_len, min_split_len), 1), _MAX_SPLITS), min_split_len


def decode_tile(group: int, block_d: int, dtype: torch.dtype) -> Tile:
    """The tile of the decode kernel: rows are the group's heads, keys as many as 16 KiB hold."""
    keys = max(16, min(128, 16384 // (block_d * dtype.itemsize)))
    return Tile(max(16, triton.next_power_of_2(group)), keys, 4, 2 if dtype == torch.float32 else 3)


def prefill_tile(max_rows: int, group: int, block_d: int, dtype: torch.dtype, *, has_room: bool) -> Tile:
    """The tile of the prefill kernel for requests of at most `max_rows` rows (query tokens times G).

    `has_room` says that a program may have 128 KiB of shared memory and more.
    """
    smallest = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(max(smallest, 16 if max_rows <= 16 else 32), 32, 4, 1)
    if max_rows <= 16:
        return Tile(smallest, 64, 4, 2)
    if max_rows <= 64 or block_d > 128:
        return Tile(max(smallest, 64), 64, 4, 2)
    return Tile(max(smallest, 128), 64, 8, 3 if has_room else 2)


def _attend_decodes(
    output: torch.Tensor,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    new: _NewKeys | None,
) -> None:
    """Write the rows of all requests with one query token, and what is `new` to the pools."""
    tensors: AttentionTensors = metadata.tensors
    num_rows, num_heads, head_dim = len(metadata.query_lens), q.shape[1], q.shape[2]
    num_kv_heads = k_pool.shape[1]
    group, block_d = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    max_span = tensors.max_kv_len if window is None else min(window, tensors.max_kv_len)
    splits, min_split_len = plan_splits(metadata.max_decodes, num_kv_heads, max_span, _num_processors(q.device))
    tile = decode_tile(group, block_d, q.dtype)
    # Where one split does all, the parts are neither written nor read.
    parts = (num_rows, num_heads, splits) if splits > 1 else (0, 0, 0)
    part_out = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
    logit_scale, cap = log2_scales(scale, soft_cap)
    heads = triton.next_power_of_2(group)
    k, v, kv_index = new or (q, q, tensors.kv_len)  # The kernel reads none of these where nothing is new.
    _decode_kernel[(num_kv_heads, splits, num_rows)](
        output, part_out, part_lse, q, k_pool, v_pool, k, v, kv_index, *tensors[:3], metadata.arrivals,
        logit_scale, cap, window or 0, splits, min_split_len,
        *output.stride()[:2], *q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        tensors.block_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=metadata.block_size, HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None, HAS_NEW=new is not None, ROWS=tile.rows, KEYS=tile.keys, BLOCK_D=block_d,
        ARRIVALS=metadata.arrivals.stride(0), HEADS=heads,
        MERGE_SPLITS=max(1, min(_MAX_SPLITS, _MERGE_NUMBERS // (heads * block_d))),
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(can_depend(q.device)),
    )  # fmt: skip


def _attend_prefills(
    output: torch.Tensor,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    *,
    skips_prompts: bool,
) -> None:
    """Write the rows of all requests with several query tokens, but for whole prompts where they are skipped."""
    tensors: AttentionTensors = metadata.tensors
    num_rows, num_heads, head_dim = len(metadata.query_lens), q.shape[1], q.shape[2]
    num_kv_heads = k_pool.shape[1]
    group, block_d = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    tile = prefill_tile(metadata.max_query_len * group, group, block_d, q.dtype, has_room=_has_room(q.device))
    tile_tokens = tile.rows // group
    # Request b's tiles begin at cu_query_len[b] // tile_tokens + b: room for all, found without another tensor.
    num_tiles = metadata.num_tokens // tile_tokens + num_rows
    logit_scale, cap = log2_scales(scale, soft_cap)
    spans = metadata.mutual_spans
    assert spans is None or spans.is_contiguous()
    _prefill_kernel[(num_tiles * num_kv_heads,)](
        output, q, k_pool, v_pool, *tensors[:3], tensors.cu_query_len if spans is None else spans,
        logit_scale, cap, window or 0, int(skips_prompts), num_rows, num_kv_heads,
        *output.stride()[:2], *q.stride()[:2], *k_pool.stride()[:2], *v_pool.stride()[:2], tensors.block_table.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=metadata.block_size, HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None, HAS_SPANS=spans is not None,
        ROWS=tile.rows, TOKENS=tile_tokens, KEYS=tile.keys, BLOCK_D=block_d,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def _has_room(device: torch.device) -> bool:
    """Whether a program may have more than 128 KiB of shared memory: the data centre chips of each generation."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3))


@triton.jit
def _load_blocks(p_table, o_key, end, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """[KEYS] blocks of a request's positions `o_key`, the null block from `end` on."""
    return tl.load(p_table + o_key // BLOCK_SIZE, mask=o_key < end, other=0)


@triton.jit
def _load_kv(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, b_block, o_key, m_key, stride_k_token, stride_v_token,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """[KEYS, BLOCK_D] keys and values at a request's positions `o_key`, which lie in `b_block`."""
    position = b_block.to(tl.int64) * BLOCK_SIZE + o_key % BLOCK_SIZE
    b_k = load_rows(k_ptr + position * stride_k_token, m_key, HEAD_DIM, BLOCK_D, IS_MASKED)
    b_v = load_rows(v_ptr + position * stride_v_token, m_key, HEAD_DIM, BLOCK_D, IS_MASKED)
    return b_k, b_v


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    kv_len, window, splits, min_split_len, HAS_WINDOW: tl.constexpr, KEYS: tl.constexpr
):
    """First visible key of a decode, keys of each split, and how many splits have any."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(kv_len - window, 0)
    span = kv_len - first
    # As few as may be, of equal length: the longest is what the others wait for.
    num_wanted = tl.maximum(tl.cdiv(span, tl.maximum(tl.cdiv(span, splits), min_split_len)), 1)
    split_len = tl.maximum(tl.cdiv(tl.cdiv(span, num_wanted), KEYS), 1) * KEYS
    return first, split_len, tl.cdiv(span, split_len)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    part_out_ptr, part_lse_ptr, o_parts, m_head, num_active,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, MERGE_SPLITS: tl.constexpr,
):  # fmt: skip
    """[HEADS, BLOCK_D]: the mean of a decode's splits, weighted by their sums of weights, in the order of the splits.

    `o_parts` [HEADS] is where each head's parts begin. Other processors wrote them: the nearest cache may be stale.
    """
    o_dim = tl.arange(0, BLOCK_D)
    b_out = tl.zeros([HEADS, BLOCK_D], tl.float32)
    b_total = tl.zeros([HEADS], tl.float32)
    b_max = tl.full([HEADS], float("-inf"), tl.float32)
    for turn in range(0, num_active, MERGE_SPLITS):
        o_split = turn + tl.arange(0, MERGE_SPLITS)
        # [MERGE_SPLITS, HEADS]
        m_part = (o_split < num_active)[:, None] & m_head[None, :]
        o_part = o_parts[None, :] + o_split[:, None]
        b_lse = tl.load(part_lse_ptr + o_part, mask=m_part, other=float("-inf"), cache_modifier=".cg")
        b_new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_weight = tl.exp2(b_lse - b_shift[None, :])
        b_decay = tl.exp2(b_max - b_shift)
        # [MERGE_SPLITS, HEADS, BLOCK_D]
        p_part = part_out_ptr + o_part[:, :, None] * HEAD_DIM + o_dim[None, None, :]
        m_row = m_part[:, :, None] & (o_dim < HEAD_DIM)[None, None, :]
        b_part = tl.load(p_part, mask=m_row, other=0.0, cache_modifier=".cg")
        b_out = b_out * b_decay[:, None] + tl.sum(b_part * b_weight[:, :, None], 0)
        b_total = b_total * b_decay + tl.sum(b_weight, 0)
        b_max = b_new_max
    return b_out / tl.where(b_total == 0.0, 1.0, b_total)[:, None]


@triton.jit(
    do_not_specialize=["window", "splits", "min_split_len", "stride_table"],
    do_not_specialize_on_alignment=STEP_POINTERS,
)
def _decode_kernel(  # type: ignore[no-untyped-def]
    out_ptr, part_out_ptr, part_lse_ptr, q_ptr, k_ptr, v_ptr, k_new_ptr, v_new_ptr, kv_index_ptr,
    cu_query_len_ptr, kv_len_ptr, table_ptr, arrivals_ptr,
    logit_scale, cap, window, splits, min_split_len,
    stride_out_token, stride_out_head, stride_q_token, stride_q_head,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_k_new_token, stride_k_new_head, stride_v_new_token, stride_v_new_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_NEW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    ARRIVALS: tl.constexpr, HEADS: tl.constexpr, MERGE_SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One split of one decode's keys for the query heads of one KV head; the last split to end merges all of them.

    With HAS_NEW the decode's own key and value, which its last split holds, are not in the pools yet: they are written there,
    and the softmax begins with them.
    """
    i_kv_head, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_len_ptr + i_row)
    first, split_len, num_active = _split(kv_len, window, splits, min_split_len, HAS_WINDOW, KEYS)
    token = i_row  # with HAS_NEW all rows are decodes
    if not HAS_NEW:
        token = tl.load(cu_query_len_ptr + i_row).to(tl.int64)
        is_decode = tl.load(cu_query_len_ptr + i_row + 1) - token == 1
        num_active = tl.where(is_decode, num_active, -1)
    wait(USE_PDL)
    # The first split also writes the zeros of a row without keys.
    if i_split >= num_active and (i_split > 0 or num_active < 0):
        return
    start = first + i_split * split_len
    end = tl.minimum(start + split_len, kv_len)

    o_row, o_dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    o_head = i_kv_head * GROUP + o_row
    m_head = o_row < GROUP
    # [ROWS, BLOCK_D]
    b_q = load_rows(q_ptr + token * stride_q_token + o_head * stride_q_head, m_head, HEAD_DIM, BLOCK_D, True)
    b_out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    k_ptr += i_kv_head * stride_k_head
    v_ptr += i_kv_head * stride_v_head
    p_table = table_ptr + i_row * stride_table
    if HAS_NEW and i_split == num_active - 1:
        end -= 1
        p_k_new = k_new_ptr + token * stride_k_new_token + i_kv_head * stride_k_new_head + o_dim
        p_v_new = v_new_ptr + token * stride_v_new_token + i_kv_head * stride_v_new_head + o_dim
        b_k_new = tl.load(p_k_new, mask=o_dim < HEAD_DIM, other=0.0)
        b_v_new = tl.load(p_v_new, mask=o_dim < HEAD_DIM, other=0.0)
        position = tl.load(kv_index_ptr + token)
        m_write = (o_dim < HEAD_DIM) & (position >= 0)
        tl.store(k_ptr + position * stride_k_token + o_dim, b_k_new, mask=m_write)
        tl.store(v_ptr + position * stride_v_token + o_dim, b_v_new, mask=m_write)
        b_product = tl.sum(b_q.to(tl.float32) * b_k_new.to(tl.float32)[None, :], 1)
        b_logit, factor = capped(b_product, logit_scale, cap, HAS_CAP)
        b_max = b_logit * factor
        b_sum = tl.full([ROWS], 1.0, tl.float32)
        b_out += b_v_new.to(tl.float32)[None, :]
    for turn in range(start, end, KEYS):
        o_key = turn + tl.arange(0, KEYS)
        m_key = o_key < end
        b_block = _load_blocks(p_table, o_key, end, BLOCK_SIZE)
        b_k, b_v = _load_kv(
            k_ptr, v_ptr, b_block, o_key, m_key, stride_k_token, stride_v_token, BLOCK_SIZE, HEAD_DIM, BLOCK_D, True
        )
        b_out, b_sum, b_max = accumulate(
            b_out, b_sum, b_max, b_q, b_k, b_v, m_key[None, :], logit_scale, cap, HAS_CAP, True
        )
    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    m_out = m_head[:, None] & (o_dim[None, :] < HEAD_DIM)
    if num_active > 1:
        o_part = (i_row * GROUP * tl.num_programs(0) + o_head) * splits + i_split
        tl.store(part_out_ptr + o_part[:, None] * HEAD_DIM + o_dim[None, :], b_out, mask=m_out)
        tl.store(part_lse_ptr + o_part, b_max + tl.log2(b_sum), mask=m_head)
        # All of this program's parts are written before it counts itself, and all of the others' before the last one reads.
        tl.debug_barrier()
        p_arrivals = arrivals_ptr + i_row * ARRIVALS + i_kv_head
        if tl.atomic_add(p_arrivals, 1, sem="acq_rel", scope="gpu") == num_active - 1:
            tl.store(p_arrivals, 0)
            o_merged = i_kv_head * GROUP + tl.arange(0, HEADS)
            m_merged = tl.arange(0, HEADS) < GROUP
            o_parts = (i_row * GROUP * tl.num_programs(0) + o_merged) * splits
            b_merged = _merge(
                part_out_ptr, part_lse_ptr, o_parts, m_merged, num_active, HEAD_DIM, BLOCK_D, HEADS, MERGE_SPLITS
            )
            p_merged = out_ptr + token * stride_out_token + o_merged[:, None] * stride_out_head + o_dim[None, :]
            m_merged_out = m_merged[:, None] & (o_dim[None, :] < HEAD_DIM)
            tl.store(p_merged, b_merged.to(out_ptr.dtype.element_ty), mask=m_merged_out)
    else:
        p_out = out_ptr + token * stride_out_token + o_head[:, None] * stride_out_head + o_dim[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)


@triton.jit(
    do_not_specialize=["window", "skips_prompts", "num_rows", "stride_table"],
    do_not_specialize_on_alignment=[*STEP_POINTERS, "span_ptr"],
)
def _prefill_kernel(  # type: ignore[no-untyped-def]
    out_ptr, q_ptr, k_ptr, v_ptr, cu_query_len_ptr, kv_len_ptr, table_ptr, span_ptr,
    logit_scale, cap, window, skips_prompts, num_rows, num_kv_heads,
    stride_out_token, stride_out_head, stride_q_token, stride_q_head,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SPANS: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """TOKENS queries of one request for the query heads of one KV head."""
    # The last tiles of a request have the most keys: begin with them.
    i_program = tl.num_programs(0) - 1 - tl.program_id(0)
    i_kv_head = (i_program % num_kv_heads).to(tl.int64)
    i_tile = i_program // num_kv_heads
    i_row = row_of_tile(cu_query_len_ptr, i_tile, num_rows, TOKENS)
    query_start = tl.load(cu_query_len_ptr + i_row)
    query_len = tl.load(cu_query_len_ptr + i_row + 1) - query_start
    tile_start = (i_tile - query_start // TOKENS - i_row) * TOKENS
    if query_len == 1:
        return
    if tile_start >= query_len:
        return
    kv_len = tl.load(kv_len_ptr + i_row)
    if (skips_prompts != 0) & (kv_len == query_len):
        return

    o_row, o_dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    o_query = tile_start + o_row // GROUP
    o_head = i_kv_head * GROUP + o_row % GROUP
    m_row = (o_query < query_len) & (o_row < TOKENS * GROUP)
    o_token = query_start.to(tl.int64) + o_query
    # [ROWS, BLOCK_D]
    b_q = load_rows(q_ptr + o_token * stride_q_token + o_head * stride_q_head, m_row, HEAD_DIM, BLOCK_D, True)
    b_out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    k_ptr += i_kv_head * stride_k_head
    v_ptr += i_kv_head * stride_v_head
    p_table = table_ptr + i_row.to(tl.int64) * stride_table

    # Positions of the queries in their request, of the tile's first query and of what follows its last.
    o_position = kv_len - query_len + o_query
    first_position = kv_len - query_len + tile_start
    end = tl.minimum(first_position + TOKENS, kv_len)
    start = 0
    unmasked_end = tl.maximum(first_position + 1, 0) // KEYS * KEYS
    if HAS_WINDOW:
        start = tl.maximum(first_position + 1 - window, 0)
        unmasked_end = start
    if HAS_SPANS:
        # [ROWS] keys that a query sees although they follow it
        b_span_start = tl.load(span_ptr + 2 * o_token, mask=m_row, other=0)
        b_span_end = tl.load(span_ptr + 2 * o_token + 1, mask=m_row, other=0)
        end = tl.minimum(tl.maximum(end, tl.max(b_span_end, 0)), kv_len)
    # A turn's blocks are read in the turn before: its keys and values can then be on their way several turns ahead.
    b_block = _load_blocks(p_table, start + tl.arange(0, KEYS), end, BLOCK_SIZE)
    for turn in range(start, unmasked_end, KEYS):
        o_key = turn + tl.arange(0, KEYS)
        b_k, b_v = _load_kv(
            k_ptr, v_ptr, b_block, o_key, o_key, stride_k_token, stride_v_token, BLOCK_SIZE, HEAD_DIM, BLOCK_D, False
        )
        b_block = _load_blocks(p_table, o_key + KEYS, end, BLOCK_SIZE)
        b_out, b_sum, b_max = accumulate(b_out, b_sum, b_max, b_q, b_k, b_v, o_key, logit_scale, cap, HAS_CAP, False)
    for turn in range(unmasked_end, end, KEYS):
        o_key = turn + tl.arange(0, KEYS)
        m_visible = o_key[None, :] <= o_position[:, None]
        if HAS_WINDOW:
            m_visible = m_visible & (o_key[None, :] > o_position[:, None] - window)
        if HAS_SPANS:
            m_visible = m_visible | ((o_key[None, :] >= b_span_start[:, None]) & (o_key[None, :] < b_span_end[:, None]))
        b_k, b_v = _load_kv(
            k_ptr, v_ptr, b_block, o_key, o_key < end, stride_k_token, stride_v_token,
            BLOCK_SIZE, HEAD_DIM, BLOCK_D, True,
        )  # fmt: skip
        b_block = _load_blocks(p_table, o_key + KEYS, end, BLOCK_SIZE)
        b_out, b_sum, b_max = accumulate(b_out, b_sum, b_max, b_q, b_k, b_v, m_visible, logit_scale, cap, HAS_CAP, True)
    b_out = b_out / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    p_out = out_ptr + o_token[:, None] * stride_out_token + o_head[:, None] * stride_out_head + o_dim[None, :]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_row[:, None] & (o_dim[None, :] < HEAD_DIM))
