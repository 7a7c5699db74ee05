"""Connects the model classes' attention to the paged KV cache, through transformers' `AttentionInterface`.

Each decoder attention module is bound to its layer's pools and to the step's shared context at construction; the
function below is what the model class calls. It raises on any argument that it does not implement rather than ignore it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from engine.kv_cache import KVCache
from kernels import AttentionMetadata, paged_attention, write_kv_

PAGED_ATTENTION = "switchboard_paged"
"""Name of the attention implementation, as set in a model's config."""

_HARMLESS_ARGUMENTS = frozenset({"output_router_logits", "dropout", "position_ids", "use_cache", "is_causal"})
_BINDING = "_switchboard_binding"


@dataclass
class AttentionStep:
    """What changes from step to step, shared by all layers."""

    metadata: AttentionMetadata | None = None
    kv_index: torch.Tensor | None = None


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
        if hasattr(module, "layer_idx") and hasattr(module, "q_proj")
    }
    assert sorted(layers) == list(range(cache.shape.num_layers)), f"layers {sorted(layers)} do not match the cache"
    for index, module in layers.items():
        # Not through nn.Module.__setattr__: pools are no parameters, and every layer shares the step.
        module.__dict__[_BINDING] = AttentionBinding(cache.keys[index], cache.values[index], step)
    return step


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
    unknown = {name for name, value_ in kwargs.items() if value_ is not None and name not in _HARMLESS_ARGUMENTS}
    if unknown or attention_mask is not None:
        raise NotImplementedError(f"paged attention does not implement {sorted(unknown) or 'attention masks'}")
    binding: AttentionBinding = module.__dict__[_BINDING]
    metadata, kv_index = binding.step.metadata, binding.step.kv_index
    assert metadata is not None and kv_index is not None, "attention ran outside a step"
    write_kv_(key[0].transpose(0, 1), value[0].transpose(0, 1), binding.keys, binding.values, kv_index)
    output = paged_attention(
        query[0].transpose(0, 1),
        binding.keys,
        binding.values,
        metadata,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
    )
    return output[None], None


AttentionInterface.register(PAGED_ATTENTION, paged_attention_forward)
