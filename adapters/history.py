"""The versions of a name: what it points to, stored uploads, and earlier loads whose files are somebody else's.

A view over the registry and the catalogue; owns nothing. Used by `manager`.
"""

from __future__ import annotations

from adapters.catalog import CatalogRow
from adapters.errors import AdapterNotFound
from adapters.records import AdapterEntry, VersionInfo
from adapters.registry import Registry
from adapters.vault import VaultDoor


class History:
    """Finds versions by name and digest."""

    def __init__(self, registry: Registry, door: VaultDoor) -> None:
        self._registry = registry
        self._door = door

    def versions(self, name: str) -> list[VersionInfo]:
        """What a name points to and pointed to, newest first. Raises `AdapterNotFound`."""
        current = self._registry.get(name)
        # The current one first: it is the one to show where an older catalogue lists its content twice.
        stored: dict[str, CatalogRow] = {}
        for row in sorted(self._rows(name), key=lambda row: row.folder != current.version):
            stored.setdefault(row.digest, row)
        found = [
            VersionInfo(
                row.digest,
                row.created,
                is_current=row.folder == current.version or row.digest == current.digest,
                is_stored=True,
                source=row.source,
            )
            for row in stored.values()
        ]
        for entry in [current, *self._registry.earlier(name)]:
            if entry.digest is not None and entry.digest not in stored:
                is_current = entry is current
                found.append(VersionInfo(entry.digest, entry.created, is_current, is_stored=False, source=entry.source))
        return sorted(found, key=lambda version: version.created, reverse=True)

    def find(self, name: str, generation: str) -> AdapterEntry:
        """The version of a name that has this content, the current one included. Raises `AdapterNotFound`."""
        current = self._registry.get(name)
        if current.digest == generation:
            return current
        for row in self._rows(name):
            if row.digest == generation:
                folder = self._door.open().path(row.folder)
                return AdapterEntry(
                    name, row.source, folder, row.created, base_model_name=row.base_model_name, version=row.folder
                )
        for entry in self._registry.earlier(name):
            if entry.digest == generation:
                return entry
        raise AdapterNotFound(
            f"adapter {name!r} has no version {generation[:80]!r}; GET /v1/adapters/{name} lists those that there are",
            param="generation",
        )

    def is_stored(self, name: str) -> bool:
        """Whether the catalogue lists the name, be it that something else answers to it now."""
        return bool(self._rows(name))

    def _rows(self, name: str) -> list[CatalogRow]:
        root = self._door.root
        return [] if root is None or not root.is_dir() else self._door.open().catalog.versions(name)
