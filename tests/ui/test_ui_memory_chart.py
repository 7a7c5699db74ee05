"""Adapters of equal content lie in memory once, whatever they are called, and are counted once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ui.adapter_table import figures_html
from ui.memory_chart import memory_html
from ui.text import Texts


def adapter(name: str, content: str, state: str = "gpu") -> Any:
    """What the chart and the figures read of an adapter of a million bytes."""
    return SimpleNamespace(name=name, generation=content, state=state, num_bytes=1_000_000, num_requests=2)


def test_two_names_of_one_content_are_counted_once_in_memory() -> None:
    shown = [adapter("pirate", "sha256:a"), adapter("corsair", "sha256:a"), adapter("sql", "sha256:b", "cpu")]
    drawn = memory_html(Texts(), shown, None)
    gpu, cpu = (drawn.split(f"data-tier='{tier}'")[1].split("</div>")[0] for tier in ("gpu", "cpu"))
    assert "<b>1.0 MB</b>" in gpu and "<b>2.0 MB</b>" in cpu
    figures = figures_html(Texts(), shown, num_slots=8)
    assert "<dd>3 <small>" in figures and "<dd>1 <small>of 8" in figures and "<dd>2.0 MB <small>" in figures
