"""Which adapter sits in which row of the LoRA buffers: residency, eviction of the least recently used, draining.

Owned and called by the engine thread; only `drop` may come from other threads. Knows nothing of buffers: a `SlotWriter`
moves the tensors, maybe in the background. The base model is row -1 and never takes a slot.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from adapters.generation import Generation


class RowCopy(Protocol):
    """A row that is being filled in the background."""

    def is_ready(self) -> bool:
        """Whether the row can be read now; never waits. Raises what made the copy fail."""

    def has_failed(self) -> bool:
        """Whether it has ended in a fault, which `is_ready` and `wait` raise."""

    def wait(self) -> None:
        """Return once steps that start from now on find the row filled. Raises what made the copy fail."""


class SlotWriter(Protocol):
    """Moves a generation into a row of the buffers of every layer."""

    def write(self, lora_slot: int, generation: Generation) -> RowCopy | None:
        """Fill the row, or begin to; None where it is filled on return.

        It may hold another adapter's weights, and steps that were started may still read it: the writer sees to it that
        they find what they expect. Layers that `generation` does not touch add nothing. Later calls for the same row
        take effect after this one.
        """

    def clear(self, lora_slot: int) -> None:
        """Make the row add nothing in any layer."""


@dataclass
class _Resident:
    lora_slot: int
    copy: RowCopy | None
    num_refs: int = 0
    is_dropped: bool = False


class SlotPool:
    """`num_slots` rows, numbered from 0, of which each holds at most one generation.

    Attributes:
        loads: how often a generation was written into a row.
        evictions: how often an unreferenced one had to make room.
    """

    def __init__(self, num_slots: int, writer: SlotWriter) -> None:
        assert num_slots >= 1, "a pool needs a slot"
        self.num_slots = num_slots
        self.loads = 0
        self.evictions = 0
        self._writer = writer
        self._free: list[int] = list(range(num_slots - 1, -1, -1))
        # digest -> row, the least recently used first
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        self._dropped: deque[str] = deque()
        # what `resident` shows to other threads; replaced as a whole, never changed in place
        self._published: dict[str, int] = {}

    def acquire(self, generation: Generation) -> int | None:
        """The row that holds `generation`, with one more reference on it; None where every row is in use."""
        resident = self._residents.get(generation.digest)
        if resident is not None and resident.num_refs == 0 and resident.copy is not None and resident.copy.has_failed():
            self._clear(generation.digest)  # A prefetch that nobody waited for: tried again.
            resident = None
        if resident is None:
            resident = self._load(generation)
            if resident is None:
                return None
        resident.num_refs += 1
        resident.is_dropped = False
        self._residents.move_to_end(generation.digest)
        return resident.lora_slot

    def prefetch(self, generation: Generation) -> None:
        """Begin to fill a row without a reference on it; nothing happens where every row is in use."""
        if generation.digest not in self._residents:
            self._load(generation)

    def is_ready(self, generation: Generation) -> bool:
        """Whether the row of a resident generation can be read now; never waits.

        Raises what made the copy fail; the row is then given up as soon as nothing refers to it.
        """
        resident = self._residents[generation.digest]
        if resident.copy is not None:
            with _giving_up(resident):
                if not resident.copy.is_ready():
                    return False
            resident.copy = None
        return True

    def wait(self, generation: Generation) -> None:
        """Like `is_ready`, but returns once steps that start from now on find the row filled."""
        resident = self._residents[generation.digest]
        if resident.copy is not None:
            with _giving_up(resident):
                resident.copy.wait()
            resident.copy = None

    def release(self, generation: Generation) -> None:
        """Take one reference back; the row stays resident until it is needed or was dropped."""
        resident = self._residents[generation.digest]
        assert resident.num_refs > 0, f"slot {resident.lora_slot} released more often than acquired"
        resident.num_refs -= 1
        if resident.num_refs == 0:
            self._residents.move_to_end(generation.digest)
            if resident.is_dropped:
                self._clear(generation.digest)

    def can_acquire(self, generation: Generation) -> bool:
        """Whether `acquire` would give a row now."""
        if generation.digest in self._residents or self._free:
            return True
        return any(resident.num_refs == 0 for resident in self._residents.values())

    def lookup(self, digest: str) -> int | None:
        """The row that holds this digest, or None."""
        resident = self._residents.get(digest)
        return None if resident is None else resident.lora_slot

    def resident(self) -> dict[str, int]:
        """digest -> row of everything that is resident. Safe to call from any thread."""
        return dict(self._published)

    def num_refs(self, digest: str) -> int:
        """References on a digest; 0 where it is not resident."""
        resident = self._residents.get(digest)
        return 0 if resident is None else resident.num_refs

    def drop(self, digest: str) -> None:
        """Ask for a row to be cleared once nothing refers to it. From any thread; takes effect in `collect`."""
        self._dropped.append(digest)

    def collect(self) -> None:
        """Apply the drops that were asked for since the last call."""
        while self._dropped:
            digest = self._dropped.popleft()
            resident = self._residents.get(digest)
            if resident is None:
                continue
            resident.is_dropped = True
            if resident.num_refs == 0:
                self._clear(digest)

    def check_integrity(self) -> None:
        """Each row is free or held by one generation; no negative references."""
        used = [resident.lora_slot for resident in self._residents.values()]
        assert sorted(used + self._free) == list(range(self.num_slots)), f"used {used}, free {self._free}"
        for digest, resident in self._residents.items():
            assert resident.num_refs >= 0, f"{digest} has {resident.num_refs} references"
            assert resident.num_refs > 0 or not resident.is_dropped, f"{digest} was dropped but is still resident"

    def _load(self, generation: Generation) -> _Resident | None:
        lora_slot = self._take_slot()
        if lora_slot is None:
            return None
        try:
            copy = self._writer.write(lora_slot, generation)
        except BaseException:
            self._free.append(lora_slot)
            self._publish()
            raise
        self.loads += 1
        resident = self._residents[generation.digest] = _Resident(lora_slot, copy)
        self._publish()
        return resident

    def _take_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        for digest, resident in self._residents.items():
            if resident.num_refs == 0:
                del self._residents[digest]
                self.evictions += 1
                return resident.lora_slot
        return None

    def _clear(self, digest: str) -> None:
        resident = self._residents.pop(digest)
        self._free.append(resident.lora_slot)
        self._publish()
        self._writer.clear(resident.lora_slot)

    def _publish(self) -> None:
        self._published = {digest: resident.lora_slot for digest, resident in self._residents.items()}


@contextmanager
def _giving_up(resident: _Resident) -> Iterator[None]:
    """A row whose copy failed is cleared after its last reference."""
    try:
        yield
    except BaseException:
        resident.is_dropped = True
        raise
