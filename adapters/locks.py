"""A lock for each name, which exists only while somebody holds it or waits for it. Used by `manager`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class KeyedLocks:
    """Serialises work on one key without hindering work on others; the table never grows beyond its present users."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        # key -> its lock and the number of threads that hold it or wait for it
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Wait for the key's turn and keep it for the length of a `with` block."""
        with self._guard:
            lock, num_users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, num_users + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, num_users = self._locks[key]
                if num_users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = (lock, num_users - 1)

    def __len__(self) -> int:
        with self._guard:
            return len(self._locks)
