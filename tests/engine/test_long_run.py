"""Memory stays flat over ten thousand steps in which adapters are loaded, replaced and unloaded at random."""

from __future__ import annotations

from pathlib import Path

from engine import Engine, EngineConfig
from tests.churn import Churn, footprint, make_small_world

RSS_TOLERANCE_KB = 8 * 1024
"""The allocator keeps pages as it likes; a single leaked adapter shows in the counts, not here."""
TENSOR_TOLERANCE = 8
"""The engine's thread may still hold some of its latest step."""


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
        before = footprint(engine)

        # A handle that is not given back is seen.
        engine.adapters.load("leak", str(folders[0]))
        with engine.adapters.acquire("leak"):
            engine.adapters.unload("leak")
            grown = {name for name, count in footprint(engine).items() if count > before[name]}
            assert grown >= {"handles", "generations", "cpu_adapters"}

        churn.run_until(10_000)
        after = footprint(engine)
        engine.check_integrity()
        assert engine.stats().num_steps >= 10_000 and churn.num_swaps > 200 and churn.num_ended > 400
        growth_kb = after.pop("rss_kb") - before.pop("rss_kb")
        num_new_tensors = after.pop("tensors") - before.pop("tensors")
        assert after == before
        assert num_new_tensors <= TENSOR_TOLERANCE
        assert growth_kb < RSS_TOLERANCE_KB
    finally:
        engine.close()
