"""The benchmark of adapters' loads runs to its end on the tiny shape, and refuses when its check fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["--shape", "tiny", "--rank", "8", "--output-len", "24", "--repeat", "1", "--streams", "2"]


def run(script: str) -> tuple[int, dict[str, object]]:
    """Exit status, and the last line's object."""
    result = subprocess.run(
        [sys.executable, "-c", script, *WORDS], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout.splitlines()[-1])


def test_the_last_line_holds_every_figure() -> None:
    status, line = run("from benchmarks.adapters import main; main()")
    figures = line["figures"]
    assert status == 0 and isinstance(figures, dict)
    names = {"load_ms", "disk_until_usable_ms", "cpu_until_usable_ms", "swap_ms", "unload_ms", "warm_first_token_ms"}
    assert all(isinstance(figures[name], float) for name in names) and figures["adapter_megabytes"] > 0
    kinds = {"quiet", "copies", "loads_and_copies", "warm_requests", "cold_requests"}
    assert set(figures["gaps"]) == kinds
    assert all(0 < gaps["median_ms"] <= gaps["longest_ms"] for gaps in figures["gaps"].values())


def test_last_digits_that_depend_on_the_batch_do_not_count_as_another_answer() -> None:
    script = """
import dataclasses, itertools
import benchmarks.adapters as benchmark
real, calls = benchmark.answer_all, itertools.count()
def answer_all(*arguments):
    nudge = 1e-6 * next(calls)
    return [
        [
            dataclasses.replace(
                entry, logprob=entry.logprob + nudge, top=tuple((token, value + nudge) for token, value in entry.top)
            )
            for entry in row
        ]
        for row in real(*arguments)
    ]
benchmark.answer_all = answer_all
benchmark.main()
"""
    status, line = run(script)
    assert status == 0, line.get("error")


def test_it_refuses_when_a_replaced_adapter_answers_as_before() -> None:
    script = """
from adapters.manager import AdapterManager
real = AdapterManager.load
def load(self, name, path, **settings):
    return real(self, name, path if name != "replaced" else str(path).replace("adapter-1", "adapter-0"), **settings)
AdapterManager.load = load
from benchmarks.adapters import main
main()
"""
    status, line = run(script)
    assert status == 1 and line["error"] == "a replaced adapter does not answer as its new content does"
