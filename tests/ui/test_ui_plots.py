"""Samples are rates between two looks at the engine, and plots put them where they belong."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.engine import EngineStats
from ui.app import header_html
from ui.page import Page
from ui.plots import HEIGHT, WIDTH, Series, plot_html, round_up
from ui.samples import WINDOW_S, Samples
from ui.snippets import ADDRESS, curl_snippet, python_snippet
from ui.status import figures_html, plots_html
from ui.text import Texts


@dataclasses.dataclass
class Looks:
    """The fields of `EngineStats` that samples read."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 10
    num_running: int = 0
    num_waiting: int = 0
    num_finished: dict[str, int] = dataclasses.field(default_factory=dict)
    num_steps: int = 0
    rows_by_adapter: dict[str, int] = dataclasses.field(default_factory=dict)
    lora_row_loads: int = 0
    lora_row_evictions: int = 0
    adapters: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(evictions=0))


def look(**fields: Any) -> EngineStats:
    return cast(EngineStats, Looks(**fields))


def test_a_sample_is_what_happened_since_the_one_before() -> None:
    samples = Samples()
    samples.take(look(generated_tokens=100), now=10.0)
    samples.take(look(generated_tokens=999), now=10.1)  # too soon
    samples.take(look(generated_tokens=150, kv_blocks_used=5, lora_row_loads=2), now=12.0)
    [sample] = samples.recent()
    assert (sample.tokens_per_s, sample.kv_share, sample.loads) == (25.0, 0.5, 2)
    # Batches between two looks are seen, however short the answers were.
    samples.take(look(num_steps=4, rows_by_adapter={"sql": 6, "base": 2}), now=14.0)
    assert samples.recent()[-1].batch == {"sql": 1.5, "base": 0.5}
    samples.take(look(num_steps=4, rows_by_adapter={"sql": 6, "base": 2}), now=16.0)
    assert samples.recent()[-1].batch == {}
    samples.take(look(generated_tokens=150), now=16.0 + WINDOW_S + 1)
    assert len(samples.recent()) == 1


def test_names_that_a_visitor_does_not_know_are_not_told() -> None:
    samples = Samples()
    samples.take(look())
    samples._previous = (samples._previous[0] - 2, samples._previous[1]) if samples._previous else None
    samples.take(look(rows_by_adapter={"secret": 2, "sql": 1, "base": 1}))
    drawn = plots_html(Texts(), samples, ["sql"])
    assert "sql" in drawn and "Others" in drawn and "Base model" in drawn
    assert "secret" not in drawn


def test_a_visitor_with_some_adapters_sees_nothing_of_others_requests() -> None:
    samples = Samples()
    samples.take(look())
    samples._previous = (samples._previous[0] - 2, samples._previous[1]) if samples._previous else None
    stats = look(
        num_running=31, num_waiting=32, generated_tokens=3333, kv_blocks_used=34, kv_blocks_total=35,
        num_finished={"stop": 36}, rows_by_adapter={"secret": 2, "sql": 1, "base": 3}, num_steps=1,
    )  # fmt: skip
    samples.take(stats)
    samples.note_first_token(37.0)
    plots = plots_html(Texts(), samples, ["sql"], sees_all=False)
    assert "sql" in plots and "Requests in the batch" in plots
    drawn = plots + figures_html(Texts(), stats, samples, 2)
    assert "2 <small>to your adapters" in drawn
    told = (
        "secret",
        "Base model",
        "Others",
        *"31 32 34 35 36 37".split(),
        "3,333",
        "1,666",
        "1666",
        "tokens",
        "KV",
        "First",
    )
    assert [word for word in told if word in re.sub(r"points='[^']*'", "", drawn)] == []
    assert all(word in figures_html(Texts(), stats, samples) for word in ("31", "32", "34", "35", "36", "3,333"))


def test_the_header_tells_how_busy_the_server_is_to_who_sees_all() -> None:
    service = SimpleNamespace(
        stats=lambda: SimpleNamespace(num_running=31, num_waiting=32, is_alive=True),
        engine=SimpleNamespace(model_names=["tiny"], adapters=SimpleNamespace(names=lambda: ["sql"])),
        policy=SimpleNamespace(has_tenants=True),
    )
    page = cast(Page, SimpleNamespace(service=service))
    load = Texts()("app.running", running=31, waiting=32)
    assert load in header_html(page, Texts(), sees_all=True)
    assert load not in header_html(page, Texts(), sees_all=False)


def test_stacked_areas_stand_on_each_other_and_names_are_escaped() -> None:
    series = [Series("a", [(0.0, 1.0), (1.0, 1.0)]), Series("<b>", [(0.0, 1.0), (1.0, 1.0)])]
    drawn = plot_html("t", "now", series, kind="stacked", top=2.0, top_label="2", span="s", empty="e")
    first, second = re.findall(r"<polygon class='accent' points='([^']*)'", drawn)
    half = HEIGHT / 2
    assert first == f"0.0,{half} {WIDTH}.0,{half} {WIDTH}.0,{HEIGHT}.0 0.0,{HEIGHT}.0"
    assert second == f"0.0,0.0 {WIDTH}.0,0.0 {WIDTH}.0,{half} 0.0,{half}"
    assert "<b>" not in drawn


@pytest.mark.parametrize(
    ("value", "rounded"), [(0, 1), (0.3, 0.5), (0.012, 0.02), (1, 1), (3, 5), (12, 20), (700, 1000)]
)
def test_scales_end_at_round_numbers(value: float, rounded: float) -> None:
    assert round_up(value) == pytest.approx(rounded)


def test_programs_are_valid_whatever_the_name() -> None:
    name = 'it\'s "quoted"'
    command = curl_snippet("base", name, needs_key=True)
    body = command.split("-d '")[1][:-1].replace("'\\''", "'")
    assert json.loads(body)["model"] == name and "$API_KEY" in command
    compile(python_snippet("base", name, needs_key=True), "snippet", "exec")
    assert json.loads(curl_snippet("base", "none", needs_key=False).split("-d '")[1][:-1])["lora"] == "none"
    assert ADDRESS in python_snippet("base", "none", needs_key=False)


@pytest.mark.parametrize("needs_key", [True, False])
def test_speech_adapters_are_asked_with_a_recording(needs_key: bool) -> None:
    name = 'it\'s "quoted"'
    words = shlex.split(curl_snippet("base", name, needs_key=needs_key, is_speech=True))
    assert (
        words[1] == f"{ADDRESS}v1/audio/transcriptions" and f"model={name}" in words and "file=@recording.wav" in words
    )
    assert ("Authorization: Bearer $API_KEY" in words) == needs_key
    for lora in (name, "none"):
        program = python_snippet("base", lora, needs_key=needs_key, is_speech=True)
        compile(program, "snippet", "exec")
        assert "audio.transcriptions.create" in program and ('"lora": "none"' in program) == (lora == "none")
