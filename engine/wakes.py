"""Wakes coroutines that wait for the engine thread: one call into each event loop for all tokens of a step.

A call from another thread writes to the loop's pipe, which lets go of the interpreter lock; done once for each token it
would hand the lock to the readers so many times a step. Readers who have the lock hold up the engine thread in turn, so it may
hold their wakes back until it has launched what the device does next. Knows nothing of answers. Used by `answer` and `loop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

_MIN_HELD = 8
"""Readers whose work takes longer than the few that are woken sooner would gain."""


class Wakes:
    """Calls that are due; touched by the engine thread alone."""

    def __init__(self) -> None:
        self._is_held = False
        self._num_due = 0
        self._due: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[None], Callable[[], None]]]] = {}

    def add(self, future: asyncio.Future[None], on_closed: Callable[[], None]) -> None:
        """Complete `future` on its loop, soon; call `on_closed` where that loop is closed, and nobody waits any more."""
        self._due.setdefault(future.get_loop(), []).append((future, on_closed))
        self._num_due += 1
        if not self._is_held:
            self.send()

    def hold(self) -> None:
        """Gather what is added, until `send`."""
        self._is_held = True

    def send_few(self) -> None:
        """Send what is held where that is little."""
        if self._num_due < _MIN_HELD:
            self.send()

    def send(self) -> None:
        """Send what is held; what is added from now on goes out at once."""
        self._is_held, self._num_due = False, 0
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
