"""Which adapter answers prompts of a modality by itself. Replaced as a whole, so a reader sees one state. Used by `manager`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping


class Defaults:
    """Modality -> adapter name.

    Args:
        on_change: called with the names that are defaults now, while changes wait; it must not block.
    """

    def __init__(self, on_change: Callable[[Collection[str]], None]) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._names: Mapping[str, str] = {}

    def snapshot(self) -> dict[str, str]:
        """A copy."""
        return dict(self._names)

    def modalities_of(self, name: str) -> list[str]:
        """Modalities that an adapter answers, in alphabetical order."""
        return sorted(modality for modality, other in self._names.items() if other == name)

    def set(self, modality: str, name: str | None) -> None:
        """Make an adapter the default of a modality; None takes the default away."""
        with self._lock:
            self._replace({**self._names, modality: name})

    def set_for(self, name: str, modalities: Collection[str]) -> None:
        """Make an adapter the default of exactly these modalities; others that it answered have no default then."""
        with self._lock:
            others = {modality: other for modality, other in self._names.items() if other != name}
            self._replace(others | dict.fromkeys(modalities, name))

    def replace(self, names: Mapping[str, str]) -> None:
        """Make these the defaults, all others none."""
        with self._lock:
            self._replace(names)

    def _replace(self, names: Mapping[str, str | None]) -> None:
        self._names = {modality: name for modality, name in names.items() if name is not None}
        self._on_change(set(self._names.values()))
