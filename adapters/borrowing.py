"""Lending what names point to: at once where it is in memory, else after one read for all who wait.

Knows which content left memory and reads it again from where it came; knows nothing of loading, replacing or uploads. Owned by
`manager`. Thread-safe.
"""

from __future__ import annotations

from concurrent.futures import Future

from adapters.errors import AdapterError
from adapters.flights import Flights
from adapters.generation import GenerationHandle
from adapters.intake import about
from adapters.locks import KeyedLocks
from adapters.reader import Reader
from adapters.records import AdapterEntry
from adapters.registry import Registry
from adapters.tally import Tally

# evicted adapters that are read at the same time, so that a few slow ones do not hold up the others
NUM_LOAD_THREADS = 8


class Lender:
    """Lends generations by name; the arguments are the manager's own parts."""

    def __init__(self, registry: Registry, reader: Reader, tally: Tally) -> None:
        self._registry = registry
        self._reader = reader
        self._tally = tally
        self._read_locks = KeyedLocks()
        self._flights = Flights(NUM_LOAD_THREADS)

    def close(self) -> None:
        """Take no more threads."""
        self._flights.close()

    def check_integrity(self) -> None:
        """Assert what must hold whenever no call is in progress."""
        assert len(self._read_locks) == 0, "a lock outlived its users"
        assert len(self._flights) == 0, "a load outlived those who waited for it"

    def borrow_soon(self, name: str, *, is_request: bool) -> Future[GenerationHandle]:
        """What `borrow` gives, as a future that is done already where the content is in memory. Never blocks.

        `is_request`: whether it counts as one.
        """
        try:
            entry = self._entry(name)
        except AdapterError as error:
            failed: Future[GenerationHandle] = Future()
            failed.set_exception(error)
            return failed
        handle = self._registry.borrow(entry)
        if handle is not None:
            if is_request:
                self._registry.note_request(entry)
            found: Future[GenerationHandle] = Future()
            found.set_result(handle)
            return found
        # The digest is part of the key: who asks after a replacement must not get what was asked for before it.
        future = self._flights.join((name, entry.digest), lambda: self.borrow(name))
        if is_request:
            future.add_done_callback(lambda done: self._note_arrival(done, entry))
        return future

    def borrow(self, name: str) -> GenerationHandle:
        """What the name points to now, reading it again if it left CPU memory; not counted as a request.

        Raises `AdapterNotFound`; `AdapterRefused` or `AdapterFilesNotFound` where the files are gone or have changed.
        """
        while True:
            entry = self._entry(name)
            handle = self._registry.borrow(entry) or self._reload(entry)
            if handle is not None:
                return handle

    def _entry(self, name: str) -> AdapterEntry:
        entry = self._registry.get(name)
        if entry.error is not None:
            raise entry.error.with_traceback(None)
        return entry

    def _reload(self, entry: AdapterEntry) -> GenerationHandle | None:
        """Read evicted content again, once for all that wait; None where the name points elsewhere by now."""
        assert entry.digest is not None, "an adapter without an error has content"
        with self._tally.refusals(), self._read_locks.hold(entry.digest):
            handle = self._registry.borrow(entry)
            if handle is not None:
                return handle
            try:
                with about(entry.name):
                    generation, load_ms = self._reader.read_again(entry)
            except AdapterError:
                if self._registry.is_current(entry):
                    raise
                return None
            self._registry.note_load(entry, load_ms)
            return self._registry.put_back(entry, generation, load_ms)

    def _note_arrival(self, done: Future[GenerationHandle], entry: AdapterEntry) -> None:
        if not done.cancelled() and done.exception() is None:
            self._registry.note_request(entry)
