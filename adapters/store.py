"""The CPU tier: generations by digest, counted references, the least recently used evicted first.

Bounded by count and by bytes. Never evicts what a handle refers to or what is pinned, so it can hold more than its
bounds for as long as requests and pins need that. Knows nothing of names or files. Thread-safe. Owned by `manager`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from adapters.generation import Generation, GenerationHandle


@dataclass
class _Resident:
    generation: Generation
    num_refs: int = 0
    is_pinned: bool = False
    is_retired: bool = False


@dataclass(frozen=True)
class StoreUsage:
    """What is resident: how many generations and their bytes, and how many of them are pinned."""

    num_resident: int
    num_bytes: int
    num_pinned: int


class GenerationStore:
    """Generations up to a count and a number of bytes, plus those that somebody refers to or has pinned.

    Attributes:
        capacity: most generations that are kept for later use.
        max_bytes: most bytes of all A and B, None for no such bound.
        evictions: how often one was put out for want of room.
    """

    def __init__(
        self,
        capacity: int,
        max_bytes: int | None = None,
        *,
        note_prompt: Callable[[str, int, int], None] = lambda name, num_tokens, num_cached: None,
        on_forgotten: Callable[[str], None] = lambda digest: None,
    ) -> None:
        """`note_prompt` is what handles call when a prompt begins (see `GenerationHandle`).

        `on_forgotten(digest)` is called, without a lock held, when the last handle on retired content was given back.
        """
        assert capacity >= 1, "the CPU tier needs room for one adapter"
        self.capacity = capacity
        self.max_bytes = max_bytes
        self.evictions = 0
        self._note_prompt = note_prompt
        self._on_forgotten = on_forgotten
        self._lock = threading.Lock()
        # digest -> generation, the least recently used first
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        self._num_bytes = 0

    def add(self, generation: Generation, name: str, *, load_ms: float = 0.0) -> GenerationHandle:
        """Keep a generation, or the one with the same digest that is already there, and borrow it for `name`."""
        with self._lock:
            resident = self._residents.get(generation.digest)
            if resident is None:
                resident = self._residents[generation.digest] = _Resident(generation)
                self._num_bytes += generation.num_bytes
            handle = self._borrow(resident, name, load_ms)
            self._shrink()
            return handle

    def borrow(self, digest: str, name: str, *, load_ms: float = 0.0) -> GenerationHandle | None:
        """A handle on a resident generation; None where it is not in memory."""
        with self._lock:
            resident = self._residents.get(digest)
            return None if resident is None else self._borrow(resident, name, load_ms)

    def retire(self, digest: str) -> bool:
        """No name points here any more: forget it as soon as nobody refers to it.

        Returns:
            Whether nobody does now; else `on_forgotten` is called when that is so.
        """
        with self._lock:
            resident = self._residents.get(digest)
            if resident is None:
                return True
            resident.is_retired, resident.is_pinned = True, False
            return self._forget_if_done(digest, resident)

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

    def usage(self) -> StoreUsage:
        """What is resident now."""
        with self._lock:
            num_pinned = sum(resident.is_pinned for resident in self._residents.values())
            return StoreUsage(len(self._residents), self._num_bytes, num_pinned)

    def check_integrity(self) -> None:
        """No negative references, nothing retired that nobody refers to, nothing evictable over a bound."""
        with self._lock:
            for digest, resident in self._residents.items():
                assert resident.num_refs >= 0, f"{digest} has {resident.num_refs} references"
                assert resident.num_refs > 0 or not resident.is_retired, f"{digest} is retired and unused, but kept"
                assert resident.generation.digest == digest, f"{digest} holds {resident.generation.digest}"
            num_bytes = sum(item.generation.num_bytes for item in self._residents.values())
            assert num_bytes == self._num_bytes, f"{self._num_bytes} bytes are counted, {num_bytes} are held"
            num_evictable = sum(item.num_refs == 0 and not item.is_pinned for item in self._residents.values())
            assert not self._is_over() or num_evictable == 0, "over a bound, yet something could go"

    def _borrow(self, resident: _Resident, name: str, load_ms: float) -> GenerationHandle:
        digest = resident.generation.digest
        resident.num_refs += 1
        self._residents.move_to_end(digest)
        return GenerationHandle(
            name, resident.generation, load_ms=load_ms, retain=self._retain, release=self._release,
            note_prompt=self._note_prompt,
        )  # fmt: skip

    def _retain(self, digest: str) -> None:
        with self._lock:
            self._residents[digest].num_refs += 1

    def _release(self, digest: str) -> None:
        with self._lock:
            resident = self._residents[digest]
            assert resident.num_refs > 0, f"{digest} released more often than borrowed"
            resident.num_refs -= 1
            is_forgotten = self._forget_if_done(digest, resident)
            self._shrink()
        if is_forgotten:
            self._on_forgotten(digest)

    def _forget_if_done(self, digest: str, resident: _Resident) -> bool:
        is_done = resident.is_retired and resident.num_refs == 0
        if is_done:
            self._forget(digest)
        return is_done

    def _forget(self, digest: str) -> None:
        self._num_bytes -= self._residents.pop(digest).generation.num_bytes

    def _is_over(self) -> bool:
        return len(self._residents) > self.capacity or (self.max_bytes is not None and self._num_bytes > self.max_bytes)

    def _shrink(self) -> None:
        if not self._is_over():
            return
        evictable = [d for d, item in self._residents.items() if item.num_refs == 0 and not item.is_pinned]
        # What can never fit goes first, so that it takes nothing else along.
        for digest in sorted(evictable, key=lambda digest: not self._is_too_large(digest)):
            self._forget(digest)
            self.evictions += 1
            if not self._is_over():
                break

    def _is_too_large(self, digest: str) -> bool:
        return self.max_bytes is not None and self._residents[digest].generation.num_bytes > self.max_bytes
