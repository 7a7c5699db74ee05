"""The only door to the kernels: pure functions on tensors, no knowledge of requests, adapters or models.

Callers import from here and never from the modules behind. Tensors on a GPU go to Triton kernels; all others, and shapes
that those do not know, to plain PyTorch (`kernels/reference`), which is also the oracle that the kernels are tested against.

Dimension letters: T packed tokens, B requests, R rank, N adapter rows, M slices of a group's output, P block size,
D head dim, Hq/Hkv query/KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels import reference
from kernels.metadata import (
    MAX_DELTA_TOKENS,
    NULL_BLOCK,
    AttentionBuffers,
    AttentionMetadata,
    AttentionTensors,
    LoraMetadata,
    LoraSegment,
)

try:
    import triton  # noqa: F401
except ImportError:  # none for this platform
    HAS_TRITON = False
    MAX_HEAD_DIM = 0

    def compile_only(work: Callable[[], None]) -> None:
        """Nothing: there are no kernels."""
else:  # What fails from here on is a fault of these modules, and must be seen.
    HAS_TRITON = True
    from kernels import kv_write as _kv_write
    from kernels import lora as _lora
    from kernels import lora_beside as _lora_beside
    from kernels import lora_embedding as _lora_embedding
    from kernels import paged_attention as _paged_attention
    from kernels import scale_shift as _scale_shift
    from kernels import scatter as _scatter
    from kernels.launching import compile_only

    MAX_HEAD_DIM = _paged_attention.MAX_HEAD_DIM

__all__ = [
    "HAS_TRITON",
    "MAX_DELTA_TOKENS",
    "MAX_HEAD_DIM",
    "NULL_BLOCK",
    "AttentionBuffers",
    "AttentionMetadata",
    "AttentionTensors",
    "LoraMetadata",
    "LoraSegment",
    "compile_only",
    "lora_add_group_",
    "lora_embedding_add_",
    "lora_expand_",
    "lora_product",
    "lora_shrink",
    "paged_attention",
    "product_and_delta",
    "scale_shift_",
    "scatter_rows_",
    "write_kv_",
]


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
    """`output[s:e, c] += (x[s:e] @ lora_a[n, m, :r].T) @ lora_b[n, c, :r].T` for each segment `(n, s, e)` and slice m,
    with `r = ranks[n, m]` and `c` the slice's columns.

    The modules of a group read the same input and write neighbouring columns of one output (q, k and v; gate and up).
    Tokens in no segment, and slices whose rank is 0, are left exactly as they are.

    Args:
        output: [T, O], accumulated in place.
        x: [T, in], same dtype as the LoRA buffers.
        lora_a: [N, M, R, in]; what lies above a slice's own rank is never used.
        lora_b: [N, O, R], with the adapter's scale folded in.
        ranks: [N, M] int32 on the device of `x`, 0 where an adapter does not touch a slice: what the GPU reads.
        host_ranks: the same numbers on the host: what the CPU reads.
        slice_ends: M ends of the slices in the output's columns; the last is O.
        metadata: the step's segments, with `num_tokens` T.
    """
    add = _lora.lora_add_group_ if HAS_TRITON and metadata.has_tiles else reference.lora_add_group_
    add(output, x, lora_a, lora_b, ranks, host_ranks, slice_ends, metadata)


def scale_shift_(
    output: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    is_used: torch.Tensor,
    host_is_used: Sequence[bool],
    metadata: LoraMetadata,
) -> None:
    """`output[s:e] = output[s:e] * scale[n] + shift[n]` for each segment `(n, s, e)` with `is_used[n]`, in float32.

    What DoRA's magnitudes and trained biases do to the base product, before the LoRA product is added.

    Args:
        output: [T, O], changed in place; tokens in no such segment are left exactly as they are.
        scale, shift: [N, O] float32.
        is_used: [N] int32 on the device of `output`: what the GPU reads.
        host_is_used: the same on the host: what the CPU reads.
        metadata: the step's segments, with `num_tokens` T.
    """
    apply = _scale_shift.scale_shift_ if HAS_TRITON and metadata.has_tiles else reference.scale_shift_
    apply(output, scale, shift, is_used, host_is_used, metadata)


def lora_product(
    product: Callable[[], torch.Tensor],
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[Sequence[int]],
    slice_ends: tuple[int, ...],
    metadata: LoraMetadata,
) -> torch.Tensor:
    """`product()`, with what `lora_add_group_` adds to it.

    Where a CUDA graph is recorded (`metadata.is_recording`) the first half of the LoRA, which needs `x` alone, goes beside
    the product on a stream of its own, so that replays hide it behind the product.

    Args:
        product: computes the base layers' output, a fresh [T, O], from the same x.
        x, lora_a, lora_b, ranks, host_ranks, slice_ends, metadata: as in `lora_add_group_`.

    Returns:
        [T, O].
    """
    if HAS_TRITON and metadata.has_tiles and metadata.is_recording:
        return _lora_beside.lora_product(product, x, lora_a, lora_b, ranks, slice_ends, metadata)
    output = product()
    lora_add_group_(output, x, lora_a, lora_b, ranks, host_ranks, slice_ends, metadata)
    return output


def product_and_delta(
    product: Callable[[], torch.Tensor],
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[Sequence[int]],
    slice_ends: tuple[int, ...],
    metadata: LoraMetadata,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`product()`, and apart from it what `lora_add_group_` would add: for callers whose next kernel adds it by the way.

    All of LoRA then goes beside the product, and no launch of its own comes after it. Meant for recorded steps of few
    tokens (`metadata.is_delta_apart`): the memory for the sum is large, and it is written and read once more.

    Args:
        product: computes the base layers' output, a fresh [T, O], from the same x.
        x, lora_a, lora_b, ranks, host_ranks, slice_ends, metadata: as in `lora_add_group_`.

    Returns:
        [T, O]; and [T, O] float32, whose rows are not defined for tokens without an adapter (`metadata.is_adapted`).
    """
    if HAS_TRITON and metadata.has_tiles:
        return _lora_beside.product_and_delta(product, x, lora_a, lora_b, ranks, slice_ends, metadata)
    delta = torch.full((x.shape[0], slice_ends[-1]), torch.nan, dtype=torch.float32, device=x.device)
    for _, token_start, token_end in metadata.segments:
        delta[token_start:token_end] = 0
    floats = x.float(), lora_a.float(), lora_b.float()
    reference.lora_add_group_(delta, *floats, ranks, host_ranks, slice_ends, metadata)
    return product(), delta


