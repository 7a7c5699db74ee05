"""A turn for each key on the event loop, which exists only while somebody has it or waits for it. Used by `service`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class KeyedTurns:
    """Lets callers with the same key go one after another without holding a thread; in order of arrival.

    Each event loop has its own turns; across loops nothing is ordered.
    """

    def __init__(self) -> None:
        # (loop, key) -> its lock and the number of tasks that have it or wait for it
        self._locks: dict[tuple[asyncio.AbstractEventLoop, str], tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Wait for the key's turn and keep it for the length of an `async with` block."""
        place = (asyncio.get_running_loop(), key)
        lock, num_users = self._locks.get(place, (asyncio.Lock(), 0))
        self._locks[place] = (lock, num_users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, num_users = self._locks[place]
            if num_users == 1:
                del self._locks[place]
            else:
                self._locks[place] = (lock, num_users - 1)

    def __len__(self) -> int:
        return len(self._locks)
