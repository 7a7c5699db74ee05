"""The server's own adapter folder: uploads arrive in `incoming/`, are kept in `adapters/`, listed in the catalogue.

Owns the order of steps that makes a stored adapter whole or absent after a crash: write, fsync, rename, then the row;
for deletion the row first. Knows nothing of what adapters are. Called by `manager`.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters.catalog import Catalog, CatalogRow
from adapters.errors import AdapterStoreFault
from adapters.storage import storage_faults

try:
    import fcntl
except ImportError:  # Windows has no such locks: leftovers are then swept without asking other processes
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

CATALOG_NAME = "catalog.sqlite3"
# versions of one name that stay on disk, the current one included
NUM_KEPT_VERSIONS = 3


class Vault:
    """Stored adapters under one root, which processes may share. Raises `AdapterStoreFault` where it is unusable."""

    def __init__(self, root: Path) -> None:
        self._incoming = root / "incoming"
        self._adapters = root / "adapters"
        try:
            for folder in (self._incoming, self._adapters):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise AdapterStoreFault(
                f"the adapter folder cannot be written ({error.strerror}); choose another --adapter-dir"
            ) from error
        is_new = not (root / CATALOG_NAME).exists()
        self.catalog = Catalog(root / CATALOG_NAME)
        is_alone = self._lock(exclusive=True)
        if is_alone:
            self._sweep(keep_adapters=is_new)
            self._lock(exclusive=False)
        elif not self._lock(exclusive=False):
            log.warning("event=adapter_folder_lock_busy effect=leftovers_not_swept")

    def new_folder(self) -> Path:
        """An empty folder for files that arrive; the caller keeps or discards it."""
        folder = self._incoming / uuid.uuid4().hex
        folder.mkdir()
        return folder

    def discard(self, folder: Path) -> None:
        """Remove a folder that came from `new_folder`; nothing happens where it is gone."""
        shutil.rmtree(folder, ignore_errors=True)

    def keep(self, folder: Path) -> str:
        """Make arrived files durable and move them to their final place; returns the folder's name there."""
        for path in folder.iterdir():
            _fsync(path)
        _fsync(folder)
        name = folder.name
        os.replace(folder, self._adapters / name)
        _fsync(self._adapters)
        return name

    def put(self, row: CatalogRow) -> list[str]:
        """List a kept folder as its name's current version; returns folders that are no longer listed, to be deleted."""
        return self.catalog.put(row, num_kept=NUM_KEPT_VERSIONS)

    def path(self, folder: str) -> Path:
        """Where a kept folder is."""
        return self._adapters / folder

    def delete_folders(self, folders: Iterable[str]) -> None:
        """Delete kept folders that are no longer listed."""
        for folder in folders:
            shutil.rmtree(self.path(folder), ignore_errors=True)

    def close(self) -> None:
        """Close the catalogue and let go of the folder."""
        self.catalog.close()
        os.close(self._lock_fd)

    def _lock(self, *, exclusive: bool) -> bool:
        if fcntl is None:
            return True
        try:
            fcntl.flock(self._lock_fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _sweep(self, *, keep_adapters: bool) -> None:
        """Delete what a killed process left behind. A new catalogue proves nothing about the folders, so they stay."""
        for folder in self._incoming.iterdir():
            self.discard(folder)
        if keep_adapters:
            return
        listed = self.catalog.folders()
        for folder in self._adapters.iterdir():
            if folder.name not in listed:
                log.info("event=unlisted_adapter_folder_deleted folder=%s", folder.name)
                self.delete_folders([folder.name])


class VaultDoor:
    """Opens the vault when it is first needed, so that a server which stores nothing writes nothing.

    Args:
        root: the server's adapter folder; None where uploads are switched off.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._vault: Vault | None = None

    def open(self) -> Vault:
        """The vault; there must be a root."""
        with self._lock:
            if self._vault is None:
                assert self.root is not None, "no adapter folder is configured"
                self._vault = Vault(self.root)
            return self._vault

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """An empty folder for an upload's files, gone afterwards unless it was kept."""
        if self.root is None:
            with tempfile.TemporaryDirectory(prefix="switchboard-") as folder:
                yield Path(folder)
            return
        vault = self.open()
        with storage_faults("uploads"):
            incoming = vault.new_folder()
        try:
            yield incoming
        finally:
            vault.discard(incoming)

    def close(self) -> None:
        """Close the vault if it is open; it opens again when it is needed."""
        with self._lock:
            if self._vault is not None:
                self._vault.close()
                self._vault = None


def _fsync(path: Path) -> None:
    """Wait until a file or a folder's list of names is on disk."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