def lora_shrink(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[Sequence[int]],
    metadata: LoraMetadata,
) -> torch.Tensor:
    """`h[s:e, m, :r] = x[s:e] @ lora_a[n, m, :r].T` for each segment `(n, s, e)` and slice m, `r = ranks[n, m]`, in float32.

    The first half of `lora_add_group_`, for callers that do something between the halves.

    Args:
        x, lora_a, ranks, host_ranks, metadata: as in `lora_add_group_`.

    Returns:
        [T, M, R] float32, 0 where the formula says nothing.
    """
    shrink = _lora.lora_shrink if HAS_TRITON and metadata.has_tiles else reference.lora_shrink
    return shrink(x, lora_a, ranks, host_ranks, metadata)


def lora_expand_(
    output: torch.Tensor,
    shrunk: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[Sequence[int]],
    slice_ends: tuple[int, ...],
    metadata: LoraMetadata,
) -> None:
    """`output[s:e, c] += shrunk[s:e, m, :r] @ lora_b[n, c, :r].T` for each segment `(n, s, e)` and slice m with columns c.

    The second half of `lora_add_group_`.

    Args:
        output: [T, O], accumulated in place; rows may be strided.
        shrunk: [T, M, R] float32, of `lora_shrink`.
        lora_b, ranks, host_ranks, slice_ends, metadata: as in `lora_add_group_`.
    """
    expand = _lora.lora_expand_ if HAS_TRITON and metadata.has_tiles else reference.lora_expand_
    expand(output, shrunk, lora_b, ranks, host_ranks, slice_ends, metadata)


