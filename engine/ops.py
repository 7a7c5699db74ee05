"""The operators that compiled decoder layers call: what adapters do to a linear, and attention on the paged KV cache.

torch.compile takes an operator as a whole and does not look inside, so a layer is one graph although the kernels read
what changes from step to step. Operators take tensors and numbers alone; the step's description is therefore registered
here once and named by a number. Outside compiled code the same functions are called directly.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kernels import LoraMetadata, lora_add_group_, lora_product, paged_attention, product_and_delta, scale_shift_

if TYPE_CHECKING:
    from engine.attention import AttentionStep

_steps: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_step_numbers = itertools.count()


def register_step(step: object) -> int:
    """The number by which operators find `step`, for as long as it lives: metadata of a step, or who computes one."""
    number = next(_step_numbers)
    _steps[number] = step
    return number


def find(number: int) -> Any:
    """What was registered under a number."""
    return _steps[number]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Write the step's keys and values, then attend through the block table.

    Args:
        query: [T, Hq, D]; key, value: [T, Hkv, D].
        k_pool, v_pool: [num_blocks * P, Hkv, D], written in place.
        step: the running step.
        scale, window, soft_cap: as in `kernels.paged_attention`.

    Returns:
        [T, Hq, D].
    """
    assert step.metadata is not None and step.kv_index is not None, "attention ran outside a step"
    return paged_attention(
        query, k_pool, v_pool, step.metadata,
        scale=scale, window=window, soft_cap=soft_cap, k=key, v=value, kv_index=step.kv_index,
    )  # fmt: skip


@torch.library.custom_op(
    "switchboard::attend",
    mutates_args=("k_pool", "v_pool"),
    schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) k_pool, Tensor(b!) v_pool, int step, float scale, "
    "int? window, float? soft_cap) -> Tensor",
)
def attend_op(query, key, value, k_pool, v_pool, step, scale, window, soft_cap):  # type: ignore[no-untyped-def]
    """`attend` as an operator; `step` is the number that `register_step` gave."""
    return attend(query, key, value, k_pool, v_pool, _steps[step], scale=scale, window=window, soft_cap=soft_cap)


@attend_op.register_fake
def _(query, key, value, k_pool, v_pool, step, scale, window, soft_cap):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape)


@torch.library.custom_op(
    "switchboard::lora_add",
    mutates_args=("output",),
    schema="(Tensor(a!) output, Tensor x, Tensor lora_a, Tensor lora_b, Tensor ranks, int[] slice_ends, int step) -> ()",
)
def lora_add_op(output, x, lora_a, lora_b, ranks, slice_ends, step):  # type: ignore[no-untyped-def]
    """`kernels.lora_add_group_` on [..., O] and [..., in], as an operator; nothing where the step has no adapters."""
    metadata: LoraMetadata = _steps[step]
    if metadata.segments:
        lora_add_group_(
            output.view(-1, output.shape[-1]),
            x.reshape(-1, x.shape[-1]),
            lora_a,
            lora_b,
            ranks,
            () if ranks.is_cuda else ranks.tolist(),
            tuple(slice_ends),
            metadata,
        )


@torch.library.custom_op(
    "switchboard::scale_shift",
    mutates_args=("output",),
    schema="(Tensor(a!) output, Tensor scale, Tensor shift, Tensor is_used, int step) -> ()",
)
def scale_shift_op(output, scale, shift, is_used, step):  # type: ignore[no-untyped-def]
    """`kernels.scale_shift_` on [..., O], as an operator; nothing where the step has no adapters."""
    metadata: LoraMetadata = _steps[step]
    if metadata.segments:
        host_is_used = () if is_used.is_cuda else is_used.bool().tolist()
        scale_shift_(output.view(-1, output.shape[-1]), scale, shift, is_used, host_is_used, metadata)


@scale_shift_op.register_fake
def _(output, scale, shift, is_used, step):  # type: ignore[no-untyped-def]
    return None


@lora_add_op.register_fake
def _(output, x, lora_a, lora_b, ranks, slice_ends, step):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op(
    "switchboard::lora_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor lora_a, Tensor lora_b, Tensor ranks, int[] slice_ends, int step)"
    " -> Tensor",
)
def lora_linear_op(x, weight, bias, lora_a, lora_b, ranks, slice_ends, step):  # type: ignore[no-untyped-def]
    """[..., in] -> [..., O]: linear layers on the same input with LoRA added (`kernels.lora_product`), as an operator."""
    metadata: LoraMetadata = _steps[step]
    if not metadata.segments:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    host_ranks = () if ranks.is_cuda else ranks.tolist()
    output = lora_product(
        lambda: F.linear(rows, weight, bias), rows, lora_a, lora_b, ranks, host_ranks, tuple(slice_ends), metadata
    )
    return output.view(*x.shape[:-1], output.shape[-1])


@lora_linear_op.register_fake
def _(x, weight, bias, lora_a, lora_b, ranks, slice_ends, step):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], slice_ends[-1]))


@torch.library.custom_op(
    "switchboard::lora_linear_and_delta",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor lora_a, Tensor lora_b, Tensor ranks, int[] slice_ends, int step)"
    " -> (Tensor, Tensor)",
)
def lora_linear_and_delta_op(x, weight, bias, lora_a, lora_b, ranks, slice_ends, step):  # type: ignore[no-untyped-def]
    """[..., in] -> two of [..., O]: as `lora_linear_op`, with LoRA apart (`kernels.product_and_delta`)."""
    rows = x.reshape(-1, x.shape[-1])
    host_ranks = () if ranks.is_cuda else ranks.tolist()
    output, delta = product_and_delta(
        lambda: F.linear(rows, weight, bias), rows, lora_a, lora_b, ranks, host_ranks, tuple(slice_ends), _steps[step]
    )
    shape = (*x.shape[:-1], output.shape[-1])
    return output.view(shape), delta.view(shape)


@lora_linear_and_delta_op.register_fake
def _(x, weight, bias, lora_a, lora_b, ranks, slice_ends, step):  # type: ignore[no-untyped-def]
    shape = (*x.shape[:-1], slice_ends[-1])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.float32)
