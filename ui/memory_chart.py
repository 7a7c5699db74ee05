"""Where adapters lie, tier by tier, as bars of escaped HTML. Called by `ui/adapters`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ui.receipt import hue_of
from ui.text import Texts

if TYPE_CHECKING:
    from adapters.records import AdapterInfo
    from engine.engine import EngineStats

# An adapter in a batch slot lies in CPU memory too.
TIERS = {"gpu": ("gpu",), "cpu": ("gpu", "cpu"), "disk": ("disk",)}


def memory_html(text: Texts, adapters: Sequence[AdapterInfo], stats: EngineStats | None) -> str:
    """A bar for each tier, as long as its bytes, with a stretch for each adapter.

    Without `stats`, which count all adapters of the server, the notes count those that are shown.
    """
    by_tier = {tier: [info for info in adapters if info.state in states] for tier, states in TIERS.items()}
    by_tier |= {tier: once_each(by_tier[tier]) for tier in ("gpu", "cpu")}
    longest = max((_num_bytes(infos) for infos in by_tier.values()), default=0) or 1
    notes = {"disk": text("memory.disk_note")}
    if stats is None:
        notes |= {tier: text("memory.count", count=len(by_tier[tier])) for tier in ("gpu", "cpu")}
    else:
        notes["gpu"] = text("memory.rows", used=stats.lora_rows_used, total=stats.lora_rows_total)
        notes["cpu"] = _cpu_note(text, stats)
    rows = "".join(_tier(text, tier, infos, longest, notes[tier]) for tier, infos in by_tier.items())
    return f"<section class='memory'><h2>{escape(text('memory.title'))}</h2><dl>{rows}</dl></section>"


def once_each(adapters: Sequence[AdapterInfo]) -> list[AdapterInfo]:
    """One adapter for each content: in memory, names with equal content share it."""
    return list({info.generation or info.name: info for info in adapters}.values())


def _num_bytes(infos: Sequence[AdapterInfo]) -> int:
    return sum(info.num_bytes for info in infos)


def _cpu_note(text: Texts, stats: EngineStats) -> str:
    manager = stats.adapters
    if manager.max_cpu_bytes is not None:
        return text("memory.cpu_bytes", count=manager.num_cpu, limit=text.size(manager.max_cpu_bytes))
    return text("memory.cpu_count", count=manager.num_cpu, limit=manager.max_cpu_loras)


def _tier(text: Texts, tier: str, infos: Sequence[AdapterInfo], longest: int, note: str) -> str:
    largest_first = sorted(infos, key=lambda info: -info.num_bytes)
    stretches = "".join(
        f"<i class='{hue_of(info.name)}' style='width:{100 * info.num_bytes / longest:.2f}%' "
        f"title='{escape(info.name)}: {escape(text.size(info.num_bytes))}'></i>"
        for info in largest_first
    )
    names = ", ".join(info.name for info in largest_first)
    words = escape(f"{text(f'memory.{tier}')}: {text.size(_num_bytes(infos))}. {names}")
    return (
        f"<div data-tier='{tier}'><dt>{escape(text(f'memory.{tier}'))}</dt>"
        f"<dd><span class='bar' role='img' aria-label='{words}'>{stretches}</span>"
        f"<span class='quiet'><b>{escape(text.size(_num_bytes(infos)))}</b> {escape(note)}</span></dd></div>"
    )
