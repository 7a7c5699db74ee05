"""Batched LoRA on a GPU: two Triton launches for all modules that share an input, any mix of adapters, ranks and base rows.

The twin of `reference.lora_add_group_`. `shrink` writes partial sums `x @ A.T` over splits of the input columns to
scratch; `expand` adds the splits up in a fixed order, multiplies with B and adds to the output. No atomics: the same
input gives the same bits. Programs walk over the step's token tiles (`LoraMetadata.tiles`), so a captured graph
follows the adapters of the step; the work is that of the active tiles and of each adapter's own rank.

T packed tokens, N LoRA rows, M slices of the output, R rank of the buffers, S splits of the input columns.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels import tuning
from kernels.dependent_launch import can_depend, launch_options, let_next_start, wait
from kernels.launching import launch
from kernels.metadata import LoraMetadata

# mypy: disable-error-code="no-untyped-def"


def lora_add_group_(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[Sequence[int]],
    slice_ends: tuple[int, ...],
    metadata: LoraMetadata,
) -> None:
    """As `reference.lora_add_group_`, which describes the arguments; `host_ranks` is not read.

    Rows of `output` and `x` may be strided, their columns not; the other tensors are contiguous.
    """
    shrink, expand = choose_tiles(x, lora_a, slice_ends, metadata)
    lora_add_group_with_tiles_(output, x, lora_a, lora_b, ranks, slice_ends, metadata, shrink, expand)


def lora_shrink(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[Sequence[int]],
    metadata: LoraMetadata,
) -> torch.Tensor:
    """As `reference.lora_shrink`."""
    (num_tokens, in_features), (_, num_slices, max_rank, _) = x.shape, lora_a.shape
    tile, _ = choose_tiles(x, lora_a, (1,), metadata)
    shape = (-(-in_features // tile.split_len), num_tokens, num_slices, max_rank)
    assert num_tokens == metadata.num_tokens, "the metadata describes another step"
    assert x.stride(1) == 1 and lora_a.is_contiguous() and ranks.is_contiguous()
    assert math.prod(shape) <= metadata.scratch.numel(), "max_columns or max_in is too low"
    partial_sums = metadata.scratch[: math.prod(shape)].view(shape).zero_()
    launch_shrink(x, lora_a, ranks, metadata, tile, launch_options(False))
    return partial_sums.sum(0)


def lora_expand_(
    output: torch.Tensor,
    shrunk: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[Sequence[int]],
    slice_ends: tuple[int, ...],
    metadata: LoraMetadata,
) -> None:
    """As `reference.lora_expand_`."""
    assert output.stride(1) == 1 and lora_b.is_contiguous() and slice_ends[-1] == output.shape[1] == lora_b.shape[1]
    assert shrunk.shape == (metadata.num_tokens, len(slice_ends), lora_b.shape[2])
    kind, family = tuning.kind_of(output.shape[0]).name, metadata.family if output.element_size() == 2 else "any"
    tile = tuning.expand_tile(family, kind, lora_b.shape[2], slice_ends[-1])
    metadata.scratch[: shrunk.numel()].view(shrunk.shape).copy_(shrunk)
    launch_expand(output, lora_b, ranks, slice_ends, metadata, 1, tile, launch_options(False))


def choose_tiles(
    x: torch.Tensor, lora_a: torch.Tensor, slice_ends: tuple[int, ...], metadata: LoraMetadata
) -> tuple[tuning.ShrinkTile, tuning.ExpandTile]:
    """The table's rows for a call; those for a family are for the half formats: twice the bytes need smaller tiles."""
    kind, rank = tuning.kind_of(x.shape[0]).name, lora_a.shape[2]
    family = metadata.family if x.element_size() == 2 else "any"
    shrink = tuning.shrink_tile(family, kind, rank, x.shape[1])
    return shrink, tuning.expand_tile(family, kind, rank, slice_ends[-1])


