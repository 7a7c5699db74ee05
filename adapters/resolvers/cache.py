"""Downloaded adapters on disk: each lands whole under a key of its content, or not at all.

Files arrive in a folder of their own, which is renamed once it is complete. Processes may share the root: a lock on the
root orders renames and deletions, and a lock on a file in each folder says that somebody uses it. Knows nothing of where
the files come from. Called by sources that have no cache of their own.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from adapters.located import Lease
from adapters.locks import KeyedLocks
from adapters.storage import storage_faults

try:
    import fcntl
except ImportError:  # Windows: nothing is deleted while the program runs, nor when it starts
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

IN_USE = ".in-use"
PARTIAL = "partial-"
MAX_UNUSED_DAYS = 30


class DownloadCache:
    """Complete downloads under one root; each is deleted once nobody uses it any more.

    What a killed process left incomplete is removed at the start, and so is what nobody has used for a month.
    Raises `AdapterStoreFault` where the root cannot be written, `StorageFull` where the disk has no room.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._key_locks = KeyedLocks()
        self._is_ready = False
        self._of_thread = threading.local()
        # given back by the garbage collector in a thread that holds the root's lock
        self._late: deque[tuple[Path, int]] = deque()

    def get(self, key: str, fetch: Callable[[Path], None]) -> tuple[Path, Lease]:
        """The folder with the content of `key`, and what keeps it there.

        `fetch` fills an empty folder; it is called only where no complete copy is there. Whatever it raises leaves
        nothing behind.
        """
        with storage_faults("downloads"), self._key_locks.hold(key):
            self._prepare()
            found = self._take(key)
            if found is None:
                found = self._download(key, fetch)
        folder, in_use = found
        return folder, Lease(lambda: self._give_back(folder, in_use))

    def _prepare(self) -> None:
        """Make the root and clear what others left; once, when it is first needed."""
        if self._is_ready:
            return
        self._root.mkdir(parents=True, exist_ok=True)
        oldest = time.time() - MAX_UNUSED_DAYS * 86400
        with self._root_lock():
            for folder in [path for path in self._root.iterdir() if path.is_dir()]:
                in_use = folder / IN_USE
                is_stale = folder.name.startswith(PARTIAL) or (in_use.exists() and in_use.stat().st_mtime < oldest)
                if is_stale and _is_unused(folder):
                    log.info("event=stale_download_deleted folder=%s", folder.name)
                    shutil.rmtree(folder, ignore_errors=True)
        self._is_ready = True

    def _take(self, key: str) -> tuple[Path, int] | None:
        with self._root_lock():
            folder = self._root / key
            return (folder, _mark_in_use(folder)) if folder.is_dir() else None

    def _download(self, key: str, fetch: Callable[[Path], None]) -> tuple[Path, int]:
        partial = self._root / f"{PARTIAL}{uuid.uuid4().hex}"
        with self._root_lock():
            partial.mkdir()
            in_use = _mark_in_use(partial)
        try:
            fetch(partial)
            for path in partial.iterdir():
                _fsync(path)
            with self._root_lock():
                folder = self._root / key
                if not folder.exists():
                    os.rename(partial, folder)
                    return folder, in_use
                # Another process was faster.
                taken = folder, _mark_in_use(folder)
        except BaseException:
            os.close(in_use)
            shutil.rmtree(partial, ignore_errors=True)
            raise
        os.close(in_use)
        shutil.rmtree(partial, ignore_errors=True)
        return taken

    def _give_back(self, folder: Path, in_use: int) -> None:
        if getattr(self._of_thread, "holds_root", False):  # It would wait for itself.
            self._late.append((folder, in_use))
            return
        os.close(in_use)
        try:
            with self._root_lock():
                if _is_unused(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            log.warning("event=download_not_deleted folder=%s reason=%r", folder.name, error.strerror)

    @contextmanager
    def _root_lock(self) -> Iterator[None]:
        descriptor = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._of_thread.holds_root = True
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
            self._of_thread.holds_root = False
        with suppress(IndexError):  # Another thread may take the last.
            while True:
                self._give_back(*self._late.popleft())


def _mark_in_use(folder: Path) -> int:
    """Keep a folder until the descriptor is closed; the mark's time says when it was last used."""
    descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
    os.utime(folder / IN_USE)
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _is_unused(folder: Path) -> bool:
    """Whether neither this nor another process uses a folder; to be asked with the root locked."""
    if fcntl is None or not folder.is_dir():
        return False
    descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
