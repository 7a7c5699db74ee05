"""The life cycle of adapters by name: load, replace, borrow, unload; uploads that survive a restart.

A name points to a generation; everything that can fail happens before the pointer is swapped. Work on one name is
serialised, content that left memory is read once for all who wait, and borrowing what is in memory waits for neither.
Blocking and thread-safe: async callers use a thread. Knows nothing of GPU slots or requests beyond two callables that
the engine sets. Used by the engine, the API and the UI.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from adapters.catalog import CatalogRow
from adapters.errors import (
    AdapterError,
    AdapterExists,
    AdapterFilesNotFound,
    AdapterNotFound,
    AdapterRefused,
    AdapterStoreFault,
)
from adapters.folder import is_under
from adapters.generation import Generation, GenerationHandle
from adapters.intake import about, judge_upload, new_entry, read_generation, restored_entry
from adapters.locks import KeyedLocks
from adapters.names import check_name
from adapters.records import AdapterEntry, AdapterInfo, ManagerStats, VersionInfo
from adapters.registry import Registry
from adapters.store import GenerationStore
from adapters.surface import ModelSurface
from adapters.tally import Tally
from adapters.upload import UploadFiles, UploadReport, unpack_upload
from adapters.vault import Vault

__all__ = ["AdapterInfo", "AdapterManager", "ManagerStats", "UploadFiles", "UploadReport", "VersionInfo"]

log = logging.getLogger(__name__)

DEFAULT_MAX_UPLOAD_BYTES = 1 << 30

# `AdapterManager.list` hides the builtin inside the class body.
Infos = list[AdapterInfo]
Versions = list[VersionInfo]


class AdapterManager:
    """All adapters that the server knows.

    Attributes, to be set by the engine:
        residency: digest -> whether it is in a GPU slot.
        defaults: () -> modality -> name of the adapter that answers such prompts by itself.
    """

    def __init__(
        self,
        surface: ModelSurface,
        *,
        adapter_dir: Path | None,
        max_cpu_loras: int,
        on_retire: Callable[[str], None] = lambda digest: None,
        reserved_names: Collection[str] = (),
        max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES,
        allowed_roots: Sequence[Path] | None = None,
        locate: Callable[[str], Path] = Path,
    ) -> None:
        """`on_retire(digest)` is called, without any lock held, when no name points to a generation any more.

        `allowed_roots` limits where `load` may read from; None means anywhere. `locate` turns what `load` was given
        into a local folder, for ids that must be fetched first; it may raise `AdapterError`.
        """
        self.residency: Callable[[str], bool] = lambda digest: False
        self.defaults: Callable[[], dict[str, str]] = dict
        self._surface = surface
        self._adapter_dir = adapter_dir
        self._reserved_names = frozenset(reserved_names)
        self._max_upload_bytes = max_upload_bytes
        self._allowed_roots = None if allowed_roots is None else list(allowed_roots)
        self._locate = locate
        self._store = GenerationStore(max_cpu_loras)
        self._registry = Registry(self._store, on_retire)
        self._name_locks = KeyedLocks()
        self._read_locks = KeyedLocks()
        self._vault: Vault | None = None
        self._vault_lock = threading.Lock()
        self._tally = Tally()

    # Loading and unloading

    def load(
        self,
        name: str,
        path: str | Path,
        *,
        load_inplace: bool = False,
        base_model_name: str | None = None,
        pinned: bool = False,
        source: str | None = None,
    ) -> AdapterInfo:
        """Read, check and list the adapter in a folder; `source` is what lists show instead of `path`.

        Replacing keeps the pin. An upload that is replaced stays on disk and comes back with the next start.
        Raises `InvalidAdapterName`, `AdapterExists` (the name is taken and `load_inplace` is off),
        `AdapterFilesNotFound` or `AdapterRefused`; everything is then as it was before.
        """
        with self._tally.refusals():
            check_name(name, self._reserved_names)
            with self._name_locks.hold(name):
                self._check_free(name, load_inplace)
                with about(name):
                    folder = self._find(path)
                    with self._read(name, folder, "path") as generation:
                        entry = new_entry(name, source or str(path), folder, generation, base_model_name)
                        self._swap(entry, is_pinned=pinned)
        return self._describe(entry)

    def unload(self, name: str) -> None:
        """Forget a name: no new request gets it, running ones finish, an upload's files are deleted.

        Raises `AdapterNotFound`.
        """
        with self._name_locks.hold(name):
            entry = self._registry.get(name)
            stale = self._open_vault().catalog.remove(name) if entry.version is not None else []
            self._registry.remove(name)
            if stale:
                self._open_vault().delete_folders(stale)
        log.info("event=adapter_unloaded adapter=%s generation=%s", name, entry.digest)

    def delete(self, name: str) -> None:
        """The same as `unload`; files outside the server's own adapter folder are never touched."""
        self.unload(name)

    def pin(self, name: str, is_pinned: bool) -> AdapterInfo:
        """Keep an adapter in CPU memory for good, or no longer. Raises `AdapterNotFound`, or why it cannot be read."""
        with self._name_locks.hold(name):
            entry = self._registry.get(name)
            if is_pinned:
                with self.borrow(name):
                    self._registry.set_pinned(entry, True)
            else:
                self._registry.set_pinned(entry, False)
            if entry.version is not None:
                self._open_vault().catalog.set_pinned(name, is_pinned)
        return self._describe(entry)

    # Borrowing

    def acquire(self, name: str) -> GenerationHandle:
        """Borrow what the name points to now, reading it again if it left CPU memory.

        Raises `AdapterNotFound`; `AdapterRefused` or `AdapterFilesNotFound` where the files are gone or have changed.
        """
        entry, handle = self._borrow(name)
        self._registry.count_request(entry)
        return handle

    def borrow(self, name: str) -> GenerationHandle:
        """What `acquire` gives, without counting it as a request."""
        return self._borrow(name)[1]

    def _borrow(self, name: str) -> tuple[AdapterEntry, GenerationHandle]:
        """What `acquire` gives, not counted as a request, and the entry that it came from."""
        while True:
            entry = self._registry.get(name)
            if entry.error is not None:
                raise entry.error.with_traceback(None)
            handle = self._registry.borrow(entry) or self._reload(entry)
            if handle is not None:
                return entry, handle

    def _reload(self, entry: AdapterEntry) -> GenerationHandle | None:
        """Read evicted content again, once for all that wait; None where the name points elsewhere by now."""
        assert entry.digest is not None, "an adapter without an error has content"
        with self._tally.refusals(), self._read_locks.hold(entry.digest):
            handle = self._registry.borrow(entry)
            if handle is not None:
                return handle
            try:
                with about(entry.name):
                    generation, load_ms = self._read_files(
                        entry.folder, "upload" if entry.version else "path", entry.digest
                    )
                    if generation.digest != entry.digest:
                        raise AdapterRefused(["its files changed after it was loaded; load it again with load_inplace"])
            except AdapterError:
                if self._registry.is_current(entry):
                    raise
                return None
            return self._registry.put_back(entry, generation, load_ms)

    # Looking

    def contains(self, name: str) -> bool:
        """Whether the name is listed, be it failed."""
        return self._registry.find(name) is not None

    def names(self) -> list[str]:
        """All names, in the order in which they came."""
        return [entry.name for entry in self._registry.entries()]

    def get(self, name: str) -> AdapterInfo:
        """One adapter. Raises `AdapterNotFound`."""
        return self._describe(self._registry.get(name))

    def stats(self) -> ManagerStats:
        """Counters for metrics and the status page."""
        num_cpu, cpu_bytes = self._store.usage()
        entries = self._registry.entries()
        return ManagerStats(
            num_adapters=len(entries),
            num_failed=sum(entry.error is not None for entry in entries),
            num_cpu=num_cpu,
            cpu_bytes=cpu_bytes,
            evictions=self._store.evictions,
            **self._tally.snapshot(),
        )

    def check_integrity(self) -> None:
        """Assert what must hold whenever no call is in progress."""
        self._store.check_integrity()
        self._registry.check_integrity()
        assert len(self._name_locks) == 0 and len(self._read_locks) == 0, "a lock outlived its users"

    # Uploads

    def inspect_upload(self, files: UploadFiles) -> UploadReport:
        """Judge an upload as `install_upload` would, and keep nothing."""
        with self._incoming() as folder:
            return judge_upload(files, folder, self._surface, max_bytes=self._max_upload_bytes)

    def install_upload(self, name: str, files: UploadFiles, *, load_inplace: bool = False) -> AdapterInfo:
        """Store an uploaded adapter for good and list it.

        Raises `UploadTooLarge`, `UploadRefused`, and what `load` raises; nothing is kept then.
        """
        with self._tally.refusals():
            check_name(name, self._reserved_names, param="name")
            self._check_free(name, load_inplace)
            if self._adapter_dir is None:
                raise AdapterStoreFault("uploads are switched off: this server has no --adapter-dir")
            with self._incoming() as folder:
                unpack_upload(files, folder, max_bytes=self._max_upload_bytes)
                with self._name_locks.hold(name):
                    self._check_free(name, load_inplace)
                    with about(name), self._read(name, folder, "upload") as generation:
                        entry = self._keep(name, folder, generation)
        return self._describe(entry)

    def restore(self) -> Infos:
        """List the stored adapters again after a restart; one that can no longer be served is listed as failed.

        Names that are already listed keep what they have. Weights are read when they are first needed.
        """
        if self._adapter_dir is None or not self._adapter_dir.is_dir():
            return []
        restored = []
        for row in self._open_vault().catalog.current():
            if row.name in self._reserved_names or self.contains(row.name):
                log.warning("event=stored_adapter_hidden adapter=%s reason=name_taken", row.name)
                continue
            entry = restored_entry(row, self._open_vault().path(row.folder), self._surface)
            self._registry.swap(entry)
            restored.append(self._describe(entry))
        return restored

    def versions(self, name: str) -> Versions:
        """An upload's versions that are still on disk, newest first. Raises `AdapterNotFound`."""
        if self._registry.get(name).version is None:
            return []
        rows = self._open_vault().catalog.versions(name)
        return [VersionInfo(row.digest, row.created, row.is_current) for row in rows]

    def rollback(self, name: str, generation: str) -> AdapterInfo:
        """Point an upload's name to one of its versions. Raises `AdapterNotFound` where there is none such."""
        with self._tally.refusals(), self._name_locks.hold(name):
            previous = self._registry.get(name)
            rows = self._open_vault().catalog.versions(name) if previous.version else []
            row = next((row for row in rows if row.digest == generation), None)
            if row is None:
                raise AdapterNotFound(f"adapter {name!r} has no stored version {generation[:80]!r}", param="generation")
            folder = self._open_vault().path(row.folder)
            with about(name), self._read(name, folder, "upload", row.digest) as content:
                entry = new_entry(name, row.source, folder, content, row.base_model_name)
                entry.version = row.folder
                self._open_vault().catalog.point(name, row.folder)
                self._swap(entry)
        return self._describe(entry)

    def close(self) -> None:
        """Close the catalogue. Adapters in memory stay usable."""
        with self._vault_lock:
            if self._vault is not None:
                self._vault.close()
                self._vault = None

    def list(self) -> Infos:
        """All adapters, in the order in which they came."""
        return [self._describe(entry) for entry in self._registry.entries()]

    # Helpers

    def _check_free(self, name: str, load_inplace: bool) -> None:
        if not load_inplace and self.contains(name):
            raise AdapterExists(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True.",
                param="lora_name",
            )

    def _find(self, path: str | Path) -> Path:
        """The folder behind what the caller gave; the message never shows it."""
        if not str(path):
            raise AdapterFilesNotFound("lora_path is empty; give a folder", param="lora_path")
        try:
            folder = self._locate(str(path)).expanduser()
            is_allowed = self._allowed_roots is None or is_under(folder, self._allowed_roots)
            if is_allowed and folder.is_dir():
                return folder.absolute()
        except (OSError, ValueError, RuntimeError):
            pass
        where = "" if self._allowed_roots is None else " in the folders that adapters may be loaded from"
        raise AdapterFilesNotFound(f"no folder was found at lora_path{where}", param="lora_path")

    @contextmanager
    def _read(self, name: str, folder: Path, kind: str, known_digest: str | None = None) -> Iterator[Generation]:
        """Content of a folder, held in the CPU tier; let go afterwards unless a name points to it by then."""
        generation, load_ms = self._read_files(folder, kind, known_digest)
        try:
            with self._store.add(generation, name, load_ms=load_ms) as handle:
                yield handle.generation
        finally:
            self._registry.settle(generation.digest)

    def _read_files(self, folder: Path, kind: str, known_digest: str | None = None) -> tuple[Generation, float]:
        """Read a folder, listed under `known_digest` before; returns its content and the milliseconds that it took."""
        started = time.perf_counter()
        is_own = self._adapter_dir is not None and is_under(folder, [self._adapter_dir])
        roots = None if is_own else self._allowed_roots
        generation = read_generation(folder, self._surface, allowed_roots=roots, known_digest=known_digest)
        seconds = time.perf_counter() - started
        self._tally.count_load(kind, seconds)
        return generation, seconds * 1000.0

    def _keep(self, name: str, folder: Path, generation: Generation) -> AdapterEntry:
        """Make a checked upload durable, list it in the catalogue, and point the name to it."""
        vault = self._open_vault()
        previous = self._registry.find(name)
        is_pinned = previous is not None and previous.is_pinned
        version = vault.keep(folder)
        entry = new_entry(name, f"upload:{name}", vault.path(version), generation, None)
        entry.version = version
        report = generation.report.to_dict()
        row = CatalogRow(name, version, generation.digest, entry.source, None, report, entry.created, is_pinned)
        try:
            vault.put(row)
        except AdapterStoreFault:
            vault.delete_folders([version])
            raise
        self._swap(entry)
        return entry

    def _swap(self, entry: AdapterEntry, *, is_pinned: bool = False) -> None:
        """Point a name to new content, keeping its pin, and say so in the log."""
        previous = self._registry.find(entry.name)
        entry.is_pinned = is_pinned or (previous is not None and previous.is_pinned)
        previous = self._registry.swap(entry)
        report = entry.report
        assert report is not None, "new content has a report"
        log.info(
            "event=%s adapter=%s generation=%s rank=%d modules=%d target_modules=%s scale=%.6g megabytes=%.1f",
            "adapter_loaded" if previous is None else "adapter_replaced", entry.name, entry.digest, report.rank,
            report.num_modules, ",".join(report.target_modules), report.scale, report.num_bytes / 1e6,
        )  # fmt: skip
        for warning in report.warnings:
            log.warning("event=adapter_warning adapter=%s warning=%r", entry.name, warning)

    def _open_vault(self) -> Vault:
        with self._vault_lock:
            if self._vault is None:
                assert self._adapter_dir is not None, "no adapter folder is configured"
                self._vault = Vault(self._adapter_dir)
            return self._vault

    @contextmanager
    def _incoming(self) -> Iterator[Path]:
        """An empty folder for an upload's files, gone afterwards unless it was kept."""
        if self._adapter_dir is None:
            with tempfile.TemporaryDirectory(prefix="switchboard-") as folder:
                yield Path(folder)
            return
        vault = self._open_vault()
        incoming = vault.new_folder()
        try:
            yield incoming
        finally:
            vault.discard(incoming)

    def _describe(self, entry: AdapterEntry) -> AdapterInfo:
        default_for = sorted(kind for kind, name in self.defaults().items() if name == entry.name)
        if entry.digest is not None and self.residency(entry.digest):
            return entry.describe("gpu", default_for)
        is_in_memory = entry.digest is not None and self._store.contains(entry.digest)
        return entry.describe("cpu" if is_in_memory else "disk", default_for)