def lora_add_group_with_tiles_(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    slice_ends: tuple[int, ...],
    metadata: LoraMetadata,
    shrink: tuning.ShrinkTile,
    expand: tuning.ExpandTile,
    *,
    is_overlapped: bool | None = None,
) -> None:
    """`lora_add_group_` with given tiles, for the tuning command; `is_overlapped` None overlaps launches where it can."""
    (num_tokens, in_features), (_, num_slices, max_rank, _) = x.shape, lora_a.shape
    num_splits = -(-in_features // shrink.split_len)
    assert num_tokens == metadata.num_tokens, "the metadata describes another step"
    assert output.stride(1) == x.stride(1) == 1 and lora_a.is_contiguous() and lora_b.is_contiguous()
    assert slice_ends[-1] == output.shape[1] == lora_b.shape[1] and len(slice_ends) == num_slices
    assert num_splits * num_tokens * num_slices * max_rank <= metadata.scratch.numel(), (
        "max_columns or max_in is too low"
    )
    if is_overlapped is None:
        is_overlapped = can_depend(x.device)
    dependence = launch_options(is_overlapped)
    launch_shrink(x, lora_a, ranks, metadata, shrink, dependence)
    launch_expand(output, lora_b, ranks, slice_ends, metadata, num_splits, expand, dependence)


def launch_shrink(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    ranks: torch.Tensor,
    metadata: LoraMetadata,
    tile: tuning.ShrinkTile,
    dependence: dict[str, bool],
) -> None:
    """Scratch becomes the partial sums of `x @ A.T`."""
    (num_tokens, in_features), (_, num_slices, max_rank, _) = x.shape, lora_a.shape
    num_splits, num_rank_blocks = -(-in_features // tile.split_len), -(-max_rank // tile.block_rank)
    max_tiles = tuning.num_tiles_of(num_tokens, metadata.max_segments)
    num_items = max_tiles * num_splits * num_slices * num_rank_blocks
    launch(
        _shrink_kernel, (min(num_items, num_processors(x.device) * tile.programs_per_sm),),
        x, lora_a, ranks, metadata.tiles, metadata.scratch, num_tokens, x.stride(0), in_features,
        M=num_slices, R=max_rank, S=num_splits, SPLIT_LEN=tile.split_len,
        BLOCK_T=tuning.kind_of(num_tokens).block_tokens, BLOCK_R=tile.block_rank, BLOCK_K=tile.block_in,
        GROUPS=tile.num_groups, NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps, num_stages=1, **dependence,
    )  # fmt: skip


def launch_expand(
    output: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    slice_ends: tuple[int, ...],
    metadata: LoraMetadata,
    num_splits: int,
    tile: tuning.ExpandTile,
    dependence: dict[str, bool],
    *,
    follows_product: bool = False,
    is_delta: bool = False,
) -> None:
    """The output gains the sums of the splits in scratch, times B; with `is_delta` adapters' rows become that, or 0.

    `follows_product` says that the launch ahead wrote the output.
    """
    num_tokens, max_rank = output.shape[0], lora_b.shape[2]
    block_tokens = tuning.kind_of(num_tokens).block_tokens
    slice_starts = (0, *slice_ends[:-1])
    first_blocks = [0]
    for start, end in zip(slice_starts, slice_ends, strict=True):
        first_blocks.append(first_blocks[-1] + -(-(end - start) // tile.block_out))
    num_items = tuning.num_tiles_of(num_tokens, metadata.max_segments) * first_blocks[-1]
    block_rank = max(16, min(MAX_BLOCK_RANK, triton.next_power_of_2(max_rank)))
    # As many splits at once as 64 registers a thread hold.
    num_at_once = max(1, min(triton.next_power_of_2(num_splits), 2048 * tile.num_warps // (block_tokens * block_rank)))
    kernel, options = _expand_kernel, {}
    if tile.num_stages > 0 and max_rank <= MAX_BLOCK_RANK:
        kernel, options = _expand_stream_kernel, {"NUM_STAGES": tile.num_stages}
    launch(
        kernel, (min(num_items, num_processors(output.device) * tile.programs_per_sm),),
        output, lora_b, ranks, metadata.tiles, metadata.scratch, num_tokens, output.stride(0), output.shape[1],
        SLICE_STARTS=slice_starts, SLICE_ENDS=tuple(slice_ends), FIRST_BLOCKS=tuple(first_blocks),
        M=len(slice_ends), R=max_rank, S=num_splits, AT_ONCE=num_at_once,
        BLOCK_T=block_tokens, BLOCK_R=block_rank, BLOCK_O=tile.block_out,
        FOLLOWS_PRODUCT=follows_product, IS_DELTA=is_delta,
        num_warps=tile.num_warps, num_stages=1, **dependence, **options,
    )  # fmt: skip


MAX_BLOCK_RANK = 64


@functools.cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


# Dependent launches: `shrink` lets `expand` start only after its own wait, so whatever came before `shrink` is complete when
# `expand` starts, the output's base product included; where that product is the launch ahead (FOLLOWS_PRODUCT), the output is
# read after the wait.


@triton.jit
def _load_tile(p_tiles, i_tile, is_there):
    """LoRA row, first and last token of a tile. The first is asked for beside the number of tiles, not after it."""
    p_tile = p_tiles + 4 + 4 * i_tile
    lora_slot = tl.load(p_tile, mask=is_there, other=0)
    return lora_slot, tl.load(p_tile + 1, mask=is_there, other=0), tl.load(p_tile + 2, mask=is_there, other=0)


@triton.jit
def _load_x(p_x, o_t, m_t, k_start, k_end, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr):
    """[BLOCK_T, K], or [GROUPS, BLOCK_T, K] with neighbouring columns for each group; `o_t` are offsets of rows."""
    if GROUPS == 1:
        o_k = k_start + tl.arange(0, BLOCK_K)
        b_x = tl.load(p_x + o_t[:, None] + o_k[None, :], mask=m_t[:, None] & (o_k < k_end)[None, :], other=0.0)
    else:
        o_k = k_start + tl.arange(0, GROUPS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        m_x = m_t[None, :, None] & (o_k < k_end)[:, None, :]
        b_x = tl.load(p_x + o_t[None, :, None] + o_k[:, None, :], mask=m_x, other=0.0)
    return b_x


@triton.jit
def _load_a(p_a, o_r, m_r, k_start, k_end, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr):
    """[K, BLOCK_R], or [GROUPS, K, BLOCK_R]: the transpose of A's rows at offsets `o_r`."""
    if GROUPS == 1:
        o_k = k_start + tl.arange(0, BLOCK_K)
        b_a = tl.load(p_a + o_r[None, :] + o_k[:, None], mask=m_r[None, :] & (o_k < k_end)[:, None], other=0.0)
    else:
        o_k = k_start + tl.arange(0, GROUPS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        m_a = m_r[None, None, :] & (o_k < k_end)[:, :, None]
        b_a = tl.load(p_a + o_r[None, None, :] + o_k[:, :, None], mask=m_a, other=0.0)
    return b_a


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    p_x, p_a, p_ranks, p_tiles, p_scratch, num_tokens, x_stride, in_features,
    M: tl.constexpr, R: tl.constexpr, S: tl.constexpr, SPLIT_LEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr,
    NUM_STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """`scratch[s, t, m, :r] = x[t, split s] @ A[n, m, :r, split s].T`, zeros up to the end of the last chunk of ranks."""
    RANK_BLOCKS: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    STEP: tl.constexpr = BLOCK_K * GROUPS
    ITEMS: tl.constexpr = RANK_BLOCKS * M * S
    num_items = tl.load(p_tiles) * ITEMS
    lora_slot, t_start, t_end = _load_tile(p_tiles, tl.program_id(0) // ITEMS, True)
    for i_item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        # Programs side by side read the same columns of x.
        i_rank = i_item % RANK_BLOCKS
        i_slice = (i_item // RANK_BLOCKS) % M
        i_split = (i_item // (RANK_BLOCKS * M)) % S
        i_row = lora_slot.to(tl.int64) * M + i_slice
        rank = tl.load(p_ranks + i_row)
        if i_rank * BLOCK_R < rank:
            r = i_rank * BLOCK_R + tl.arange(0, BLOCK_R)
            t = t_start + tl.arange(0, BLOCK_T)
            m_r, m_t = r < rank, t < t_end
            o_r = (i_row * R + r) * in_features  # [BLOCK_R]
            o_t = t.to(tl.int64) * x_stride  # [BLOCK_T]
            k_start = i_split * SPLIT_LEN
            k_end = tl.minimum(k_start + SPLIT_LEN, in_features)
            if STEP == SPLIT_LEN:
                b_a = _load_a(p_a, o_r, m_r, k_start, k_end, BLOCK_K, GROUPS)
                wait(USE_PDL)
                let_next_start(USE_PDL)
                b_x = _load_x(p_x, o_t, m_t, k_start, k_end, BLOCK_K, GROUPS)
                b_h = tl.dot(b_x, b_a, input_precision="ieee")
            else:
                wait(USE_PDL)
                let_next_start(USE_PDL)
                if GROUPS == 1:
                    b_h = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
                else:
                    b_h = tl.zeros([GROUPS, BLOCK_T, BLOCK_R], dtype=tl.float32)
                for k in tl.range(k_start, k_end, STEP, num_stages=NUM_STAGES):
                    b_a = _load_a(p_a, o_r, m_r, k, k_end, BLOCK_K, GROUPS)
                    b_x = _load_x(p_x, o_t, m_t, k, k_end, BLOCK_K, GROUPS)
                    b_h = tl.dot(b_x, b_a, b_h, input_precision="ieee")
            if GROUPS > 1:
                b_h = tl.sum(b_h, axis=0)
            o_h = ((i_split.to(tl.int64) * num_tokens + t) * M + i_slice) * R
            tl.store(p_scratch + o_h[:, None] + r[None, :], b_h, mask=m_t[:, None] & _in_rank(r, rank, R)[None, :])
        i_next = i_item + tl.num_programs(0)
        lora_slot, t_start, t_end = _load_tile(p_tiles, i_next // ITEMS, i_next < num_items)
    wait(USE_PDL)


@triton.jit
def _in_rank(r, rank, R: tl.constexpr):
    """[BLOCK_R] bool: ranks to load or store; in whole chunks of 8 where rows are, so that accesses are 16 bytes wide."""
    m_r = r < rank
    if R % 8 == 0:
        m_r = r // 8 < (rank + 7) // 8
    return m_r


@triton.jit
def _load_h(
    p_scratch, num_tokens, t, m_t, i_slice, r, rank,
    M: tl.constexpr, R: tl.constexpr, S: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """[BLOCK_T, BLOCK_R] float32: the sum over the splits in a fixed order.

    Few ranks: one load of three dimensions, `AT_ONCE` splits in flight together. More would cost too many registers so,
    and each split is brought into the product's layout by itself.
    """
    m_h = m_t[:, None] & _in_rank(r, rank, R)[None, :]
    o_h = ((t * M + i_slice) * R)[:, None] + r[None, :]
    b_h = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    if BLOCK_R == 16:
        o_split = tl.arange(0, AT_ONCE)[:, None, None]
        o_part = o_split * (num_tokens * (M * R)) + o_h[None, :, :]
        for first in tl.static_range(0, S, AT_ONCE):
            m_part = m_h[None, :, :] & (first + o_split < S)
            p_first = p_scratch + first * (num_tokens.to(tl.int64) * (M * R))
            b_h += tl.sum(tl.load(p_first + o_part, mask=m_part, other=0.0), axis=0)
    else:
        for _ in tl.static_range(S):
            b_h += tl.load(p_scratch + o_h, mask=m_h, other=0.0)
            p_scratch += num_tokens.to(tl.int64) * (M * R)
    return b_h


@triton.jit
def _locate(
    i_block, SLICE_STARTS: tl.constexpr, SLICE_ENDS: tl.constexpr, FIRST_BLOCKS: tl.constexpr,
    M: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """The slice of an output block, the block's first column, the slice's last column and its last block."""
    i_slice = i_block * 0
    o_start = i_block * BLOCK_O
    o_end = i_slice + SLICE_ENDS[0]
    last_block = i_slice + FIRST_BLOCKS[1]
    for i in tl.static_range(1, M):
        is_here = i_block >= FIRST_BLOCKS[i]
        i_slice = tl.where(is_here, i, i_slice)
        o_start = tl.where(is_here, SLICE_STARTS[i] + (i_block - FIRST_BLOCKS[i]) * BLOCK_O, o_start)
        o_end = tl.where(is_here, SLICE_ENDS[i], o_end)
        last_block = tl.where(is_here, FIRST_BLOCKS[i + 1], last_block)
    return i_slice, o_start, o_end, last_block


@triton.jit
def _load_b(p_b, i_row, o, m_o, r, rank, out_features, R: tl.constexpr):
    """[BLOCK_R, BLOCK_O]: the transpose of B's rows `o`, with zeros above the rank, whatever lies there."""
    p_block = p_b + ((i_row * out_features + o) * R)[None, :] + r[:, None]
    b_b = tl.load(p_block, mask=m_o[None, :] & _in_rank(r, rank, R)[:, None], other=0.0)
    return tl.where(r[:, None] < rank, b_b, 0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    p_out, p_b, p_ranks, p_tiles, p_scratch, num_tokens, out_stride, out_features,
    SLICE_STARTS: tl.constexpr, SLICE_ENDS: tl.constexpr, FIRST_BLOCKS: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, S: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
    FOLLOWS_PRODUCT: tl.constexpr, IS_DELTA: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """`output[t, slice m] += sum(scratch[:, t, m, :r]) @ B[n, slice m, :r].T`; with IS_DELTA, `=`, also where r is 0."""
    num_items = tl.load(p_tiles) * FIRST_BLOCKS[M]
    lora_slot, t_start, t_end = _load_tile(p_tiles, tl.program_id(0) // FIRST_BLOCKS[M], True)
    for i_item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        i_slice, o_start, o_end, _ = _locate(
            i_item % FIRST_BLOCKS[M], SLICE_STARTS, SLICE_ENDS, FIRST_BLOCKS, M, BLOCK_O
        )
        i_row = lora_slot.to(tl.int64)
        rank = tl.load(p_ranks + i_row * M + i_slice)
        if (rank > 0) | IS_DELTA:
            r = tl.arange(0, BLOCK_R)
            t = t_start + tl.arange(0, BLOCK_T)
            o = o_start + tl.arange(0, BLOCK_O)
            m_t, m_o = t < t_end, o < o_end
            m_out = m_t[:, None] & m_o[None, :]
            p_block = p_out + (t.to(tl.int64) * out_stride)[:, None] + o[None, :]
            b_b = _load_b(p_b, i_row, o, m_o, r, rank, out_features, R)
            if FOLLOWS_PRODUCT:
                wait(USE_PDL)
            if not IS_DELTA:
                b_out = tl.load(p_block, mask=m_out, other=0.0)  # [BLOCK_T, BLOCK_O]
            wait(USE_PDL)
            b_h = _load_h(p_scratch, num_tokens, t, m_t, i_slice, r, rank, M, R, S, AT_ONCE, BLOCK_T, BLOCK_R)
            acc = tl.dot(b_h.to(b_b.dtype), b_b, input_precision="ieee")
            if R > BLOCK_R:
                for r_start in tl.range(BLOCK_R, rank, BLOCK_R, num_stages=1):
                    b_b = _load_b(p_b, i_row, o, m_o, r_start + r, rank, out_features, R)
                    b_h = _load_h(
                        p_scratch, num_tokens, t, m_t, i_slice, r_start + r, rank, M, R, S, AT_ONCE, BLOCK_T, BLOCK_R
                    )
                    acc = tl.dot(b_h.to(b_b.dtype), b_b, acc, input_precision="ieee")
            if not IS_DELTA:
                acc += b_out.to(tl.float32)
            tl.store(p_block, acc.to(p_out.dtype.element_ty), mask=m_out)
        i_next = i_item + tl.num_programs(0)
        lora_slot, t_start, t_end = _load_tile(p_tiles, i_next // FIRST_BLOCKS[M], i_next < num_items)
    wait(USE_PDL)


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_stream_kernel(
    p_out, p_b, p_ranks, p_tiles, p_scratch, num_tokens, out_stride, out_features,
    SLICE_STARTS: tl.constexpr, SLICE_ENDS: tl.constexpr, FIRST_BLOCKS: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, S: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
    NUM_STAGES: tl.constexpr, FOLLOWS_PRODUCT: tl.constexpr, IS_DELTA: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """As `_expand_kernel`, for R <= BLOCK_R and much work: all blocks are dealt in even, contiguous shares, and a program
    keeps `h` while it runs along a slice with B and the output on their way in advance. In small steps the first block
    of a share is on its way before `h` is there; in large ones, it would only take up room."""
    NUM_BLOCKS: tl.constexpr = FIRST_BLOCKS[M]
    total = tl.load(p_tiles).to(tl.int64) * NUM_BLOCKS
    i_share = (tl.program_id(0) * total // tl.num_programs(0)).to(tl.int32)
    share_end = ((tl.program_id(0) + 1) * total // tl.num_programs(0)).to(tl.int32)
    r = tl.arange(0, BLOCK_R)
    is_first = i_share < share_end
    if BLOCK_T <= 32:
        lora_slot, t_start, t_end = _load_tile(p_tiles, i_share // NUM_BLOCKS, is_first)
        i_slice, o_start, o_end, _ = _locate(i_share % NUM_BLOCKS, SLICE_STARTS, SLICE_ENDS, FIRST_BLOCKS, M, BLOCK_O)
        rank = tl.load(p_ranks + lora_slot.to(tl.int64) * M + i_slice, mask=is_first, other=0)
        o = o_start + tl.arange(0, BLOCK_O)
        m_o = (o < o_end) & is_first
        t = t_start + tl.arange(0, BLOCK_T)
        p_block = p_out + (t.to(tl.int64) * out_stride)[:, None] + o[None, :]
        m_out = (t < t_end)[:, None] & (m_o & ((rank > 0) | IS_DELTA))[None, :]
        b_b = _load_b(p_b, lora_slot.to(tl.int64), o, m_o, r, rank, out_features, R)
        if FOLLOWS_PRODUCT:
            wait(USE_PDL)
        if not IS_DELTA:
            b_out = tl.load(p_block, mask=m_out, other=0.0)
    wait(USE_PDL)
    while i_share < share_end:
        i_tile, i_block = i_share // NUM_BLOCKS, i_share % NUM_BLOCKS
        i_slice, o_start, o_end, last_block = _locate(i_block, SLICE_STARTS, SLICE_ENDS, FIRST_BLOCKS, M, BLOCK_O)
        num_blocks = tl.minimum(last_block - i_block, share_end - i_share)
        lora_slot, t_start, t_end = _load_tile(p_tiles, i_tile, True)
        i_row = lora_slot.to(tl.int64)
        rank = tl.load(p_ranks + i_row * M + i_slice)
        if (rank > 0) | IS_DELTA:
            t = t_start + tl.arange(0, BLOCK_T)
            m_t = t < t_end
            b_h = _load_h(p_scratch, num_tokens, t, m_t, i_slice, r, rank, M, R, S, AT_ONCE, BLOCK_T, BLOCK_R)
            b_h = b_h.to(p_b.dtype.element_ty)
            p_rows = p_out + (t.to(tl.int64) * out_stride)[:, None]
            o_first = o_start
            if BLOCK_T <= 32:  # noqa: SIM102 - decided when the kernel is compiled
                if is_first:
                    acc = tl.dot(b_h, b_b, input_precision="ieee")
                    if not IS_DELTA:
                        acc += b_out.to(tl.float32)
                    tl.store(p_block, acc.to(p_out.dtype.element_ty), mask=m_out)
                    o_first += BLOCK_O
            for first in tl.range(o_first, o_start + num_blocks * BLOCK_O, BLOCK_O, num_stages=NUM_STAGES):
                o = first + tl.arange(0, BLOCK_O)
                m_o = o < o_end
                m_next = m_t[:, None] & m_o[None, :]
                b_next = _load_b(p_b, i_row, o, m_o, r, rank, out_features, R)
                if IS_DELTA:
                    b_sum = tl.dot(b_h, b_next, input_precision="ieee")
                else:
                    b_sum = tl.load(p_rows + o[None, :], mask=m_next, other=0.0).to(tl.float32)
                    b_sum += tl.dot(b_h, b_next, input_precision="ieee")
                tl.store(p_rows + o[None, :], b_sum.to(p_out.dtype.element_ty), mask=m_next)
        is_first = False
        i_share += num_blocks
