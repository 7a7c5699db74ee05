"""Plain PyTorch twins of the kernels: the CPU path, and the oracle that faster ones are tested against.

Each function's first line is its meaning in slicing notation. No state, no allocation that outlives a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from kernels.metadata import AttentionMetadata, LoraMetadata, LoraSegment


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
        lora_a: [N, M, R, in]; rows above a slice's own rank are never read.
        lora_b: [N, O, R], with the adapter's scale folded in.
        ranks: [N, M] int32 on the device of `x`, 0 where an adapter does not touch a slice.
        host_ranks: the same numbers on the host: this function reads these, the GPU kernels the others.
        slice_ends: M ends of the slices in the output's columns; the last is O.
        metadata: the step's segments, with `num_tokens` T.
    """
    _check_step(metadata, len(output), len(x))
    for lora_slot, count, token_start, token_end in _runs(metadata.segments, host_ranks):
        slots = slice(lora_slot, lora_slot + count)
        rows = x[token_start:token_end]
        slice_start = 0
        for index, slice_end in enumerate(slice_ends):
            rank = host_ranks[lora_slot][index]
            if rank:
                a, b = lora_a[slots, index, :rank], lora_b[slots, slice_start:slice_end, :rank]
                columns = output[token_start:token_end, slice_start:slice_end]
                if count == 1:
                    columns.addmm_(F.linear(rows, a[0]), b[0].T)
                else:
                    shrunk = torch.bmm(rows.unflatten(0, (count, -1)), a.transpose(1, 2))
                    columns.unflatten(0, (count, -1)).baddbmm_(shrunk, b.transpose(1, 2))
            slice_start = slice_end


def lora_shrink(
    x: torch.Tensor,
    lora_a: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[Sequence[int]],
    metadata: LoraMetadata,
) -> torch.Tensor:
    """`h[s:e, m, :r] = x[s:e] @ lora_a[n, m, :r].T` for each segment `(n, s, e)` and slice m, `r = ranks[n, m]`.

    The arguments are those of `lora_add_group_`; returns [T, M, R] float32, 0 elsewhere.
    """
    _check_step(metadata, len(x))
    shrunk = torch.zeros(x.shape[0], *lora_a.shape[1:3], dtype=torch.float32, device=x.device)
    for lora_slot, token_start, token_end in metadata.segments:
        for index, rank in enumerate(host_ranks[lora_slot]):
            if rank:
                product = F.linear(x[token_start:token_end], lora_a[lora_slot, index, :rank])
                shrunk[token_start:token_end, index, :rank] = product
    return shrunk


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

    `shrunk` [T, M, R] float32; the other arguments are those of `lora_add_group_`.
    """
    _check_step(metadata, len(output), len(shrunk))
    for lora_slot, token_start, token_end in metadata.segments:
        slice_start = 0
        for index, slice_end in enumerate(slice_ends):
            rank = host_ranks[lora_slot][index]
            if rank:
                b = lora_b[lora_slot, slice_start:slice_end, :rank]
                rows = shrunk[token_start:token_end, index, :rank].to(b.dtype)
                output[token_start:token_end, slice_start:slice_end].addmm_(rows, b.T)
            slice_start = slice_end


def _check_step(metadata: LoraMetadata, *lengths: int) -> None:
    """A step's metadata knows its tokens; a segment without an end is of all tokens there are, however many."""
    is_open = any(token_end is None for _, _, token_end in metadata.segments)
    assert is_open or all(length == metadata.num_tokens for length in lengths), "the metadata describes another step"


def _runs(
    segments: Sequence[LoraSegment], host_ranks: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, int, int | None]]:
    """Neighbouring segments that one batched product serves, as `first lora_slot, count, token_start, token_end`.

    They follow each other in tokens and in rows of the buffers, and are equal in length and ranks.
    """
    first = 0
    while first < len(segments):
        lora_slot, token_start, token_end = segments[first]
        count = 1
        if token_end is not None:
            length = token_end - token_start
            while first + count < len(segments) and (
                segments[first + count] == (lora_slot + count, token_end, token_end + length)
                and host_ranks[lora_slot + count] == host_ranks[lora_slot]
            ):
                count += 1
                token_end += length
        yield lora_slot, count, token_start, token_end
        first += count


