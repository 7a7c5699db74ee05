"""Copies between host and device that never make the host wait: pinned memory, and an event where a result is read.

Knows nothing of what is copied. Used by the parts of a step that run on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: Sequence[float] | Sequence[Sequence[float]] | torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`values`, a tensor on the host or what makes one, on `device` as `dtype`; ordered on the current stream."""
    return pinned(torch.as_tensor(values, dtype=dtype), device).to(device, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the host as a copy to `device` wants it: page-locked for a GPU.

    The allocator of pinned memory keeps the block until the copy has run, whatever happens to the tensor.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


class HostCopy:
    """A tensor on its way to the host.

    Args:
        tensor: any; may be overwritten on the current stream after this call.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor

    def read(self) -> torch.Tensor:
        """The tensor on the host; waits until it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
