"""Linear layers as transformers loads them, plain or quantised: what counts as one, and what may be read of it.

One rule holds for `nn.Linear` and every quantised class: a linear has `in_features` and `out_features` and can be called.
Its `weight`, where it has one at all, may be packed, of another shape, or a tensor subclass that computes in its own way; only
a plain one may be read, joined with others or packed. Functions without state. Used by `engine/model` and
`engine/lora_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

PLAIN_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Types in which a number stands for itself; others (int8, float8) need a scale that lies elsewhere."""


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def is_plain(module: nn.Module) -> bool:
    """Whether a module is an `nn.Linear` and nothing else, which computes with its own weight as it is."""
    return type(module) is nn.Linear and "forward" not in vars(module) and has_plain_weight(module)


def has_plain_weight(module: nn.Module) -> bool:
    """Whether a module's weight is an ordinary tensor whose numbers stand for themselves."""
    return is_plain_tensor(getattr(module, "weight", None))


def is_plain_tensor(tensor: object) -> bool:
    """Whether it is an ordinary tensor or parameter of a plain type."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dtype in PLAIN_DTYPES  # type: ignore[attr-defined]


def float_dtype(model: nn.Module) -> torch.dtype:
    """The type that a model computes in: that of its first plain parameter, since quantised ones have types of their own."""
    return next(parameter.dtype for parameter in model.parameters() if is_plain_tensor(parameter))


def device_of(module: nn.Module) -> torch.device:
    """Where a module lies; quantised classes may hold buffers alone."""
    return next(iter([*module.parameters(), *module.buffers()])).device


def stored_bytes(model: nn.Module) -> int:
    """Bytes that a model's weights take: of what tensor subclasses hold, not of the type that they show, scales included."""
    storages: dict[int, int] = {}
    meta = 0
    tensors: list[torch.Tensor] = list(model.parameters())
    for module in model.modules():
        if is_linear(module):  # Some quantised classes keep their weights in buffers.
            tensors += module.buffers(recurse=False)
    for tensor in tensors:
        for part in _parts(tensor):
            if part.is_meta:
                meta += part.nbytes
            else:
                storages.setdefault(part.data_ptr(), part.nbytes)
    return meta + sum(storages.values())


def _parts(holder: Any) -> Iterator[torch.Tensor]:
    """The ordinary tensors that a tensor consists of, or that lie beside it on the same object."""
    if type(holder) in (torch.Tensor, nn.Parameter):
        yield holder
    elif hasattr(holder, "__tensor_flatten__"):
        for name in holder.__tensor_flatten__()[0]:
            yield from _parts(getattr(holder, name))
    else:
        if isinstance(holder, torch.Tensor):
            yield holder.data
        # bitsandbytes keeps scales as attributes of the parameter, in 4 bits inside a state object, which may hold another.
        for value in vars(holder).values():
            if isinstance(value, torch.Tensor) or type(value).__name__ == "QuantState":
                yield from _parts(value)
