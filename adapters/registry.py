"""Names and what they point to: atomic swaps, earlier versions, pins, and letting go of what no name points to any more.

Holds the lock that orders all of this; it is held for moments only, never while files are read. Knows nothing of files
or of who may load what. Owned by `manager`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection

from adapters.errors import AdapterNotFound
from adapters.generation import Generation, GenerationHandle
from adapters.records import AdapterEntry
from adapters.store import GenerationStore


class Registry:
    """The names, over a CPU tier that it tells what is named, pinned or retired.

    A name remembers up to `num_kept - 1` earlier entries whose files are not the server's own (`version` None); of those
    that are, the catalogue keeps the list.
    """

    def __init__(self, store: GenerationStore, on_retire: Callable[[str], None], *, num_kept: int) -> None:
        """`on_retire(digest)` is called, without a lock held, when a name was the last to let go of a generation.

        Where a handle is, the store tells so.
        """
        self._store = store
        self._num_kept = num_kept
        self._on_retire = on_retire
        self._lock = threading.Lock()
        self._entries: dict[str, AdapterEntry] = {}
        # name -> what it pointed to before, the latest first
        self._earlier: dict[str, list[AdapterEntry]] = {}
        # names that are pinned for as long as they are defaults, whether they exist or not
        self._default_names: frozenset[str] = frozenset()
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
                entry.lora_int_id, entry.usage = previous.lora_int_id, previous.usage
                self._remember(previous, entry)
            self._entries[entry.name] = entry
            self._settle(entry.digest)
            retired = None if previous is None else self._settle(previous.digest)
        self._tell(retired)
        return previous

    def remove(self, name: str) -> None:
        """Forget a name that exists."""
        with self._lock:
            self._earlier.pop(name, None)
            retired = self._settle(self._entries.pop(name).digest)
        self._tell(retired)

    def earlier(self, name: str) -> list[AdapterEntry]:
        """What a name pointed to before and whose files are not the server's own, the latest first."""
        with self._lock:
            return list(self._earlier.get(name, ()))

    def set_pinned(self, entry: AdapterEntry, is_pinned: bool) -> None:
        """Pin an entry's content in the CPU tier, or no longer."""
        with self._lock:
            entry.is_pinned = is_pinned
            self._settle(entry.digest)

    def set_default_names(self, names: Collection[str]) -> None:
        """Pin what these names point to, now and later, and what other names do no longer for this reason."""
        with self._lock:
            changed = self._default_names.symmetric_difference(names)
            self._default_names = frozenset(names)
            for name in changed & self._entries.keys():
                self._settle(self._entries[name].digest)

    def settle(self, digest: str) -> None:
        """Let content go that was read but that no name came to point to."""
        with self._lock:
            retired = self._settle(digest)
        self._tell(retired)

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
            assert self._earlier.keys() <= self._entries.keys(), "versions of a name that is gone"
            for name, earlier in self._earlier.items():
                digests = [entry.digest for entry in earlier]
                assert 0 < len(digests) == len(set(digests)) < self._num_kept, f"{name} remembers {digests}"
                assert all(entry.version is None and entry.digest for entry in earlier), f"{name} remembers too much"

    def _settle(self, digest: str | None) -> str | None:
        """With the lock held: tell the CPU tier how names now stand to a digest; returns it if nobody is left."""
        if digest is None:
            return None
        named = [entry for entry in self._entries.values() if entry.digest == digest]
        if not named:
            return digest if self._store.retire(digest) else None
        is_pinned = any(entry.is_pinned or entry.name in self._default_names for entry in named)
        self._store.revive(digest, is_pinned=is_pinned)
        return None

    def _remember(self, previous: AdapterEntry, entry: AdapterEntry) -> None:
        """With the lock held: keep what a name pointed to, and no version twice."""
        earlier = [
            each for each in self._earlier.get(entry.name, ()) if each.digest not in (previous.digest, entry.digest)
        ]
        if previous.version is None and previous.digest not in (None, entry.digest):
            earlier.insert(0, previous)
        self._earlier[entry.name] = earlier[: self._num_kept - 1]
        if not earlier:
            del self._earlier[entry.name]

    def _tell(self, digest: str | None) -> None:
        if digest is not None:
            self._on_retire(digest)

    def note_request(self, entry: AdapterEntry) -> None:
        """Note that a request took the adapter just now."""
        with self._lock:
            entry.usage.num_requests += 1
            entry.usage.last_used = time.time()

    def note_load(self, entry: AdapterEntry, load_ms: float) -> None:
        """Note that the adapter was read from its files."""
        with self._lock:
            entry.usage.num_loads += 1
            entry.usage.load_ms = load_ms

    def note_prompt(self, name: str, num_tokens: int, num_cached: int) -> None:
        """Note how much of a prompt came from the prefix cache; nothing happens where the name is gone."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                entry.usage.prefix_query_tokens += num_tokens
                entry.usage.prefix_hit_tokens += num_cached
