"""Loads that many wait for and one thread does: a future for each waiter, a bounded pool for the work.

Whoever asks for a key that is being loaded joins that load and holds no thread meanwhile, so a slow adapter costs one
thread however many requests want it. Knows nothing of files or names. Owned by `manager`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor

from adapters.generation import GenerationHandle

Load = Callable[[], GenerationHandle]
Waiter = tuple["Future[GenerationHandle]", float]


class Flights:
    """Single flight by key over at most `num_threads` loads at a time; further keys queue in order."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-load")
        self._lock = threading.Lock()
        # key -> who waits for it, each with the time of asking
        self._waiters: dict[Hashable, list[Waiter]] = {}

    def join(self, key: Hashable, load: Load) -> Future[GenerationHandle]:
        """A handle of one's own on what `load` borrows, or the error that it raised; `load` runs once for all.

        A waiter that is cancelled gets no handle; the load goes on for the others, and to its end in any case.
        """
        future: Future[GenerationHandle] = Future()
        waiter = (future, time.perf_counter())
        with self._lock:
            if key in self._waiters:
                self._waiters[key].append(waiter)
                return future
            self._waiters[key] = [waiter]
        try:
            self._pool.submit(self._fly, key, load)
        except RuntimeError:  # The pool is shut down: whoever asks so late waits in person.
            self._fly(key, load)
        return future

    def close(self) -> None:
        """Take no more threads; loads under way, and those that wait for one, still end."""
        self._pool.shutdown(wait=False)

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiters)

    def _fly(self, key: Hashable, load: Load) -> None:
        try:
            handle = load()
        except BaseException as error:  # noqa: BLE001 - thread border: it is every waiter's answer
            for future, _ in self._land(key):
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            return
        with handle:
            for future, asked_at in self._land(key):
                if future.set_running_or_notify_cancel():
                    future.set_result(handle.fork(load_ms=(time.perf_counter() - asked_at) * 1000.0))

    def _land(self, key: Hashable) -> list[Waiter]:
        with self._lock:
            return self._waiters.pop(key)
