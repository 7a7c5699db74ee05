"""An adapter's card fills the settings, what a person has set stays, and going elsewhere takes the card's values back."""

from __future__ import annotations

from adapters.card import AdapterCard
from ui.card_fill import ARRIVAL_S, CardFill, Value

DEFAULTS: dict[str, Value] = {"system": "", "temperature": 0, "top_p": 1, "max_tokens": 96}
SQL = AdapterCard(system_prompt="One query.", temperature=0.5)
PIRATE = AdapterCard(temperature=0.7, max_tokens=12)


class Panel:
    """Settings as a browser shows them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fill = CardFill(dict(DEFAULTS), clock=lambda: self.now)
        self.shown = dict(DEFAULTS)

    def choose(self, card: AdapterCard | None) -> dict[str, Value]:
        self.shown |= self.fill.fill(self.shown, card)
        self.now += ARRIVAL_S
        return {name: value for name, value in self.shown.items() if value != DEFAULTS[name]}


def test_each_card_replaces_what_the_one_before_filled_in() -> None:
    panel = Panel()
    assert panel.choose(SQL) == {"system": "One query.", "temperature": 0.5}
    assert panel.fill.filled == ["system", "temperature"]
    assert panel.choose(PIRATE) == {"temperature": 0.7, "max_tokens": 12}
    assert panel.choose(None) == {} and panel.fill.filled == []


def test_what_a_person_set_stays_before_and_after_a_card() -> None:
    panel = Panel()
    panel.shown["system"] = "Mine."
    assert panel.choose(SQL) == {"system": "Mine.", "temperature": 0.5}
    assert panel.fill.kept_from(SQL) == ["system"]
    panel.shown["temperature"] = 0  # by hand, and it happens to be the default
    assert panel.choose(PIRATE) == {"system": "Mine.", "max_tokens": 12}
    assert panel.choose(None) == {"system": "Mine."}


def test_the_cards_own_values_come_when_they_are_asked_for() -> None:
    panel = Panel()
    panel.shown["system"] = "Mine."
    panel.choose(SQL)
    panel.fill.let_go(panel.shown)
    assert panel.choose(SQL) == {"system": "One query.", "temperature": 0.5} and panel.fill.kept_from(SQL) == []
    assert panel.choose(None) == {}


def test_a_message_sent_before_the_card_s_values_arrived_makes_nothing_a_persons_own() -> None:
    panel = Panel()
    chosen = panel.fill.fill(panel.shown, SQL)
    sent = panel.fill.fill(panel.shown, SQL)
    assert chosen == sent == {"system": "One query.", "temperature": 0.5}, "the message has them too"
    panel.shown |= chosen
    assert panel.choose(None) == {} and not panel.fill.own


def test_a_card_s_value_that_a_person_takes_out_again_stays_out() -> None:
    panel = Panel()
    panel.choose(SQL)
    panel.shown["system"] = ""
    assert panel.choose(SQL) == {"temperature": 0.5} and panel.fill.kept_from(SQL) == ["system"]
