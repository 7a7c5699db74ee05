"""The Status tab: what the engine does now and did in the last minutes, how it is set up, and how programs ask it.

Owns the components and their thin callbacks. Plots are drawn by `ui/plots` from `ui/samples`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

import gradio as gr

from engine.engine import EngineStats
from engine.routing import AUTO, NONE
from ui.page import DIRECT, Page
from ui.plots import Point, Series, plot_html, round_up
from ui.receipt import hue_of
from ui.samples import WINDOW_S, Sample, Samples
from ui.snippets import snippets_html
from ui.text import Texts

REFRESH_S = 2
BASE = "base"  # the base model's name in batches
Update = dict[Any, Any]


class StatusTab:
    """Builds the tab's components and answers their events."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def build(self) -> None:
        """Create the components inside the current tab, then connect them."""
        label = self._page.label
        bare: dict[str, Any] = {"padding": False, "apply_default_css": False}
        self.figures = gr.HTML("", elem_id="status-figures", **bare)
        self.plots = gr.HTML("", elem_id="status-plots", **bare)
        with gr.Row(elem_id="status-row", equal_height=False):
            with gr.Column(scale=4, min_width=300):
                self.setup = gr.HTML("", elem_id="status-setup", **bare)
            with gr.Column(scale=6, min_width=320):
                self.adapter = gr.Dropdown(
                    [(AUTO, AUTO)], value=AUTO, label=label("status.ask_for"), info=label("status.ask_for_info"),
                    filterable=False, elem_id="status-adapter",
                )  # fmt: skip
                self.snippets = gr.HTML("", elem_id="status-snippets", **bare)
        self.timer = gr.Timer(REFRESH_S, active=False)
        self.adapter.change(self.write_snippets, self.adapter, self.snippets, **DIRECT)
        self.timer.tick(self.refresh, None, [self.figures, self.plots], **DIRECT)

    def load(self, blocks: gr.Blocks) -> None:
        """Nothing happens here when the page is opened."""

    def watch(self, selected: gr.Tab, others: Sequence[gr.Tab]) -> None:
        """Refresh while the tab is open."""
        live = [self.figures, self.plots]
        selected.select(self.refresh, None, live, **DIRECT).then(
            self.show_setup, self.adapter, [self.setup, self.adapter, self.snippets], **DIRECT
        ).then(lambda: gr.Timer(active=True), None, self.timer, **DIRECT)
        for other in others:
            other.select(lambda: gr.Timer(active=False), None, self.timer, **DIRECT)

    async def refresh(self, request: gr.Request) -> Update:
        """Figures and plots as things stand."""
        service = self._page.service_for(request)
        stats, adapters = service.stats(), await service.list_adapters()
        self._page.samples.take(stats)
        text, samples = self._page.words(request), self._page.samples
        sees_all = service.caller.sees_all
        num_requests = None if sees_all else sum(info.num_requests for info in adapters)
        return {
            self.figures: figures_html(text, stats, samples, num_requests),
            self.plots: plots_html(text, samples, {info.name for info in adapters}, sees_all=sees_all),
        }

    async def show_setup(self, chosen: str, request: gr.Request) -> Update:
        """What changes rarely: the set-up, and the adapters to choose from."""
        text = self._page.words(request)
        choices = [(text("chat.auto"), AUTO), (text("chat.base"), NONE)]
        choices += [(name, name) for name in await self._page.adapter_names(request)]
        value = chosen if any(chosen == each for _, each in choices) else AUTO
        return {
            self.setup: setup_html(text, self._page, self._links(request)),
            self.adapter: gr.update(choices=choices, value=value),
            self.snippets: self.write_snippets(value, request),
        }

    def _links(self, request: gr.Request) -> dict[str, str]:
        """What this visitor may read beside the page: metrics tell of every adapter."""
        sees_all = self._page.service_for(request).caller.sees_all
        return {key: path for key, path in self._page.links.items() if sees_all or key != "metrics"}

    def write_snippets(self, lora: str, request: gr.Request) -> str:
        """How a program asks for this choice; an adapter that audio picks by itself is asked with a recording."""
        service = self._page.service
        return snippets_html(
            self._page.words(request),
            service.engine.model_names[0],
            lora,
            needs_key=service.settings.has_credentials,
            is_speech=service.engine.default_mm_loras.get("audio") == lora,
        )


def figures_html(text: Texts, stats: EngineStats, samples: Samples, num_requests: int | None = None) -> str:
    """The four figures on top; with `num_requests`, that one alone: how many went to the visitor's adapters."""
    if num_requests is not None:
        return _figures_list(text, [("requests", str(num_requests), text("status.requests_of"))])
    recent = samples.recent()
    speed = recent[-1].tokens_per_s if recent else 0.0
    share = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    finished = sum(stats.num_finished.values())
    cells = [
        ("running", str(stats.num_running), text("status.waiting", count=stats.num_waiting)),
        ("speed", f"{speed:.0f}", text("status.tokens_s")),
        ("kv", f"{share:.0%}", text("status.kv_of", used=stats.kv_blocks_used, total=stats.kv_blocks_total)),
        ("finished", str(finished), text("status.tokens_total", count=f"{stats.generated_tokens:,}")),
    ]
    return _figures_list(text, cells)


def _figures_list(text: Texts, cells: Sequence[tuple[str, str, str]]) -> str:
    shown = "".join(
        f"<div><dt>{escape(text(f'status.{key}'))}</dt><dd>{escape(value)} <small>{escape(note)}</small></dd></div>"
        for key, value, note in cells
    )
    return f"<dl class='figures'>{shown}</dl>"


