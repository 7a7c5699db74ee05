"""What the settings of the Chat tab hold by themselves: defaults, or what the chosen adapter's card asks for.

Owns the rule of who may change a setting: what a person has changed is theirs and stays. Knows nothing of Gradio. Called by
`ui/adapter_panel`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from adapters.card import AdapterCard

Value = float | int | str
CARD_FIELDS = ("system", "temperature", "top_p", "max_tokens")
ARRIVAL_S = 3.0
"""For so long a browser may not show yet what was put there: an adapter chosen and a message sent at once overlap."""


@dataclass
class CardFill:
    """The settings of one browser tab.

    Attributes:
        defaults: setting -> its value without any card.
        put: setting -> the value that was put there last.
        own: settings that a person has changed since.
        filled: settings that hold what the current card says.
        clock: seconds, for tests.
    """

    defaults: dict[str, Value]
    put: dict[str, Value] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    filled: list[str] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    # setting -> what was put over, and when
    _replaced: dict[str, tuple[Value, float]] = field(default_factory=dict)

    def fill(self, current: Mapping[str, Value], card: AdapterCard | None) -> dict[str, Value]:
        """The settings that change, and to what, now that an adapter with this card (None: without) is chosen."""
        wanted = {} if card is None else card_values(card)
        changes: dict[str, Value] = {}
        self.filled = []
        for name, default in self.defaults.items():
            if current[name] != self.put.get(name, default) and not self._is_late(name, current[name]):
                self.own.add(name)
            if name in self.own:
                continue
            self._put(name, wanted.get(name, default))
            if name in wanted:
                self.filled.append(name)
            if current[name] != self.put[name]:
                changes[name] = self.put[name]
        return changes

    def kept_from(self, card: AdapterCard) -> list[str]:
        """Settings that the card would have otherwise, and a person wants as they are."""
        return [name for name in card_values(card) if name in self.own]

    def _put(self, name: str, value: Value) -> None:
        before = self.put.get(name, self.defaults[name])
        if value != before:
            self._replaced[name] = before, self.clock()
        self.put[name] = value

    def _is_late(self, name: str, shown: Value) -> bool:
        """Whether a browser just does not show yet what was put there last."""
        before, at = self._replaced.get(name, (None, 0.0))
        return shown == before and self.clock() - at < ARRIVAL_S

    def let_go(self, current: Mapping[str, Value]) -> None:
        """Forget who changed what: the next `fill` decides on everything."""
        self.own.clear()
        self.put = dict(current)


def card_values(card: AdapterCard) -> dict[str, Value]:
    """Setting -> value, of what a card asks for."""
    values: dict[str, Value | None] = {
        "system": card.system_prompt or None,
        "temperature": card.temperature,
        "top_p": card.top_p,
        "max_tokens": card.max_tokens,
    }
    return {name: value for name, value in values.items() if value is not None}