def lora_embedding_add_(
    output: torch.Tensor,
    token_ids: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[int],
    metadata: LoraMetadata,
) -> None:
    """`output[s:e] += lora_a[n, token_ids[s:e], :r] @ lora_b[n, :, :r].T` for each segment `(n, s, e)`, `r = ranks[n]`.

    The embedding case of LoRA: `x @ A.T` with a one-hot x is a gather of A's columns, which are rows here.
    Tokens in no segment, and those of adapters of rank 0, are left exactly as they are.

    Args:
        output: [T, H], the base embeddings, accumulated in place.
        token_ids: [T] int64, below V.
        lora_a: [N, V, R], the transpose of what adapters store as [R, V], so that a token's numbers are neighbours;
            what lies above an adapter's own rank is never used.
        lora_b: [N, H, R], same dtype, with the adapter's scale (and the model's scale of embeddings) folded in.
        ranks: [N] int32 on the device of `output`: what the GPU reads.
        host_ranks: the same N numbers on the host: what the CPU reads.
        metadata: the step's segments, with `num_tokens` T.
    """
    add = _lora_embedding.lora_embedding_add_ if HAS_TRITON and metadata.has_tiles else reference.lora_embedding_add_
    add(output, token_ids, lora_a, lora_b, ranks, host_ranks, metadata)


def write_kv_(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, kv_index: torch.Tensor
) -> None:
    """`k_pool[kv_index] = k; v_pool[kv_index] = v`.

    Args:
        k, v: [T, Hkv, D].
        k_pool, v_pool: [num_blocks * P, Hkv, D], written in place.
        kv_index: [T] int64, all different; on a GPU -1 (padding) writes nothing.
    """
    write = _kv_write.write_kv_ if HAS_TRITON and k_pool.is_cuda else reference.write_kv_
    write(k, v, k_pool, v_pool, kv_index)


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
    """`out[t] = softmax(scale * q[t] . K) V` over the keys of t's own request at positions up to t's (and in the window).

    Args:
        q: [T, Hq, D], the pools' dtype; Hq is a multiple of the pools' Hkv.
        k_pool, v_pool: [num_blocks * P, Hkv, D].
        metadata: the packed batch.
        scale: factor of the logits.
        window: sliding window in keys, the query's own included; None means all.
        soft_cap: logits x become `soft_cap * tanh(x / soft_cap)`; None leaves them.
        k, v: [T, Hkv, D], this step's keys and values: on a GPU, prompts of which nothing was cached read them here, which
            is faster than through the block table. The result is the same without.
        kv_index: [T] int64, all different: k and v are written to these places of the pools first (on a GPU -1 is no
            place); None where they lie there already.

    Returns:
        [T, Hq, D], every row written.
    """
    is_known = HAS_TRITON and q.is_cuda and q.shape[-1] <= MAX_HEAD_DIM
    attend = _paged_attention.paged_attention if is_known else reference.paged_attention
    return attend(
        q, k_pool, v_pool, metadata, scale=scale, window=window, soft_cap=soft_cap, k=k, v=v, kv_index=kv_index
    )


def scatter_rows_(source: torch.Tensor, table: torch.Tensor, max_elements: int) -> None:
    """`target[r * stride + c] = source[start + r * length + c]` for r < rows, c < length, for each place of the table.

    One launch on a GPU, however many places there are.

    Args:
        source: [S], contiguous.
        table: [K, 5] int64 on the source's device: the address of `target`'s first element, `start`, `rows`, `length`
            and `stride`. Targets have the source's type and device, do not overlap, and hold less than 2^31 elements.
        max_elements: at least the largest `rows * length`.
    """
    if source.is_cuda:
        assert HAS_TRITON, "torch has no scatter into addresses; copy place by place"
        _scatter.scatter_rows_(source, table, max_elements)
    else:
        reference.scatter_rows_(source, table, max_elements)
