"""The CPU tier: generations by digest, counted references, the least recently used evicted first.

Never evicts what a handle refers to or what is pinned, so it can hold more than its capacity for as long as requests
need that. Knows nothing of names or files. Thread-safe. Owned by `manager`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from adapters.generation import Generation, GenerationHandle


@dataclass
class _Resident:
    generation: Generation
    num_refs: int = 0
    is_pinned: bool = False
    is_retired: bool = False


class GenerationStore:
    """At most `capacity` generations that nobody refers to or has pinned, plus those that somebody has.

    Attributes:
        evictions: how often one was put out for want of room.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1, "the CPU tier needs room for one adapter"
        self.capacity = capacity
        self.evictions = 0
        self._lock = threading.Lock()
        # digest -> generation, the least recently used first
        self._residents: OrderedDict[str, _Resident] = OrderedDict()

    def add(self, generation: Generation, name: str, *, load_ms: float = 0.0) -> GenerationHandle:
        """Keep a generation, or the one with the same digest that is already there, and borrow it for `name`."""
        with self._lock:
            resident = self._residents.setdefault(generation.digest, _Resident(generation))
            handle = self._borrow(resident, name, load_ms)
            self._shrink()
            return handle

    def borrow(self, digest: str, name: str, *, load_ms: float = 0.0) -> GenerationHandle | None:
        """A handle on a resident generation; None where it is not in memory."""
        with self._lock:
            resident = self._residents.get(digest)
            return None if resident is None else self._borrow(resident, name, load_ms)

    def retire(self, digest: str) -> None:
        """No name points here any more: forget it as soon as nobody refers to it."""
        with self._lock:
            resident = self._residents.get(digest)
            if resident is not None:
                resident.is_retired, resident.is_pinned = True, False
                self._forget_if_done(digest, resident)

    def revive(self, digest: str, *, is_pinned: bool) -> None:
        """A name points here (again); sets the pin."""
        with self._lock:
            resident = self._residents.get(digest)
            if resident is not None:
                resident.is_retired, resident.is_pinned = False, is_pinned
                self._shrink()

    def contains(self, digest: str) -> bool:
        """Whether the generation is in CPU memory."""
        with self._lock:
            return digest in self._residents

    def num_refs(self, digest: str) -> int:
        """Handles on a digest."""
        with self._lock:
            resident = self._residents.get(digest)
            return 0 if resident is None else resident.num_refs

    def usage(self) -> tuple[int, int]:
        """How many generations are resident, and their bytes."""
        with self._lock:
            return len(self._residents), sum(item.generation.num_bytes for item in self._residents.values())

    def check_integrity(self) -> None:
        """No negative references, nothing retired that nobody refers to, nothing evictable over capacity."""
        with self._lock:
            for digest, resident in self._residents.items():
                assert resident.num_refs >= 0, f"{digest} has {resident.num_refs} references"
                assert resident.num_refs > 0 or not resident.is_retired, f"{digest} is retired and unused, but kept"
                assert resident.generation.digest == digest, f"{digest} holds {resident.generation.digest}"
            num_evictable = sum(item.num_refs == 0 and not item.is_pinned for item in self._residents.values())
            assert len(self._residents) <= self.capacity or num_evictable == 0, "over capacity, yet something could go"

    def _borrow(self, resident: _Resident, name: str, load_ms: float) -> GenerationHandle:
        digest = resident.generation.digest
        resident.num_refs += 1
        self._residents.move_to_end(digest)
        return GenerationHandle(name, resident.generation, load_ms=load_ms, retain=self._retain, release=self._release)

    def _retain(self, digest: str) -> None:
        with self._lock:
            self._residents[digest].num_refs += 1

    def _release(self, digest: str) -> None:
        with self._lock:
            resident = self._residents[digest]
            assert resident.num_refs > 0, f"{digest} released more often than borrowed"
            resident.num_refs -= 1
            self._forget_if_done(digest, resident)
            self._shrink()

    def _forget_if_done(self, digest: str, resident: _Resident) -> None:
        if resident.is_retired and resident.num_refs == 0:
            del self._residents[digest]

    def _shrink(self) -> None:
        num_over = len(self._residents) - self.capacity
        if num_over <= 0:
            return
        evictable = [d for d, item in self._residents.items() if item.num_refs == 0 and not item.is_pinned]
        for digest in evictable[:num_over]:
            del self._residents[digest]
            self.evictions += 1
