"""Counts loads, their seconds and refusals for metrics. Thread-safe. Owned by `manager`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from adapters.errors import AdapterError


class TallySnapshot(TypedDict):
    """Counts by kind of source (`path`, `upload`) and by error code."""

    loads: dict[str, int]
    load_seconds: dict[str, float]
    refusals: dict[str, int]


class Tally:
    """Counters since start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._refusals: Counter[str] = Counter()

    def count_load(self, kind: str, seconds: float) -> None:
        """One adapter was read from files."""
        with self._lock:
            self._loads[kind] += 1
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Count an `AdapterError` that leaves the block, by its code."""
        try:
            yield
        except AdapterError as error:
            with self._lock:
                self._refusals[error.code or "other"] += 1
            raise

    def snapshot(self) -> TallySnapshot:
        """Copies of all counters."""
        with self._lock:
            return {
                "loads": dict(self._loads),
                "load_seconds": dict(self._seconds),
                "refusals": dict(self._refusals),
            }
