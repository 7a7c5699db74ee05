"""Memory stays flat over ten thousand steps in which adapters are loaded, replaced and unloaded at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from tests.churn import Churn, footprint, least_growth_kb, make_small_world

TENSOR_TOLERANCE = 8
"""The engine's thread may still hold some of its latest step."""


@pytest.mark.timeout(600)
def test_ten_thousand_steps_with_adapters_swapped_at_random_leave_memory_flat(tmp_path: Path) -> None:
    model, folders = make_small_world(tmp_path)
    engine = Engine(
        EngineConfig(
            model=str(model), device="cpu", max_num_seqs=6, max_loras=3, max_cpu_loras=4, max_lora_rank=4,
            max_model_len=128, adapter_dir=str(tmp_path / "catalogue"),
        )
    )  # fmt: skip
    try:
        churn = Churn(engine, folders, in_flight=4)
        churn.run_until(2_000)
        marks = [footprint(engine)]

        # A handle that is not given back is seen.
        engine.adapters.load("leak", str(folders[0]))
        with engine.adapters.acquire("leak"):
            engine.adapters.unload("leak")
            grown = {name for name, count in footprint(engine).items() if count > marks[0][name]}
            assert grown >= {"handles", "generations", "cpu_adapters"}

        for num_steps in (4_000, 6_000, 8_000, 10_000):
            churn.run_until(num_steps)
            marks.append(footprint(engine))
        engine.check_integrity()
        assert engine.stats().num_steps >= 10_000 and churn.num_swaps > 60 and churn.num_ended > 150
        assert least_growth_kb(marks) < 512, [mark["rss_kb"] for mark in marks]
        before, after = marks[0], marks[-1]
        assert after["tensors"] - before["tensors"] <= TENSOR_TOLERANCE
        free = {"rss_kb": 0, "tensors": 0}
        assert after | free == before | free
    finally:
        engine.close()
