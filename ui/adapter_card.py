"""What the Chat tab shows of the adapter that is chosen for the next message, as escaped HTML. Called by `ui/chat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from adapters.card import AdapterCard
from engine.routing import AUTO, NONE
from ui.receipt import mark_html, short_digest
from ui.text import Texts

if TYPE_CHECKING:
    from adapters.records import AdapterInfo


def rule_html(text: Texts, lora: str, defaults: Mapping[str, str]) -> str:
    """What happens with `auto` or `none`, in a sentence."""
    if lora == NONE:
        return _sentence(text("card.none"))
    assert lora == AUTO
    rules = [
        text("card.rule_next" if place else "card.rule", media=text.media([media]), name=name)
        for place, (media, name) in enumerate(sorted(defaults.items()))
    ]
    return _sentence(text("card.auto", rules="; ".join(rules)) if rules else text("card.auto_empty"))


def _sentence(words: str) -> str:
    return f"<p class='quiet'>{escape(words)}</p>"


def card_of(info: AdapterInfo | None) -> AdapterCard | None:
    """The card that the adapter brought along."""
    card = None if info is None else info.report.get("card")
    return None if card is None else AdapterCard.from_dict(card)


def adapter_card_html(text: Texts, info: AdapterInfo, *, filled: Sequence[str] = (), kept: Sequence[str] = ()) -> str:
    """The facts of one adapter; what is wrong with it stands first.

    `filled` are the settings that its own card has filled in, `kept` those that a person wants otherwise.
    """
    if info.error is not None:
        return f"<p class='trouble'>{escape(info.error)}</p>"
    own = card_of(info)
    facts = [
        ("generation", short_digest(info.generation)),
        ("rank", text("card.rank_value", rank=info.rank, scale=f"{info.scale:g}")),
        ("modules", text("card.modules_value", count=info.num_modules, names=", ".join(info.target_modules))),
        ("size", text.size(info.num_bytes)),
        ("base", info.report.get("base_model") or ""),
        ("license", own.license if own else ""),
        ("default_for", text.media(info.default_for)),
        ("requests", str(info.num_requests)),
    ]
    cells = "".join(
        f"<div><dt>{escape(text(f'card.{key}'))}</dt><dd>{escape(value)}</dd></div>" for key, value in facts if value
    )
    listed = f"<dl>{cells}</dl>"
    if own is not None:  # What the author says comes first, and the settings below stay in sight.
        listed = f"<details><summary>{escape(text('card.details'))}</summary>{listed}</details>"
    return (
        f"<section class='adapter-card' aria-label='{escape(info.name)}'><p class='answered-by'>{mark_html(info.name)}"
        f"<strong>{escape(info.name)}</strong><span class='chip plain'>{escape(text(f'adapters.state.{info.state}'))}</span>"
        f"</p>{_own_words(text, own, filled, kept)}{listed}</section>"
    )


def _own_words(text: Texts, card: AdapterCard | None, filled: Sequence[str], kept: Sequence[str]) -> str:
    """What the adapter's author says of it, with prompts to try and what became of the settings."""
    if card is None:
        return ""
    parts = [f"<p class='about'>{escape(card.description)}</p>"] if card.description else []
    if filled:
        parts.append(_sentence(text("card.filled", settings=_settings(text, filled))))
    if kept:
        take = f"<button type='button' class='link' data-act='take_card'>{escape(text('card.take'))}</button>"
        parts.append(f"<p class='quiet'>{escape(text('card.kept', settings=_settings(text, kept)))} {take}</p>")
    if card.examples:
        buttons = "".join(
            f"<button type='button' class='plain' data-prompt='{escape(example.prompt)}'>{escape(example.title)}</button>"
            for example in card.examples
        )
        heading = escape(text("card.examples"))
        parts.append(f"<div class='prompts' role='group' aria-label='{heading}'><h3>{heading}</h3>{buttons}</div>")
    return "".join(parts)


def _settings(text: Texts, names: Sequence[str]) -> str:
    return ", ".join(text(f"card.setting.{name}") for name in names)
