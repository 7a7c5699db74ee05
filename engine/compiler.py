"""Compiles the decoder's layers with torch.compile: one graph a layer, shared by all layers of a kind.

What stays between matrix products (norms, rotary embedding, activation, residuals) becomes a few fused kernels; LoRA and
attention are operators (`engine/ops`) that the compiler takes as they are. Two versions are made, for one token and for
any number, and two more where recorded steps leave LoRA's sum to the compiled code, so nothing is compiled while serving.
Called once at start by `engine/warmup`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from engine.attention import attention_tensors
from engine.lora_layers import lora_tensors

logger = logging.getLogger(__name__)

_MAX_VERSIONS = 256
"""Of one piece of code: engines of the process, times kinds of layers (windows, shapes), times four versions."""

_TYPICAL_TOKENS = 256
"""The compiler sizes its blocks by the first step that it sees: with few tokens, long prompts would be slow."""


class StepKind(NamedTuple):
    """Steps for which versions of the layers are made, one for a single token and one for any number.

    Attributes:
        run: computes a step of that many tokens of padding.
        max_tokens: of any such step.
    """

    run: Callable[[int], None]
    max_tokens: int


def compile_decoder(decoder: nn.Module, kinds: Sequence[StepKind], *, backend: str = "inductor") -> None:
    """Compile every layer and the final norm, and run each kind's two versions once.

    Args:
        decoder: with `layers` and `norm`, its linears LoRA-aware and its attention bound.
        kinds: steps between which the layers' code differs.
        backend: of torch.compile.

    Raises:
        torch._dynamo.exc.Unsupported: a layer is not one graph.
    """
    from torch import _dynamo  # Slow to import, and not needed where nothing is compiled.

    started = time.perf_counter()
    for tensor in _fixed_tensors(decoder):
        _dynamo.mark_static(tensor)
    modules = [*_layers(decoder), decoder.get_submodule("norm")]
    for module in modules:
        module.compile(fullgraph=True, dynamic=True, backend=backend)
    # For the process, not for the call: each further engine in it adds versions of the same code.
    _dynamo.config.recompile_limit = max(_MAX_VERSIONS, _dynamo.config.recompile_limit)
    with _dynamo.config.patch(specialize_float=True):
        for kind in kinds:
            for num_tokens in sorted({min(_TYPICAL_TOKENS, kind.max_tokens), 1}, reverse=True):
                kind.run(num_tokens)
    logger.info("event=layers_compiled layers=%d seconds=%.1f", len(modules) - 1, time.perf_counter() - started)


def _layers(decoder: nn.Module) -> Iterable[nn.Module]:
    layers = decoder.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList), "a decoder keeps its layers in a list"
    return layers


def _fixed_tensors(decoder: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that are no parameters but never change their shape: fused weights, LoRA buffers, KV pools."""
    for module in decoder.modules():
        yield from lora_tensors(module)
        yield from attention_tensors(module)
