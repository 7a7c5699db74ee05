"""Downloads under way: what lists show of them, and a line in the log every now and then.

Knows nothing of where bytes come from. Used by the sources that download; read by the API.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from adapters.errors import SourceUnreachable

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
LOG_EVERY_PERCENT = 10


@dataclass(frozen=True)
class DownloadInfo:
    """A download as lists show it: bytes so far and in all (None while unknown), and its age in seconds."""

    source: str
    num_bytes: int
    total_bytes: int | None
    seconds: float

    @property
    def percent(self) -> int | None:
        """Whole percent, or None while the size is unknown."""
        return min(100, self.num_bytes * 100 // self.total_bytes) if self.total_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "source": self.source,
            "bytes": self.num_bytes,
            "total_bytes": self.total_bytes,
            "percent": self.percent,
            "seconds": round(self.seconds, 1),
        }


class Progress:
    """One download. `add` is called from the thread that downloads, `snapshot` from any."""

    def __init__(self, source: str, check_open: Callable[[], None], clock: Callable[[], float]) -> None:
        self._source = source
        self._check_open = check_open
        self._clock = clock
        self._started = self._logged_at = clock()
        self._logged_percent = 0
        self._num_bytes = 0
        self._total_bytes: int | None = None

    def expect(self, total_bytes: int) -> None:
        """Say how many bytes will come."""
        self._total_bytes = total_bytes
        log.info("event=download_started source=%s bytes=%d", self._source, total_bytes)

    def add(self, num_bytes: int) -> None:
        """Count bytes that came. Raises `SourceUnreachable` where the program is about to end."""
        self._check_open()
        self._num_bytes += num_bytes
        shown, now = self.snapshot(), self._clock()
        has_moved = shown.percent is not None and shown.percent >= self._logged_percent + LOG_EVERY_PERCENT
        if has_moved or now - self._logged_at >= LOG_EVERY_S:
            self._logged_at, self._logged_percent = now, shown.percent or 0
            log.info(
                "event=download_progress source=%s percent=%s bytes=%d total_bytes=%s",
                self._source, "unknown" if shown.percent is None else shown.percent, shown.num_bytes, shown.total_bytes,
            )  # fmt: skip

    def snapshot(self) -> DownloadInfo:
        """How far it is."""
        return DownloadInfo(self._source, self._num_bytes, self._total_bytes, self._clock() - self._started)


class Downloads:
    """All downloads under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._current: list[Progress] = []
        self._is_closed = False

    @contextmanager
    def track(self, source: str) -> Iterator[Progress]:
        """Show a download for the length of a `with` block."""
        progress = Progress(source, self._check_open, self._clock)
        with self._lock:
            self._current.append(progress)
        try:
            yield progress
        except BaseException as error:
            log.warning("event=download_failed source=%s kind=%s", source, type(error).__name__)
            raise
        else:
            done = progress.snapshot()
            log.info("event=download_finished source=%s bytes=%d seconds=%.1f", source, done.num_bytes, done.seconds)
        finally:
            with self._lock:
                self._current.remove(progress)

    def list(self) -> list[DownloadInfo]:
        """The downloads under way, oldest first."""
        with self._lock:
            return [progress.snapshot() for progress in self._current]

    def close(self) -> None:
        """Make every download end at its next bytes."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise SourceUnreachable("the server is shutting down, so the download was cut off")
