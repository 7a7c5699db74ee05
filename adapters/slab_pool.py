"""Memory of slabs, used again: what is lent comes back by itself when the last tensor on it dies.

The system zeroes every page of fresh memory, which takes a load about as long as hashing its numbers does, and page-locking
fresh memory takes half as long again. So buffers stay, within bounds, for the next loads, and one of the size that was last
asked for, of those within the bounds, is made ready in the background. How memory is page-locked is for the engine to say
(`PageLock`); nothing here knows of a device. Owned by `manager`, called by `slab` through `SlabPool.lend`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

log = logging.getLogger(__name__)

Memory = Callable[[int], torch.Tensor]
"""Gives [n] uint8 of any content for n bytes; raises MemoryError."""

MIN_BYTES = 1 << 20
"""Smaller slabs come from the system as ever: it hands such memory out in no time."""
MAX_IDLE = 4
MAX_IDLE_BYTES = 512 << 20
"""Bounds on what is idle, the buffer that is made ready included."""
MAX_WASTE = 1.25
"""A buffer is lent to slabs that leave at most a fifth of it unused: nobody counts what they leave."""


class PageLock(Protocol):
    """Keeps memory where it is, so that a device can read it by itself."""

    def lock(self, address: int, num_bytes: int) -> bool:
        """Lock whole pages; whether that was possible, which it was not if it raises. From any thread."""

    def unlock(self, address: int) -> None:
        """Take back a lock that was possible. From any thread, also within the garbage collector."""


@dataclass(frozen=True)
class PoolUsage:
    """Bytes that are lent, and bytes that wait for the next loads, in how many buffers."""

    lent_bytes: int
    idle_bytes: int
    num_idle: int


def fresh_memory(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8; numpy's memory, which comes in huge pages where the system has them, and raises MemoryError."""
    return torch.from_numpy(np.empty(num_bytes, np.uint8))


class SlabPool:
    """Lends memory to slabs. Thread-safe.

    Tensors may die on any thread, and within the garbage collector, whatever that thread was doing: giving back takes no lock. A
    thread of the pool's own keeps the bounds and makes buffers ready.

    Args:
        page_lock: locks every buffer that is made, as long as it can; None leaves memory as it is.
        max_bytes: most bytes that are lent and idle together, None for no such bound. What is lent is never refused for it, and
            one idle buffer of the usual size, up to MAX_IDLE_BYTES, stays in any case: a load that is under way takes as
            much beyond the bound too.
    """

    def __init__(self, page_lock: PageLock | None = None, *, max_bytes: int | None = None) -> None:
        self._page_lock = page_lock
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._idle: list[Buffer] = []  # The one that came back last is the last.
        self._returned: deque[Buffer] = deque()
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._usual_bytes = 0  # What was last asked for, of sizes that may be idle; 0 as long as nothing was.
        self._lent_bytes = 0
        self._is_closed = False

    def lend(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 of any content, for as long as it or a tensor that shares its storage lives.

        Raises MemoryError.
        """
        with self._lock:
            if num_bytes < MIN_BYTES or self._is_closed:
                return fresh_memory(num_bytes)
            self._start()
            self._collect()
            if num_bytes <= MAX_IDLE_BYTES:
                self._usual_bytes = num_bytes
            buffer = self._take(num_bytes)
        if buffer is None:
            buffer = Buffer(num_bytes, self._page_lock)
        lent = buffer.memory[:num_bytes]
        memory = torch.from_numpy(lent)  # It, and all that shares its storage, keep this very array alive.
        with self._lock:
            self._lent_bytes += buffer.num_bytes
        weakref.finalize(lent, self._give_back, buffer).atexit = False
        self._wakes.put(True)
        return memory

    def prepare(self, num_bytes: int) -> None:
        """Make a buffer of this size ready in the background, unless it is known by now what is usual; returns at once."""
        with self._lock:
            if self._usual_bytes or self._is_closed or not MIN_BYTES <= num_bytes <= MAX_IDLE_BYTES:
                return
            self._start()
            self._usual_bytes = num_bytes
        self._wakes.put(True)

    def usage(self) -> PoolUsage:
        """What is lent and idle now."""
        with self._lock:
            self._collect()
            return PoolUsage(self._lent_bytes, sum(buffer.num_bytes for buffer in self._idle), len(self._idle))

    def check_integrity(self) -> None:
        """Nothing is idle twice, and no more is back than was lent."""
        with self._lock:
            self._collect()
            addresses = [buffer.address for buffer in self._idle]
            assert len({*addresses}) == len(addresses), "a buffer is idle twice"
            assert self._lent_bytes >= 0, f"{-self._lent_bytes} bytes more came back than were lent"

    def close(self) -> None:
        """Give all idle memory back to the system. What is lent stays valid, and goes as soon as it comes back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            thread = self._thread
        self._wakes.put(False)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        idle.clear()  # Without the lock: unlocking takes a while.
        self._returned.clear()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_tidy, name="adapter-memory", daemon=True)
            self._thread.start()

    def _give_back(self, buffer: Buffer) -> None:
        """Called where the last tensor died. Takes no lock: that thread may hold any."""
        self._returned.append(buffer)
        if self._is_closed:
            self._returned.clear()  # `close` may have looked before the line above.
        else:
            self._wakes.put(True)

    def _collect(self) -> None:
        """Under the lock: what has come back is idle, or goes where the pool is closed."""
        while True:
            try:
                buffer = self._returned.popleft()
            except IndexError:
                return
            self._lent_bytes -= buffer.num_bytes
            if not self._is_closed:
                self._idle.append(buffer)

    def _take(self, num_bytes: int) -> Buffer | None:
        """Under the lock: the smallest idle buffer that fits, the one used last of several."""
        fitting = [buffer for buffer in self._idle if buffer.fits(num_bytes)]
        if not fitting:
            return None
        best = min(reversed(fitting), key=lambda buffer: buffer.num_bytes)
        self._idle.remove(best)
        return best

    def _keep_tidy(self) -> None:
        """The thread: keep the bounds and one buffer ready whenever something was lent or came back."""
        has_failed = False
        while self._wakes.get():
            try:
                self._trim()
                with contextlib.suppress(MemoryError):  # Who needs the buffer will hear of it.
                    self._make_ready()
            except Exception as error:  # Thread border: without this thread nothing would keep the bounds.
                if not has_failed:
                    log.exception("event=adapter_memory_not_kept_ready reason=%r", error)
                has_failed = True

    def _trim(self) -> None:
        """Let go of what is beyond the bounds."""
        with self._lock:
            self._collect()
            dropped = [buffer for buffer in self._idle if buffer.num_bytes > MAX_IDLE_BYTES]
            self._idle = [buffer for buffer in self._idle if buffer.num_bytes <= MAX_IDLE_BYTES]
            usual = self._take(self._usual_bytes)
            # The place of the usual one stays free for it where it is yet to be made.
            num_bytes = self._usual_bytes if usual is None else usual.num_bytes
            kept: list[Buffer] = []
            room = MAX_IDLE_BYTES
            if self._max_bytes is not None:
                room = min(room, self._max_bytes - self._lent_bytes)
            for buffer in reversed(self._idle):
                if len(kept) < MAX_IDLE - 1 and num_bytes + buffer.num_bytes <= room:
                    kept.append(buffer)
                    num_bytes += buffer.num_bytes
                else:
                    dropped.append(buffer)
            self._idle = [*kept[::-1], *([] if usual is None else [usual])]
        dropped.clear()  # Without the lock: unlocking takes a while.

    def _make_ready(self) -> None:
        """Have a buffer of the usual size at hand."""
        with self._lock:
            num_bytes = self._usual_bytes
            if not num_bytes or self._is_closed or any(buffer.fits(num_bytes) for buffer in self._idle):
                return
        buffer = Buffer(num_bytes, self._page_lock)
        buffer.touch()
        with self._lock:
            if not self._is_closed:
                self._idle.insert(0, buffer)