def plots_html(text: Texts, samples: Samples, known: Collection[str], *, sees_all: bool = True) -> str:
    """The plots of the last minutes; adapters that are not `known` any more have no names.

    Where the visitor does not see all, only the requests to `known` adapters are drawn: what the whole server does is made of
    others' requests too.
    """
    recent = samples.recent()
    common = {"span": text("status.ago", minutes=int(WINDOW_S // 60)), "empty": text("status.no_samples")}
    batch = _batch_plot(text, recent, known, common, sees_all=sees_all)
    if not sees_all:
        return f"<div class='plots'>{batch}</div>"
    last = recent[-1] if recent else None
    speed = _points(recent, [sample.tokens_per_s for sample in recent])
    top = round_up(max((value for _, value in speed), default=0.0))
    latencies = [(_place(at), seconds) for at, seconds in samples.latencies()]
    slowest = round_up(max((seconds for _, seconds in latencies), default=0.0))
    shown = [
        plot_html(
            text("status.plot.speed"), text("receipt.speed", speed=f"{last.tokens_per_s if last else 0:.0f}"),
            [Series(text("status.plot.speed"), speed)], kind="line", top=top, top_label=f"{top:g}", **common,
        ),
        batch,
        plot_html(
            text("status.plot.kv"), f"{last.kv_share if last else 0:.0%}",
            [Series(text("status.plot.kv"), _points(recent, [sample.kv_share for sample in recent]))],
            kind="line", top=1.0, top_label="100%", **common,
        ),
        plot_html(
            text("status.plot.first"), text.duration(latencies[-1][1]) if latencies else "",
            [Series(text("status.plot.first"), latencies)], kind="dots", top=slowest,
            top_label=text.duration(slowest), span=common["span"], empty=text("status.no_answers"),
        ),
        _moves_plot(text, recent, common),
    ]  # fmt: skip
    return f"<div class='plots'>{''.join(shown)}</div>"


def _batch_plot(
    text: Texts, recent: Sequence[Sample], known: Collection[str], common: dict[str, str], *, sees_all: bool
) -> str:
    """Requests in the latest batch, by adapter, one upon the other."""
    running = {name for sample in recent for name in sample.batch}
    groups = {name: {name} for name in sorted(running.intersection(known))}
    if sees_all:
        others = running.difference(known, {BASE})
        groups = {text("receipt.base"): {BASE}, **groups, text("status.others"): others}
    counts = [
        float(sum(count for name, count in sample.batch.items() if any(name in names for names in groups.values())))
        for sample in recent
    ]
    series = [
        Series(
            title,
            _points(recent, [float(sum(sample.batch.get(name, 0) for name in names)) for sample in recent]),
            hue_of(title if title in known else None),
        )
        for title, names in groups.items()
        if names & running
    ]
    top = round_up(max(counts, default=0.0))
    now = f"{counts[-1] if counts else 0:.3g}"
    return plot_html(
        text("status.plot.batch"),
        now,
        series,
        kind="stacked",
        top=top,
        top_label=f"{top:g}",
        span=common["span"],
        empty=text("status.idle"),
    )


def _moves_plot(text: Texts, recent: Sequence[Sample], common: dict[str, str]) -> str:
    """Loads of adapters into rows, and evictions."""
    loads = _points(recent, [float(sample.loads) for sample in recent])
    evictions = _points(recent, [float(sample.evictions) for sample in recent])
    top = round_up(max((value for _, value in [*loads, *evictions]), default=0.0))
    now = text("status.moves", loads=sum(sample.loads for sample in recent), out=sum(s.evictions for s in recent))
    series = [Series(text("status.loads"), loads, "accent"), Series(text("status.evictions"), evictions, "warm")]
    return plot_html(text("status.plot.moves"), now, series, kind="bars", top=top, top_label=f"{top:g}", **common)


def _points(samples: Sequence[Sample], values: Sequence[float]) -> list[Point]:
    return [(_place(sample.at), value) for sample, value in zip(samples, values, strict=True)]


def _place(at: float) -> float:
    """Where a time lies in the window that ends now, 0 to 1."""
    return 1.0 - (time.monotonic() - at) / WINDOW_S


def setup_html(text: Texts, page: Page, shown_links: Mapping[str, str]) -> str:
    """How the engine runs, and where to read on."""
    engine, stats = page.service.engine, page.service.stats()
    config = engine.config
    facts = (
        ("model", engine.model_names[0]),
        ("device", f"{engine.base.device}, {str(engine.base.dtype).removeprefix('torch.')}"),
        ("context", text("receipt.detail.tokens_value", tokens=engine.max_model_len)),
        ("modalities", ", ".join(sorted(engine.modalities)) or text("status.text_only")),
        ("batch", text("status.batch_value", requests=config.max_num_seqs)),
        ("kv_cache", text("status.kv_value", blocks=stats.kv_blocks_total, tokens=config.block_size)),
        ("rows", text("status.rows_value", rows=stats.lora_rows_total, rank=config.max_lora_rank)),
        ("uptime", text.duration(stats.uptime_s) if stats.uptime_s < 120 else text.span(stats.uptime_s)),
    )
    rows = "".join(
        f"<div><dt>{escape(text(f'status.setup.{key}'))}</dt><dd>{escape(str(value))}</dd></div>"
        for key, value in facts
    )
    links = "".join(
        f"<a class='button' href='{escape(path)}' target='_blank' rel='noopener'>{escape(text(f'status.link.{key}'))}</a>"
        for key, path in shown_links.items()
    )
    return (
        f"<section class='adapter-card'><h2>{escape(text('status.setup'))}</h2><dl>{rows}</dl>"
        f"<div class='ending'>{links}</div></section>"
    )
