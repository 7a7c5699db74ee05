"""Page-locks memory that is there already, for CUDA devices: what is locked is copied to a device by one transfer.

Implements `adapters.slab_pool.PageLock`. Bounded, since locked memory can be neither moved nor swapped out. Made by
`engine/lora_side` where adapters' slabs are copied to a device as they are.
"""

from __future__ import annotations

import contextlib
import logging
import threading

import torch

from engine.host_memory import total_bytes

logger = logging.getLogger(__name__)

_SHARE = 0.25


class CudaPageLock:
    """Locks up to `max_bytes`, by default a quarter of the memory that this process may use, for a device.

    The first time that it cannot is logged; memory that is not locked serves as well and is copied in pieces.
    """

    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        self._device = device
        self._max_bytes = int(total_bytes() * _SHARE) if max_bytes is None else max_bytes
        self._cudart = torch.cuda.cudart()
        self._locked: dict[int, int] = {}  # address -> bytes; single operations, since `unlock` must take no lock
        self._reserving = threading.Lock()
        self._reserved_bytes = 0  # Of calls of `lock` that are under way; under `_reserving`.
        self._has_failed = False

    @property
    def num_bytes(self) -> int:
        """What is locked now."""
        return sum(list(self._locked.values()))

    def lock(self, address: int, num_bytes: int) -> bool:
        """Lock `num_bytes` at `address`; whether that was possible."""
        with self._reserving:
            has_room = self.num_bytes + self._reserved_bytes + num_bytes <= self._max_bytes
            if has_room:
                self._reserved_bytes += num_bytes
        if not has_room:
            self._note_failure(f"{self._max_bytes} bytes are locked at most")
            return False
        try:
            self._register(address, num_bytes)
        except RuntimeError as error:
            self._note_failure(str(error).partition("\n")[0])
            return False
        finally:
            with self._reserving:
                self._reserved_bytes -= num_bytes
        return True

    def _register(self, address: int, num_bytes: int) -> None:
        """Raises RuntimeError, also where an earlier fault of the device is reported here."""
        with torch.cuda.device(self._device):
            status = int(self._cudart.cudaHostRegister(address, num_bytes, 0))
            if status != 0:
                # CUDA keeps the error for whoever asks next on this thread, and would blame a kernel for it.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self._device)
                raise RuntimeError(f"cudaHostRegister gave {status}")
        self._locked[address] = num_bytes

    def unlock(self, address: int) -> None:
        """Take a lock back. May run within a finalizer, whatever its thread holds: takes no lock."""
        with torch.cuda.device(self._device):
            status = int(self._cudart.cudaHostUnregister(address))
        del self._locked[address]
        if status != 0:  # The device has gone: nothing else fails here.
            logger.warning("event=memory_not_unlocked bytes_locked=%d status=%d", self.num_bytes, status)

    def _note_failure(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("event=memory_not_page_locked bytes_locked=%d reason=%r", self.num_bytes, reason)