class Buffer:
    """Whole pages of memory, locked if that is possible, which are unlocked before they go."""

    def __init__(self, num_bytes: int, page_lock: PageLock | None) -> None:
        self.num_bytes = num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._page_lock: PageLock | None = None
        self.memory = _pages(num_bytes, is_forked=page_lock is None)
        self.address: int = self.memory.ctypes.data
        if page_lock is None or self.address % mmap.PAGESIZE:
            return
        try:
            if page_lock.lock(self.address, num_bytes):
                self._page_lock = page_lock
        except Exception as error:  # Memory that is not locked serves as well.
            log.exception("event=memory_not_page_locked reason=%r", error)

    def __del__(self) -> None:
        # Whoever lets go of it last, a device must not go on reading pages that have become somebody else's.
        if self._page_lock is not None and not sys.is_finalizing():
            self._page_lock.unlock(self.address)

    def fits(self, num_bytes: int) -> bool:
        """Whether so many bytes go in and leave little unused."""
        return num_bytes <= self.num_bytes <= max(num_bytes * MAX_WASTE, num_bytes + mmap.PAGESIZE)

    def touch(self) -> None:
        """Have the system hand out the pages now; locking has done that already."""
        if self._page_lock is None:
            self.memory[:: mmap.PAGESIZE] = 0


def _pages(num_bytes: int, *, is_forked: bool) -> np.ndarray:
    """[num_bytes] uint8, pages from the system, in huge ones where it has them. Raises MemoryError.

    Not `is_forked`, child processes do not have them. What a device reads must stay where it is: after a fork, whoever
    writes to a page first gets another one in its place.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return np.empty(num_bytes, np.uint8)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes for an adapter") from error
    for advice in ("MADV_HUGEPAGE", *(() if is_forked else ("MADV_DONTFORK",))):
        if hasattr(mmap, advice):  # Linux
            with contextlib.suppress(OSError):
                pages.madvise(getattr(mmap, advice))
    return np.frombuffer(pages, np.uint8)
