"""The benchmark of adapters' loads runs to its end on the tiny shape, and refuses when its check fails."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from typing import Any

import pytest

from adapters.manager import AdapterManager
from benchmarks import adapters as benchmark
from engine.request import TokenLogprob

WORDS = "benchmark --shape tiny --rank 8 --output-len 24 --repeat 1 --streams 2"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the benchmark: its exit status, and the last line's object."""

    def main() -> tuple[object, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", WORDS.split())
        monkeypatch.setattr(benchmark, "freeze_startup_objects", lambda: None)  # which would keep other tests' objects
        status: object = 0
        try:
            benchmark.main()
        except SystemExit as end:
            status = end.code
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    return main


def test_the_last_line_holds_every_figure(run: Any) -> None:
    status, line = run()
    figures = line["figures"]
    assert status == 0 and isinstance(figures, dict)
    names = {"load_ms", "disk_until_usable_ms", "cpu_until_usable_ms", "swap_ms", "unload_ms", "warm_first_token_ms"}
    assert all(isinstance(figures[name], float) for name in names) and figures["adapter_megabytes"] > 0
    kinds = {"quiet", "copies", "loads_and_copies", "warm_requests", "cold_requests"}
    assert set(figures["gaps"]) == kinds
    assert all(0 < gaps["median_ms"] <= gaps["longest_ms"] for gaps in figures["gaps"].values())


def test_last_digits_that_depend_on_the_batch_do_not_count_as_another_answer(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = benchmark.answer_all, itertools.count()

    def nudged(entry: TokenLogprob, nudge: float) -> TokenLogprob:
        top = tuple((token, value + nudge) for token, value in entry.top)
        return dataclasses.replace(entry, logprob=entry.logprob + nudge, top=top)

    def answer_all(*arguments: Any) -> list[list[TokenLogprob]]:
        nudge = 1e-6 * next(calls)
        return [[nudged(entry, nudge) for entry in row] for row in real(*arguments)]

    monkeypatch.setattr(benchmark, "answer_all", answer_all)
    status, line = run()
    assert status == 0, line.get("error")
    assert next(calls) > 2


def test_it_refuses_when_a_replaced_adapter_answers_as_before(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AdapterManager.load

    def load(manager: AdapterManager, name: str, path: str, **settings: Any) -> Any:
        return real(manager, name, path if name != "replaced" else path.replace("adapter-1", "adapter-0"), **settings)

    monkeypatch.setattr(AdapterManager, "load", load)
    status, line = run()
    assert status == 1 and line["error"] == "a replaced adapter does not answer as its new content does"
