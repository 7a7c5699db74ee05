"""GPU memory stays flat over ten thousand steps of recorded graphs with adapters loaded, replaced and unloaded at random."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig
from tests.churn import Churn, footprint, least_growth_kb, make_small_world

pytestmark = pytest.mark.gpu

TENSOR_TOLERANCE = 8
ALLOCATED_TOLERANCE = 64 * 1024
"""Bytes: what the engine's thread may still hold of its latest step."""


def on_device() -> tuple[int, int]:
    """Bytes that tensors use and bytes that the allocator holds."""
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.mark.timeout(400)
def test_ten_thousand_steps_with_adapters_swapped_at_random_leave_memory_flat(tmp_path: Path) -> None:
    model, folders = make_small_world(tmp_path, hidden_size=64, intermediate_size=96)
    engine = Engine(
        EngineConfig(
            model=str(model), device="cuda", dtype="bfloat16", max_num_seqs=6, max_loras=3, max_cpu_loras=4,
            max_lora_rank=4, max_model_len=128, kv_cache_memory_mb=8, adapter_dir=str(tmp_path / "catalogue"),
        )
    )  # fmt: skip
    try:
        churn = Churn(engine, folders)
        churn.run_until(2_000)
        before, (allocated, reserved) = footprint(engine), on_device()
        marks = [before]
        for num_steps in (4_000, 6_000, 8_000, 10_000):
            churn.run_until(num_steps)
            marks.append(footprint(engine))
        after, (allocated_after, reserved_after) = marks[-1], on_device()
        engine.check_integrity()
        print(
            f"allocated {allocated} -> {allocated_after}, reserved {reserved} -> {reserved_after}, {before} -> {after}"
        )
        assert engine.stats().num_steps >= 10_000 and churn.num_swaps > 60 and churn.num_ended > 150
        assert least_growth_kb(marks) < 512
        assert after["tensors"] - before["tensors"] <= TENSOR_TOLERANCE
        free = {"rss_kb": 0, "tensors": 0}
        assert after | free == before | free
        assert allocated_after - allocated <= ALLOCATED_TOLERANCE
        assert reserved_after == reserved
    finally:
        engine.close()
