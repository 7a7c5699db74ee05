"""Page-locks memory that is there already, for CUDA devices: what is locked is copied to a device by one transfer.

Implements `adapters.slab_pool.PageLock`. Bounded, since locked memory can be neither moved nor swapped out. Made by
`engine/lora_side` where adapters' slabs are copied to a device as they are.
"""

from __future__ import annotations

import contextlib
import logging
import os

import torch

logger = logging.getLogger(__name__)

_SHARE_OF_HOST = 0.25


class CudaPageLock:
    """Locks up to `max_bytes`, by default a quarter of the host's memory, for a device.

    The first time that it cannot is logged; memory that is not locked serves as well and is copied in pieces.
    """

    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        self._device = device
        self._max_bytes = int(_host_bytes() * _SHARE_OF_HOST) if max_bytes is None else max_bytes
        self._cudart = torch.cuda.cudart()
        self._locked: dict[int, int] = {}  # address -> bytes; single operations, so without a lock of its own
        self._has_failed = False

    @property
    def num_bytes(self) -> int:
        """What is locked now."""
        return sum(list(self._locked.values()))

    def lock(self, address: int, num_bytes: int) -> bool:
        """Lock `num_bytes` at `address`; whether that was possible."""
        if self.num_bytes + num_bytes > self._max_bytes:
            self._note_failure(f"{self._max_bytes} bytes are locked at most")
            return False
        with torch.cuda.device(self._device):
            status = int(self._cudart.cudaHostRegister(address, num_bytes, 0))
            if status != 0:
                # CUDA keeps the error for whoever asks next on this thread, and would blame a kernel for it.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self._device)
                self._note_failure(f"cudaHostRegister gave {status}")
                return False
        self._locked[address] = num_bytes
        return True

    def unlock(self, address: int) -> None:
        """Take a lock back."""
        with torch.cuda.device(self._device):
            status = int(self._cudart.cudaHostUnregister(address))
        del self._locked[address]
        if status != 0:  # The device has gone: nothing else fails here.
            logger.warning("event=memory_not_unlocked bytes_locked=%d status=%d", self.num_bytes, status)

    def _note_failure(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("event=memory_not_page_locked bytes_locked=%d reason=%r", self.num_bytes, reason)


def _host_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
