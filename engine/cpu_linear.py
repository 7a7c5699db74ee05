"""Linear layers on a CPU with their weights packed once: oneDNN's products for batches of a few rows.

For the few rows of a decode step the product that torch picks on a CPU reorders the weight's tiles again at each call. A
copy in oneDNN's own layout saves that; `benchmarks/cpu_linear` measures what it gains, and the rules below follow from it.
The weight itself stays: one row, whole prompts, tied embeddings and saving need it. The copy is an attribute of the weight,
so names and the state dict do not know of it, and a weight that is moved or replaced leaves it behind. Knows nothing of
adapters. Used by `engine/lora_layers` and set up by `engine/engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from engine.host_memory import free_bytes

logger = logging.getLogger(__name__)

MIN_ROWS, MAX_ROWS = 2, 64
"""Rows of an input for which the packed weight is used; outside, torch's product is as fast or faster."""
MIN_OUT_FEATURES = 2048
MIN_ELEMENTS = 2**21
"""Only weights of at least this size and this many outputs are packed: narrower ones gain nothing."""

_PACKED = "switchboard_packed"
_NO_FIGURE_BYTES = 2**30


class PackedLinear(nn.Linear):
    """An `nn.Linear` whose weight may be packed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return linear(input, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` of x [..., in] and weight [out, in]; through the packed copy where there is one and it is faster."""
    packed: torch.Tensor | None = getattr(weight, _PACKED, None)
    if packed is None or not MIN_ROWS <= x.numel() // x.shape[-1] <= MAX_ROWS:
        return F.linear(x, weight, bias)
    return packed_product(x, packed, bias)


def is_packed(weight: torch.Tensor) -> bool:
    """Whether `linear` has a packed copy of this very tensor."""
    return hasattr(weight, _PACKED)


def pack_linears(weights: Iterable[tuple[nn.Linear, torch.Tensor]], max_bytes: int) -> int:
    """Pack the weights that gain, those with the most outputs first, as far as `max_bytes` reach.

    Args:
        weights: linear layers, each with the float32 or other weight that its product reads: its own, or one that it
            shares with others.
        max_bytes: of all copies together; a copy is as large as its weight.

    Returns:
        Bytes of the copies.
    """
    users: dict[int, tuple[torch.Tensor, list[nn.Linear]]] = {}
    for module, weight in weights:
        if _gains(weight):
            users.setdefault(id(weight), (weight, []))[1].append(module)
    if not users or max_bytes <= 0 or not has_packing():
        return 0
    num_bytes = num_packed = 0
    for weight, modules in sorted(users.values(), key=lambda user: user[0].shape[0], reverse=True):
        if num_bytes + weight.nbytes > max_bytes:
            continue
        setattr(weight, _PACKED, pack(weight))
        for module in modules:
            if type(module) is nn.Linear:
                module.__class__ = PackedLinear
        num_bytes += weight.nbytes
        num_packed += 1
    logger.info("event=weights_packed packed=%d of=%d mb=%d", num_packed, len(users), num_bytes // 2**20)
    return num_bytes


def default_budget(reserved_bytes: int) -> int:
    """Bytes for packed copies where nothing was asked for: half of the memory that is free.

    Args:
        reserved_bytes: promised to others but not touched yet, such as a KV cache full of zeros.
    """
    free = free_bytes()
    return _NO_FIGURE_BYTES if free is None else max(0, free - reserved_bytes) // 2


def _gains(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.shape[0] >= MIN_OUT_FEATURES
        and weight.numel() >= MIN_ELEMENTS
    )


def has_packing() -> bool:
    """Whether this torch has the operators, and they compute what they should."""
    try:
        weight = torch.arange(64 * 32, dtype=torch.float32).view(64, 32) / 1000
        x, bias = weight[:3] - 0.5, weight[:, 0].contiguous()
        is_right = torch.allclose(packed_product(x, pack(weight), bias), F.linear(x, weight, bias), atol=1e-4)
    except (AttributeError, RuntimeError) as error:
        logger.info("event=weights_not_packed reason=%r", str(error).partition("\n")[0])
        return False
    if not is_right:
        logger.warning("event=weights_not_packed reason='wrong products'")
    return is_right


@torch.inference_mode()
def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's layout for some 16 rows; an opaque tensor."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)
    return packed


def packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
