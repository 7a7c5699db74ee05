"""Wakes coroutines that wait for the engine thread: one call into each event loop for all tokens of a step.

A call from another thread writes to the loop's pipe, which lets go of the interpreter lock; done once for each token it
would hand the lock to the readers so many times a step. Knows nothing of answers. Used by `answer` and `loop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class Wakes:
    """Calls that are due; touched by the engine thread alone."""

    def __init__(self) -> None:
        self._is_gathering = False
        self._due: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], Callable[[], None]]]] = {}

    def add(self, future: asyncio.Future[None], on_closed: Callable[[], None]) -> None:
        """Complete `future` on its loop, soon; call `on_closed` where that loop is closed, and nobody waits any more."""
        self._due.setdefault(future.get_loop(), []).append((future, on_closed))
        if not self._is_gathering:
            self._send()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Send what is added within at the end, whatever happens."""
        self._is_gathering = True
        try:
            yield
        finally:
            self._is_gathering = False
            self._send()

    def _send(self) -> None:
        due, self._due = self._due, {}
        for loop, waiting in due.items():
            try:
                loop.call_soon_threadsafe(_complete, [future for future, _ in waiting])
            except RuntimeError:  # The loop is closed.
                for _, on_closed in waiting:
                    on_closed()


def _complete(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
