"""A step's numbers against their definitions, in engines that run ahead and cut prompts into chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import engine.runner
from engine import Engine, EngineConfig, SamplingParams
from engine.batch import FLIGHT_ROWS, TOKEN_IDS, Batch
from engine.config import LoRAModule
from engine.request import TokenPrompt
from engine.scheduler import Plan
from kernels import LoraSegment
from tests.oracles import random_ids
from tests.pace import held_before


def slots_of(segments: Sequence[LoraSegment], num_rows: int) -> list[int]:
    """The LoRA row of each row, -1 for none."""
    found = [-1] * num_rows
    for lora_slot, start, end in segments:
        assert end is not None
        found[start:end] = [lora_slot] * (end - start)
    return found


def check(plan: Plan, batch: Batch, seen: Counter[str]) -> None:
    tokens = [(item.state, place) for item in plan.items for place in range(item.start, item.end)]
    ids, flight_rows = batch.inputs[TOKEN_IDS].tolist(), batch.inputs[FLIGHT_ROWS].tolist()
    for (state, place), token_id, flight_row in zip(tokens, ids, flight_rows, strict=False):
        if place < len(state.token_ids):
            assert (token_id, flight_row) == (state.token_ids[place], -1)
        else:
            assert flight_row == state.flight_row
            seen["in flight, not first"] += flight_row > 0
    sampled = [item.state.lora_slot for item in plan.items if item.is_sampled]
    assert slots_of(batch.head_segments, len(sampled)) == sampled
    assert slots_of(batch.lora_segments, len(tokens)) == [state.lora_slot for state, _ in tokens]
    seen["mixed"] += 0 < len(sampled) < len(tokens)


def test_every_token_comes_from_where_it_is(
    llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, seen = engine.runner.build_batch, Counter[str]()

    def checked(plan: Plan, *args: Any, **settings: Any) -> Batch:
        batch = build(plan, *args, **settings)
        check(plan, batch, seen)
        return batch

    monkeypatch.setattr(engine.runner, "build_batch", checked)

    def answers(name: str, *, is_ahead: bool) -> list[list[int]]:
        running = Engine(
            EngineConfig(
                model=str(llama_dir), device="cpu", dtype="float32", async_scheduling=is_ahead, max_num_seqs=8, max_loras=3,
                max_num_batched_tokens=24, adapter_dir=str(tmp_path / name), max_lora_rank=8, enable_prefix_caching=False,
                lora_modules=[LoRAModule(key, str(path)) for key, path in llama_adapters.items()],
            )
        )  # fmt: skip
        names = [None, "qv", "all", None, "rs", "qv", "all", None]
        sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        with held_before(running, len(names)):
            started = [
                running.start_sync(TokenPrompt(random_ids(5 + 7 * row, row)), sampling, lora=lora or "none")[0]
                for row, lora in enumerate(names)
            ]
        found = [[token_id for delta in answer for token_id in delta.token_ids] for answer in started]
        running.close()
        return found

    assert answers("ahead", is_ahead=True) == answers("plain", is_ahead=False)
    assert seen["in flight, not first"] and seen["mixed"]
