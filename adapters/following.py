"""Makes a name mean here what it means in another process that shares this one's adapter folder.

Owns how a registry is brought to a `NameState`. Never writes to the folder or the catalogue: who made
the change has done that. Decides nothing and holds no lock on names: `manager` does. Owned by `manager`.
"""

from __future__ import annotations

from adapters.arrivals import Arrivals
from adapters.errors import AdapterFilesNotFound
from adapters.intake import about, new_entry, restored_entry
from adapters.name_state import NameState
from adapters.reader import Reader
from adapters.records import AdapterEntry
from adapters.registry import Registry
from adapters.vault import VaultDoor


class Following:
    """Brings names to a state; the arguments are the manager's own parts."""

    def __init__(self, registry: Registry, reader: Reader, arrivals: Arrivals, door: VaultDoor) -> None:
        self._registry = registry
        self._reader = reader
        self._arrivals = arrivals
        self._door = door

    def state_of(self, name: str, default_for: tuple[str, ...]) -> NameState:
        """What the name means here."""
        entry = self._registry.find(name)
        if entry is None:
            return NameState(name)
        return NameState(
            name,
            entry.digest,
            entry.source,
            entry.base_model_name,
            is_stored=entry.version is not None,
            is_pinned=entry.is_pinned,
            default_for=default_for,
        )

    def apply(self, state: NameState) -> None:
        """Point the name to that content, or take it away. What can fail comes first: the name then means what it did.

        Raises `AdapterFilesNotFound` or `AdapterRefused` where the files are not there, or hold other content.
        """
        entry = self._registry.find(state.name)
        if state.generation is None:
            if entry is not None:
                self._registry.remove(state.name)
            return
        if entry is None or entry.digest != state.generation:
            entry = self._stored(state) if state.is_stored else self._loaded(state)
        if entry.is_pinned != state.is_pinned:
            self._registry.set_pinned(entry, state.is_pinned)

    def _stored(self, state: NameState) -> AdapterEntry:
        vault = self._door.open()
        for row in vault.catalog.versions(state.name):
            if row.is_current and row.digest == state.generation:
                entry = restored_entry(row, vault.path(row.folder), self._reader.surface)
                if entry.error is not None:
                    raise entry.error
                self._registry.swap(entry)
                return entry
        raise AdapterFilesNotFound(
            f"The adapter folder does not list that content of {state.name!r} as its current one."
        )

    def _loaded(self, state: NameState) -> AdapterEntry:
        with (
            about(state.name),
            self._reader.located(state.source) as located,
            self._arrivals.read(state.name, located.folder, "path", digest=state.generation) as content,
        ):
            card = self._reader.card(located.folder)
            entry = new_entry(state.name, state.source, located, content.generation, state.base_model_name, card=card)
            self._arrivals.swap(entry, is_pinned=state.is_pinned, load_ms=content.load_ms)
        return entry