def scale_shift_(
    output: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    is_used: torch.Tensor,
    host_is_used: Sequence[bool],
    metadata: LoraMetadata,
) -> None:
    """`output[s:e] = output[s:e] * scale[n] + shift[n]` for each segment `(n, s, e)` with `is_used[n]`, in float32.

    Args:
        output: [T, O], changed in place; tokens in no such segment are left exactly as they are.
        scale, shift: [N, O] float32.
        is_used: [N] int32 on the device of `output`: what the GPU reads.
        host_is_used: the same on the host: what this function reads.
        metadata: the step's segments, with `num_tokens` T.
    """
    _check_step(metadata, len(output))
    for lora_slot, token_start, token_end in metadata.segments:
        if host_is_used[lora_slot]:
            rows = output[token_start:token_end]
            rows.copy_(rows.float() * scale[lora_slot] + shift[lora_slot])


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

    The arguments are those of `kernels.lora_embedding_add_`; this function reads `host_ranks`, the GPU kernel `ranks`.
    """
    _check_step(metadata, len(output), len(token_ids))
    for lora_slot, token_start, token_end in metadata.segments:
        rank = host_ranks[lora_slot]
        if rank:
            gathered = lora_a[lora_slot, token_ids[token_start:token_end], :rank]
            output[token_start:token_end].addmm_(gathered, lora_b[lora_slot, :, :rank].T)


def write_kv_(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, kv_index: torch.Tensor
) -> None:
    """`k_pool[kv_index] = k; v_pool[kv_index] = v`.

    Args:
        k, v: [T, Hkv, D].
        k_pool, v_pool: [num_blocks * P, Hkv, D], written in place.
        kv_index: [T] int64, all different.
    """
    k_pool[kv_index] = k
    v_pool[kv_index] = v


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

    `cap(x) = soft_cap * tanh(x / soft_cap)`, or x where there is none.

    Args:
        q: [T, Hq, D]; Hq is a multiple of the pools' Hkv.
        k_pool, v_pool: [num_blocks * P, Hkv, D].
        metadata: the packed batch.
        scale: factor of the logits.
        window: sliding window in keys, the query's own included; None means all.
        soft_cap: bound of the logits; None means none.
        k, v, kv_index: [T, Hkv, D] and [T] int64: what is written to the pools first, where `kv_index` is given.

    Returns:
        [T, Hq, D], every row written.
    """
    assert len(q) == metadata.num_tokens, "the metadata is of another batch"
    if kv_index is not None:
        assert k is not None and v is not None, "nothing to write"
        write_kv_(k, v, k_pool, v_pool, kv_index)
    metadata = metadata.on(q.device)
    if metadata.num_decodes == metadata.num_tokens:
        return _attend_decodes(q, k_pool, v_pool, metadata, scale, window, soft_cap)
    output = torch.zeros_like(q) if 0 in metadata.kv_lens else torch.empty_like(q)
    if metadata.num_decodes:
        decode_q = q[metadata.decode_tokens]
        output[metadata.decode_tokens] = _attend_decodes(decode_q, k_pool, v_pool, metadata, scale, window, soft_cap)
    for row, prefill in enumerate(metadata.prefills):
        attended = _attend(
            q[prefill.token_start : prefill.token_end].transpose(0, 1)[None],
            _gather(k_pool, prefill.kv_index).transpose(0, 1)[None],
            _gather(v_pool, prefill.kv_index).transpose(0, 1)[None],
            metadata.prefill_mask(row, window),
            scale,
            soft_cap,
        )
        output[prefill.token_start : prefill.token_end] = attended[0].transpose(0, 1)
    return output


def _attend_decodes(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """[Bd, Hq, D] of one query token a request, over a padded gather of keys and values."""
    index, mask = metadata.decode_keys(window)
    attended = _attend(
        q[:, :, None],
        _gather(k_pool, index).transpose(1, 2),
        _gather(v_pool, index).transpose(1, 2),
        mask,
        scale,
        soft_cap,
    )
    return attended[:, :, 0]


def _gather(pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`pool[index]` for any shape of index, copied by whole rows: faster on a CPU than torch's general indexing."""
    return pool.index_select(0, index.flatten()).view(*index.shape, *pool.shape[1:])


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """[B, Hq, Q, D] of queries over keys and values [B, Hkv, L, D]; no mask means causal, with as many keys as queries."""
    if soft_cap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1).float() for tensor in (k, v))
    logits = soft_cap * torch.tanh(q.float() @ k.transpose(-1, -2) * (scale / soft_cap))
    if mask is None:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v).to(q.dtype)


def scatter_rows_(source: torch.Tensor, table: torch.Tensor, max_elements: int) -> None:
    """`target[r * stride + c] = source[start + r * length + c]` for r < rows, c < length, for each place of the table.

    Args:
        source: [S], contiguous.
        table: [K, 5] int64 on the source's device: the address of `target`'s first element, `start`, `rows`, `length`
            and `stride`. Targets have the source's type and device, do not overlap, and hold less than 2^31 elements.
        max_elements: at least the largest `rows * length`.
    """
    for address, start, num_rows, row_len, stride in table.tolist():
        num_elements = num_rows * row_len
        assert num_elements <= max_elements, "max_elements is too low"
        if num_elements:
            num_bytes = ((num_rows - 1) * stride + row_len) * source.element_size()
            memory = (ctypes.c_char * num_bytes).from_address(address)
            target = torch.frombuffer(memory, dtype=source.dtype).as_strided((num_rows, row_len), (stride, 1))
            target.copy_(source[start : start + num_elements].view(num_rows, row_len))
