"""Makes a name mean here what it means in another process that shares this one's adapter folder.

Owns how a registry is brought to a `NameState`. Never writes to the folder or the catalogue: who made
the change has done that. Decides nothing and holds no lock on names: `manager` does. Owned by `manager`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from adapters.arrivals import Arrivals
from adapters.borrowing import Lender
from adapters.defaults import Defaults
from adapters.errors import AdapterFilesNotFound
from adapters.intake import about, new_entry, restored_entry
from adapters.name_state import DEFAULTS, NameState
from adapters.reader import Reader
from adapters.records import AdapterEntry
from adapters.registry import Registry
from adapters.vault import VaultDoor


class Following:
    """Brings names to a state; the arguments are the manager's own parts."""

    def __init__(
        self,
        registry: Registry,
        reader: Reader,
        arrivals: Arrivals,
        door: VaultDoor,
        defaults: Defaults,
        lender: Lender,
    ) -> None:
        self._registry = registry
        self._reader = reader
        self._arrivals = arrivals
        self._door = door
        self._defaults = defaults
        self._lender = lender

    def state_of(self, name: str) -> NameState:
        """What the name, or `DEFAULTS`, means here."""
        if name == DEFAULTS:
            return NameState(DEFAULTS, defaults=tuple(sorted(self._defaults.snapshot().items())))
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
        )

    def apply(self, state: NameState) -> None:
        """Point the name to that content, or take it away. What can fail comes first: the name then means what it did.

        Raises `AdapterFilesNotFound` or `AdapterRefused` where the files are not there, or hold other content.
        """
        if state.name == DEFAULTS:
            self._answer_by_themselves(dict(state.defaults))
            return
        entry = self._registry.find(state.name)
        if state.generation is None:
            if entry is not None:
                self._registry.remove(state.name)
            return
        if entry is None or not self._is_same(entry, state):
            entry = self._stored(state) if state.is_stored else self._loaded(state)
        if entry.is_pinned != state.is_pinned:
            self._registry.set_pinned(entry, state.is_pinned)

    def _answer_by_themselves(self, names: Mapping[str, str]) -> None:
        """Names that are not here yet, or not any more, are defaults too: a prompt is then told so."""
        with ExitStack() as stack:
            for name in sorted(set(names.values()) - set(self._defaults.snapshot().values())):
                if self._registry.find(name) is not None:
                    stack.enter_context(self._lender.borrow(name))
            self._defaults.replace(names)

    def _is_same(self, entry: AdapterEntry, state: NameState) -> bool:
        """Whether a name has that content from those very files: others may outlive them."""
        if entry.digest != state.generation or (entry.version is not None) != state.is_stored:
            return False
        if not state.is_stored:
            return entry.source == state.source
        rows = self._door.open().catalog.versions(state.name)
        return any(row.is_current and row.folder == entry.version for row in rows)

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
