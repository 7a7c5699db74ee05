"""Connects the model classes' attention to the paged KV cache, through transformers' `AttentionInterface`.

Each decoder attention module is bound to its layer's pools and to the step's shared context at construction; the
function below is what the model class calls. It raises on any argument that it does not implement rather than ignore it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from engine import ops
from engine.kv_cache import KVCache
from kernels import AttentionMetadata

PAGED_ATTENTION = "switchboard_paged"
"""Name of the attention implementation, as set in a model's config."""

_HARMLESS_ARGUMENTS = frozenset({"output_router_logits", "dropout", "position_ids", "use_cache", "is_causal"})
_BINDING = "switchboard_binding"


@dataclass(eq=False)
class AttentionStep:
    """What changes from step to step, shared by all layers; operators find it by `number`."""

    metadata: AttentionMetadata | None = None
    kv_index: torch.Tensor | None = None
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = ops.register_step(self)


@dataclass(frozen=True)
class AttentionBinding:
    """One layer's pools and the shared step."""

    keys: torch.Tensor
    values: torch.Tensor
    step: AttentionStep


def bind_attention(decoder: nn.Module, cache: KVCache) -> AttentionStep:
    """Bind every attention module of `decoder` to its layer's pools; returns the step that the runner fills."""
    step = AttentionStep()
    layers: dict[int, nn.Module] = {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in decoder.modules()
        if hasattr(module, "layer_idx") and (hasattr(module, "q_proj") or hasattr(module, "qkv_proj"))
    }
    assert sorted(layers) == list(range(cache.shape.num_layers)), f"layers {sorted(layers)} do not match the cache"
    for index, module in layers.items():
        # The binding is no tensor, so nn.Module keeps it as a plain attribute, out of the state dict.
        setattr(module, _BINDING, AttentionBinding(cache.keys[index], cache.values[index], step))
    return step


def attention_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """The pools that a module is bound to, if it is an attention module."""
    binding: AttentionBinding | None = getattr(module, _BINDING, None)
    if binding is not None:
        yield from (binding.keys, binding.values)


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values, then attend through the block table.

    Args:
        module: a bound attention module.
        query: [1, Hq, T, D]; key, value: [1, Hkv, T, D].
        attention_mask: must be None: which keys a token sees follows from the step.
        scaling: factor of the logits; None means D ** -0.5.
        sliding_window: window of this layer in keys, None for all.

    Returns:
        ([1, T, Hq, D], None).
    """
    unknown = [name for name in kwargs if kwargs[name] is not None and name not in _HARMLESS_ARGUMENTS]
    if unknown or attention_mask is not None:
        raise NotImplementedError(f"paged attention does not implement {unknown or 'attention masks'}")
    binding: AttentionBinding = getattr(module, _BINDING)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if torch.compiler.is_compiling():
        output = ops.attend_op(
            query, key, value, binding.keys, binding.values, binding.step.number, scale, sliding_window, None
        )
    else:
        output = ops.attend(
            query, key, value, binding.keys, binding.values, binding.step,
            scale=scale, window=sliding_window, soft_cap=None,
        )  # fmt: skip
    return output[None], None


AttentionInterface.register(PAGED_ATTENTION, paged_attention_forward)
