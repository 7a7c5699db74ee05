"""The life cycle of adapters by name: load, replace, borrow, unload; uploads that survive a restart.

A name points to a generation; everything that can fail happens before the pointer is swapped. Work on one name is
serialised, content that left memory is read once for all who wait, and borrowing what is in memory waits for neither.
Blocking and thread-safe but for `acquire_soon`: async callers use a thread. Knows nothing of GPU slots or requests
beyond the callables that the engine gives. Used by the engine, the API and the UI.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from adapters.arrivals import Arrivals
from adapters.borrowing import Lender
from adapters.defaults import Defaults
from adapters.errors import (
    AdapterExists,
    AdapterFilesNotFound,
    AdapterStoreFault,
    DefaultStaysPinned,
)
from adapters.files import write_zip
from adapters.following import Following
from adapters.generation import GenerationHandle
from adapters.history import History
from adapters.intake import about, card_of, judge_upload, new_entry, restored_entry
from adapters.located import Located
from adapters.locks import KeyedLocks
from adapters.name_state import NameState
from adapters.names import check_name
from adapters.reader import Reader
from adapters.records import AdapterEntry, AdapterInfo, ManagerStats, VersionInfo
from adapters.registry import Registry
from adapters.slab_pool import SlabPool
from adapters.storage import storage_faults
from adapters.store import GenerationStore
from adapters.surface import ModelSurface
from adapters.tally import Tally
from adapters.upload import UploadFiles, UploadReport, unpack_upload
from adapters.vault import NUM_KEPT_VERSIONS, VaultDoor

__all__ = ["AdapterInfo", "AdapterManager", "ManagerStats", "UploadFiles", "UploadReport", "VersionInfo"]

log = logging.getLogger(__name__)

DEFAULT_MAX_UPLOAD_BYTES = 1 << 30
# What content is called while it is tried out; no adapter may have this name.
UNLISTED_NAME = "(upload)"

# `AdapterManager.list` hides the builtin inside the class body.
Infos = list[AdapterInfo]
Versions = list[VersionInfo]


class AdapterManager:
    """All adapters that the server knows.

    Attributes:
        residency: digest -> whether it is in a GPU slot; set by the engine.
    """

    def __init__(
        self,
        surface: ModelSurface,
        *,
        adapter_dir: Path | None,
        max_cpu_loras: int,
        max_cpu_bytes: int | None = None,
        on_retire: Callable[[str], None] = lambda digest: None,
        reserved_names: Collection[str] = (),
        max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES,
        allowed_roots: Sequence[Path] | None = None,
        locate: Callable[[str], Located] | None = None,
        slabs: SlabPool | None = None,
    ) -> None:
        """`max_cpu_loras` and `max_cpu_bytes` (None: no such bound) limit what stays in CPU memory without being used.

        `on_retire(digest)` is called, without any lock held, when no name points to a generation and no handle holds it
        any more.
        `allowed_roots` limits where `load` may read from; None means anywhere. `locate` turns an address
        that `load` was given into a local folder, fetching it where need be; it may raise `AdapterError`.
        `slabs` is the memory that adapters are read into, closed with the manager; None makes a pool.
        """
        self.residency: Callable[[str], bool] = lambda digest: False
        self._reserved_names = frozenset(reserved_names)
        self._max_upload_bytes = max_upload_bytes
        self._tally = Tally()
        self._door = VaultDoor(adapter_dir)
        self._slabs = slabs or SlabPool(max_bytes=max_cpu_bytes)
        self._reader = Reader(
            surface, locate=locate, allowed_roots=allowed_roots, own_root=adapter_dir, tally=self._tally,
            memory=self._slabs.lend,
        )  # fmt: skip
        self._store = GenerationStore(
            max_cpu_loras,
            max_cpu_bytes,
            note_prompt=lambda *prompt: self._registry.note_prompt(*prompt),
            on_forgotten=on_retire,
        )
        self._registry = Registry(self._store, on_retire, num_kept=NUM_KEPT_VERSIONS)
        self._history = History(self._registry, self._door)
        self._defaults = Defaults(self._registry.set_default_names)
        self._name_locks = KeyedLocks()
        self._arrivals = Arrivals(self._registry, self._store, self._reader, self._door)
        self._lender = Lender(self._registry, self._reader, self._tally)
        self._following = Following(
            self._registry, self._reader, self._arrivals, self._door, self._defaults, self._lender
        )

    # Loading and unloading

    def load(
        self,
        name: str,
        path: str | Path | Located,
        *,
        load_inplace: bool = False,
        base_model_name: str | None = None,
        pinned: bool = False,
        source: str | None = None,
    ) -> AdapterInfo:
        """Read, check and list the adapter at an address; `source` is what lists show instead of `path`.

        Replacing keeps the pin and what the name pointed to as a version that can be gone back to. An upload that is
        replaced stays on disk and comes back with the next start.
        Raises `InvalidAdapterName`, `AdapterExists` (the name is taken and `load_inplace` is off),
        `AdapterFilesNotFound` or `AdapterRefused`; everything is then as it was before.
        """
        with self._tally.refusals():
            check_name(name, self._reserved_names)
            with self._name_locks.hold(name):
                self._check_free(name, load_inplace)
                with (
                    about(name),
                    self._reader.located(path) as located,
                    self._arrivals.read(name, located.folder, "path") as content,
                ):
                    card = self._reader.card(located.folder)
                    entry = new_entry(
                        name, source or located.source, located, content.generation, base_model_name, card=card
                    )
                    self._arrivals.swap(entry, is_pinned=pinned, load_ms=content.load_ms)
        return self._describe(entry)

    def unload(self, name: str) -> None:
        """Forget a name: no new request gets it, running ones finish, an upload's files are deleted.

        Raises `AdapterNotFound`.
        """
        with self._name_locks.hold(name):
            entry = self._registry.get(name)
            stale = self._door.open().catalog.remove(name) if entry.version is not None else []
            self._registry.remove(name)
            if stale:
                self._door.open().delete_folders(stale)
        log.info("event=adapter_unloaded adapter=%s generation=%s", name, entry.digest)

    def delete(self, name: str) -> None:
        """The same as `unload`; files outside the server's own adapter folder are never touched."""
        self.unload(name)

    def pin(self, name: str, is_pinned: bool) -> AdapterInfo:
        """Keep an adapter in CPU memory for good, or no longer.

        Raises `AdapterNotFound`, `DefaultStaysPinned`, or why it cannot be read.
        """
        with self._name_locks.hold(name):
            entry = self._registry.get(name)
            modalities = self._defaults.modalities_of(name)
            if modalities and not is_pinned:
                raise DefaultStaysPinned(
                    f"adapter {name!r} answers {' and '.join(modalities)} by itself and stays pinned for as long; make "
                    "another the default, or none",
                    param="pinned",
                )
            if is_pinned:
                with self.borrow(name):
                    self._registry.set_pinned(entry, True)
            else:
                self._registry.set_pinned(entry, False)
            if self._history.is_stored(name):
                self._door.open().catalog.set_pinned(name, is_pinned)
        return self._describe(entry)

    def defaults(self) -> dict[str, str]:
        """Modality -> name of the adapter that answers such prompts by itself, whether it still exists or not."""
        return self._defaults.snapshot()

    def set_default(self, modality: str, name: str | None) -> None:
        """Let an adapter answer a modality by itself, or none. It is pinned for as long as it does.

        Raises `AdapterNotFound`, or why it cannot be read; the default is then what it was.
        """
        if name is None:
            self._defaults.set(modality, None)
            return
        with self.borrow(name):
            self._defaults.set(modality, name)

    def set_default_for(self, name: str, modalities: Collection[str]) -> AdapterInfo:
        """Let an adapter answer exactly these modalities by itself; raises what `set_default` raises."""
        if modalities:
            with self.borrow(name):
                self._defaults.set_for(name, modalities)
        else:
            self._registry.get(name)
            self._defaults.set_for(name, ())
        return self.get(name)

    # Borrowing

    def acquire(self, name: str) -> GenerationHandle:
        """Borrow what the name points to now, reading it again if it left CPU memory.

        Raises `AdapterNotFound`; `AdapterRefused` or `AdapterFilesNotFound` where the files are gone or have changed.
        """
        return self.acquire_soon(name).result()

    def acquire_soon(self, name: str) -> Future[GenerationHandle]:
        """What `acquire` gives, as a future that is done already where the content is in memory. Never blocks.

        Whoever gets the handle must release it; a future that is cancelled before it is done gives none.
        """
        return self._lender.borrow_soon(name, is_request=True)

    def borrow_soon(self, name: str) -> Future[GenerationHandle]:
        """The same, not counted as a request."""
        return self._lender.borrow_soon(name, is_request=False)

    def borrow(self, name: str) -> GenerationHandle:
        """What `acquire` gives, not counted as a request."""
        return self._lender.borrow(name)

    # Looking

    def export(self, name: str, target: IO[bytes]) -> None:
        """Write the files of what a name points to as a zip.

        Raises:
            AdapterNotFound: no adapter has the name.
            AdapterFilesNotFound: its files are no longer there.
        """
        located = self._registry.get(name).located
        try:
            write_zip(located.folder, target)
        except OSError as error:
            raise AdapterFilesNotFound(f"The files of adapter {name!r} cannot be read: {error.strerror}.") from error

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
        usage = self._store.usage()
        entries = self._registry.entries()
        return ManagerStats(
            num_adapters=len(entries),
            num_failed=sum(entry.error is not None for entry in entries),
            num_cpu=usage.num_resident,
            cpu_bytes=usage.num_bytes,
            max_cpu_loras=self._store.capacity,
            max_cpu_bytes=self._store.max_bytes,
            spare_bytes=self._slabs.usage().idle_bytes,
            num_pinned=usage.num_pinned,
            evictions=self._store.evictions,
            **self._tally.snapshot(),
        )

    def check_integrity(self) -> None:
        """Assert what must hold whenever no call is in progress."""
        self._store.check_integrity()
        self._slabs.check_integrity()
        self._registry.check_integrity()
        self._lender.check_integrity()
        assert len(self._name_locks) == 0, "a lock outlived its users"

    # Uploads

    def inspect_upload(self, files: UploadFiles) -> UploadReport:
        """Judge an upload as `install_upload` would, and keep nothing."""
        with self.examine_upload(files) as (report, _):
            return report

    @contextmanager
    def examine_upload(self, files: UploadFiles) -> Iterator[tuple[UploadReport, GenerationHandle | None]]:
        """The same, with the content to try out where it is good: it has no name, and is let go afterwards."""
        with self._door.incoming() as folder:
            report, generation = judge_upload(
                files, folder, self._reader.surface, max_bytes=self._max_upload_bytes, memory=self._slabs.lend
            )
        if generation is None:
            yield report, None
            return
        try:
            with self._store.add(generation, UNLISTED_NAME) as handle:
                yield report, handle
        finally:
            self._registry.settle(generation.digest)

    def install_upload(self, name: str, files: UploadFiles, *, load_inplace: bool = False) -> AdapterInfo:
        """Store an uploaded adapter for good and list it.

        Raises `UploadTooLarge`, `UploadRefused`, and what `load` raises; nothing is kept then.
        """
        with self._tally.refusals():
            check_name(name, self._reserved_names, param="name")
            self._check_free(name, load_inplace)
            if self._door.root is None:
                raise AdapterStoreFault("uploads are switched off: this server has no --adapter-dir")
            with self._door.incoming() as folder:
                unpack_upload(files, folder, max_bytes=self._max_upload_bytes)
                with self._name_locks.hold(name):
                    self._check_free(name, load_inplace)
                    with (
                        about(name),
                        self._arrivals.read(name, folder, "upload") as content,
                        storage_faults("uploads"),
                    ):
                        entry = self._arrivals.keep(name, folder, content)
        return self._describe(entry)

    def restore(self) -> Infos:
        """List the stored adapters again after a restart; one that can no longer be served is listed as failed.

        Names that are already listed keep what they have. Weights are read when they are first needed.
        """
        if self._door.root is None or not self._door.root.is_dir():
            return []
        restored = []
        for row in self._door.open().catalog.current():
            if row.name in self._reserved_names or self.contains(row.name):
                log.warning("event=stored_adapter_hidden adapter=%s reason=name_taken", row.name)
                continue
            entry = restored_entry(row, self._door.open().path(row.folder), self._reader.surface)
            self._registry.swap(entry)
            restored.append(self._describe(entry))
        return restored

    def versions(self, name: str) -> Versions:
        """What a name points to and what it can be rolled back to, newest first. Raises `AdapterNotFound`."""
        return self._history.versions(name)

    def rollback(self, name: str, generation: str) -> AdapterInfo:
        """Point a name to one of its `versions`; the pin stays.

        Raises `AdapterNotFound` where there is none such, `AdapterFilesNotFound` or `AdapterRefused` where its files are
        gone or hold other content by now; the name then points to what it did.
        """
        with self._tally.refusals(), self._name_locks.hold(name):
            target = self._history.find(name, generation)
            if not self._registry.is_current(target):
                kind = "path" if target.version is None else "upload"
                with about(name), self._arrivals.read(name, target.folder, kind, digest=generation) as content:
                    card = card_of(target.report) if target.report else self._reader.card(target.folder)
                    entry = new_entry(
                        name, target.source, target.located, content.generation, target.base_model_name, card=card
                    )
                    entry.version = target.version
                    if entry.version is not None:
                        self._door.open().catalog.point(name, entry.version)
                    self._arrivals.swap(entry, load_ms=content.load_ms)
        return self.get(name)

    # Other processes

    def state_of(self, name: str) -> NameState:
        """What a name means here, for another process to `follow`; a name that is gone has a state too.

        `DEFAULTS` in place of a name: which adapters answer by themselves here.
        """
        return self._following.state_of(name)

    def follow(self, state: NameState) -> None:
        """Make a name mean what another process has made it mean; the adapter folder is not written to.

        Raises `AdapterFilesNotFound` or `AdapterRefused`; the name then means what it did.
        """
        with self._name_locks.hold(state.name):
            self._following.apply(state)

    def close(self) -> None:
        """Close the catalogue, and give spare memory back. Adapters in memory stay usable."""
        self._lender.close()
        self._door.close()
        self._slabs.close()

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

    def _describe(self, entry: AdapterEntry) -> AdapterInfo:
        default_for = self._defaults.modalities_of(entry.name)
        if entry.digest is not None and self.residency(entry.digest):
            return entry.describe("gpu", default_for)
        is_in_memory = entry.digest is not None and self._store.contains(entry.digest)
        return entry.describe("cpu" if is_in_memory else "disk", default_for)
