"""What the Chat tab shows of the adapter that is chosen for the next message, as escaped HTML. Called by `ui/chat`."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

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
    rules = [text("card.rule", media=media, name=name) for media, name in sorted(defaults.items())]
    return _sentence(text("card.auto", rules="; ".join(rules)) if rules else text("card.auto_empty"))


def _sentence(words: str) -> str:
    return f"<p class='quiet'>{escape(words)}</p>"


def adapter_card_html(text: Texts, info: AdapterInfo) -> str:
    """The facts of one adapter; what is wrong with it stands first."""
    if info.error is not None:
        return f"<p class='trouble'>{escape(info.error)}</p>"
    facts = [
        ("generation", short_digest(info.generation)),
        ("rank", text("card.rank_value", rank=info.rank, scale=f"{info.scale:g}")),
        ("modules", text("card.modules_value", count=info.num_modules, names=", ".join(info.target_modules))),
        ("size", text.size(info.num_bytes)),
        ("base", info.report.get("base_model") or ""),
        ("default_for", text("receipt.and").join(info.default_for)),
        ("requests", str(info.num_requests)),
    ]
    cells = "".join(
        f"<div><dt>{escape(text(f'card.{key}'))}</dt><dd>{escape(value)}</dd></div>" for key, value in facts if value
    )
    return (
        f"<section class='adapter-card' aria-label='{escape(info.name)}'><p class='answered-by'>{mark_html(info.name)}"
        f"<strong>{escape(info.name)}</strong><span class='chip plain'>{escape(text(f'adapters.state.{info.state}'))}</span>"
        f"</p><dl>{cells}</dl></section>"
    )
