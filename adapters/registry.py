"""Names and what they point to: atomic swaps, pins, and letting go of content that no name points to any more.

Holds the lock that orders all of this; it is held for moments only, never while files are read. Knows nothing of files
or of who may load what. Owned by `manager`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from adapters.errors import AdapterNotFound
from adapters.generation import Generation, GenerationHandle
from adapters.records import AdapterEntry
from adapters.store import GenerationStore


class Registry:
    """The names, over a CPU tier that it tells what is named, pinned or retired."""

    def __init__(self, store: GenerationStore, on_retire: Callable[[str], None]) -> None:
        """`on_retire(digest)` is called, without a lock held, when no name points to a generation any more."""
        self._store = store
        self._on_retire = on_retire
        self._lock = threading.Lock()
        self._entries: dict[str, AdapterEntry] = {}
        self._next_int_id = itertools.count(1)

    def find(self, name: str) -> AdapterEntry | None:
        """The entry, or None."""
        with self._lock:
            return self._entries.get(name)

    def get(self, name: str) -> AdapterEntry:
        """The entry. Raises `AdapterNotFound`."""
        entry = self.find(name)
        if entry is None:
            raise AdapterNotFound(f"The model `{str(name)[:200]}` does not exist.", param="model")
        return entry

    def entries(self) -> list[AdapterEntry]:
        """All entries, in the order in which their names came."""
        with self._lock:
            return list(self._entries.values())

    def is_current(self, entry: AdapterEntry) -> bool:
        """Whether the name still points to this content."""
        return self.find(entry.name) is entry

    def swap(self, entry: AdapterEntry) -> AdapterEntry | None:
        """Point a name to new content; returns what it pointed to before."""
        with self._lock:
            previous = self._entries.get(entry.name)
            if previous is None:
                entry.lora_int_id = next(self._next_int_id)
            else:
                entry.lora_int_id, entry.num_requests = previous.lora_int_id, previous.num_requests
                entry.last_used = previous.last_used
            self._entries[entry.name] = entry
            self._settle(entry.digest)
            retired = None if previous is None else self._settle(previous.digest)
        self._tell(retired)
        return previous

    def remove(self, name: str) -> None:
        """Forget a name that exists."""
        with self._lock:
            retired = self._settle(self._entries.pop(name).digest)
        self._tell(retired)

    def set_pinned(self, entry: AdapterEntry, is_pinned: bool) -> None:
        """Pin an entry's content in the CPU tier, or no longer."""
        with self._lock:
            entry.is_pinned = is_pinned
            self._settle(entry.digest)

    def settle(self, digest: str) -> None:
        """Let content go that was read but that no name came to point to."""
        with self._lock:
            self._settle(digest)

    def borrow(self, entry: AdapterEntry) -> GenerationHandle | None:
        """A handle on an entry's content if it is in memory."""
        assert entry.digest is not None, "an adapter without an error has content"
        return self._store.borrow(entry.digest, entry.name)

    def put_back(self, entry: AdapterEntry, generation: Generation, load_ms: float) -> GenerationHandle | None:
        """Keep content that was read again, unless the name points elsewhere by now, and borrow it."""
        with self._lock:
            if self._entries.get(entry.name) is not entry:
                return None
            handle = self._store.add(generation, entry.name, load_ms=load_ms)
            self._settle(entry.digest)
        return handle

    def check_integrity(self) -> None:
        """Each entry has content or an error, never both or neither."""
        with self._lock:
            for name, entry in self._entries.items():
                assert entry.name == name, f"{name} lists {entry.name}"
                assert (entry.digest is None) == (entry.error is not None), f"{name} has neither content nor an error"
            int_ids = [entry.lora_int_id for entry in self._entries.values()]
            assert len(set(int_ids)) == len(int_ids), f"two adapters share an id: {int_ids}"

    def _settle(self, digest: str | None) -> str | None:
        """With the lock held: tell the CPU tier how names now stand to a digest; returns it if no name is left."""
        if digest is None:
            return None
        named = [entry for entry in self._entries.values() if entry.digest == digest]
        if not named:
            self._store.retire(digest)
            return digest
        self._store.revive(digest, is_pinned=any(entry.is_pinned for entry in named))
        return None

    def _tell(self, digest: str | None) -> None:
        if digest is not None:
            self._on_retire(digest)

    def count_request(self, entry: AdapterEntry) -> None:
        """Note that a request took the adapter just now."""
        with self._lock:
            entry.num_requests += 1
            entry.last_used = time.time()
