"""How content comes under a name: read and checked from a folder, kept on disk where it is an upload, then pointed to.

Whatever can fail comes before the name is pointed to new content. Decides nothing about who may do what to a name, and holds no
lock on names: `manager` does. Owned by `manager`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters.catalog import CatalogRow
from adapters.errors import AdapterRefused, AdapterStoreFault
from adapters.generation import GenerationHandle
from adapters.intake import new_entry
from adapters.located import Located
from adapters.reader import Reader
from adapters.records import AdapterEntry
from adapters.registry import Registry
from adapters.store import GenerationStore
from adapters.vault import VaultDoor

log = logging.getLogger(__name__)


class Arrivals:
    """Brings content in; the arguments are the manager's own parts."""

    def __init__(self, registry: Registry, store: GenerationStore, reader: Reader, door: VaultDoor) -> None:
        self._registry = registry
        self._store = store
        self._reader = reader
        self._door = door

    @contextmanager
    def read(self, name: str, folder: Path, kind: str, *, digest: str | None = None) -> Iterator[GenerationHandle]:
        """Content of a folder, held in the CPU tier for `name`; let go afterwards unless a name points to it by then.

        With `digest`, that content: from memory where something still holds it, else the folder must have it.
        """
        handle = None if digest is None else self._store.borrow(digest, name)
        if handle is None:
            generation, load_ms = self._reader.read(folder, kind, known_digest=digest)
            if digest not in (None, generation.digest):
                raise AdapterRefused(["that version is not in memory any more and its files have changed since"])
            handle = self._store.add(generation, name, load_ms=load_ms)
        try:
            with handle:
                yield handle
        finally:
            self._registry.settle(handle.generation.digest)

    def keep(self, name: str, folder: Path, content: GenerationHandle) -> AdapterEntry:
        """Make a checked upload durable, list it in the catalogue, and point the name to it."""
        vault, generation = self._door.open(), content.generation
        card = self._reader.card(folder)
        previous = self._registry.find(name)
        is_pinned = previous is not None and previous.is_pinned
        version, source = vault.keep(folder), f"upload:{name}"
        entry = new_entry(name, source, Located(vault.path(version), source), generation, card=card)
        entry.version = version
        assert entry.report is not None, "new content has a report"
        report = entry.report.to_dict()
        row = CatalogRow(name, version, generation.digest, entry.source, None, report, entry.created, is_pinned)
        try:
            stale = vault.put(row)
        except AdapterStoreFault:
            vault.delete_folders([version])
            raise
        self.swap(entry, load_ms=content.load_ms)
        # Last: until the swap, evicted content is read from the old folder.
        vault.delete_folders(stale)
        return entry

    def swap(self, entry: AdapterEntry, *, is_pinned: bool = False, load_ms: float) -> None:
        """Point a name to new content, keeping its pin, and say so in the log."""
        previous = self._registry.find(entry.name)
        entry.is_pinned = is_pinned or (previous is not None and previous.is_pinned)
        previous = self._registry.swap(entry)
        self._registry.note_load(entry, load_ms)
        report = entry.report
        assert report is not None, "new content has a report"
        log.info(
            "event=%s adapter=%s generation=%s rank=%d modules=%d target_modules=%s scale=%.6g megabytes=%.1f",
            "adapter_loaded" if previous is None else "adapter_replaced", entry.name, entry.digest, report.rank,
            report.num_modules, ",".join(report.target_modules), report.scale, report.num_bytes / 1e6,
        )  # fmt: skip
        for warning in report.warnings:
            log.warning("event=adapter_warning adapter=%s warning=%r", entry.name, warning)
