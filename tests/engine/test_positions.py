"""Positions beyond a token's place: frequencies chosen request by request, and images placed by row and column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.config import LoRAModule
from engine.positions import grid_positions
from engine.request import TokenPrompt
from engine.state import MediaInput, MediaSpan
from tests.oracles import Oracle, make_adapter, make_model, random_ids

PHI = "Phi3ForCausalLM"
ORIGINAL_LEN = 60
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.3],
    "long_factor": [2.0, 7.0], "original_max_position_embeddings": ORIGINAL_LEN,
}  # fmt: skip


def test_long_and_short_requests_of_one_batch_take_their_own_frequencies(tmp_path: Path) -> None:
    """Short ones share beginnings with long ones, so that cached keys would be mixed up too; with fused projections' LoRA."""
    folder = make_model(
        PHI, tmp_path / "model", rope_parameters=LONG_ROPE, original_max_position_embeddings=ORIGINAL_LEN
    )
    adapter = make_adapter(folder, PHI, tmp_path / "fused", targets=["qkv_proj", "gate_up_proj", "o_proj"], seed=3)
    oracle = Oracle(folder, PHI, {"fused": adapter})
    shared = random_ids(ORIGINAL_LEN + 30, 1)
    lengths = [ORIGINAL_LEN - 19, 30, ORIGINAL_LEN + 1, 80, 90, 12]
    plan = [(shared[:length], name) for length in lengths for name in (None, "fused")]
    engine = Engine(
        EngineConfig(
            model=str(folder), block_size=4, max_num_batched_tokens=32, lora_modules=[LoRAModule("fused", str(adapter))],
            max_lora_rank=8, max_num_seqs=8, adapter_dir=str(tmp_path / "catalogue"),
        ),
        checks_integrity=True,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    try:
        for order in (plan, plan[::-1]):
            answers = [engine.start_sync(TokenPrompt(prompt), sampling, lora=name)[0] for prompt, name in order]
            for (prompt, name), answer in zip(order, answers, strict=True):
                tokens = [token for delta in answer for token in delta.token_ids]
                assert tokens == oracle.generate(prompt, 20, name), (len(prompt), name)
        assert engine.stats().prefix_hit_tokens > 0
    finally:
        engine.close()
    short = Oracle(folder, PHI).logits(shared[:ORIGINAL_LEN])[-1]
    long = Oracle(folder, PHI).logits(shared)[ORIGINAL_LEN - 1]
    assert float((short - long).abs().max()) > 0.1, "the two sets must differ, or this proves nothing"


@pytest.mark.parametrize("grids", [[], [(2, 3)], [(1, 1), (4, 2)], [(3, 5), (5, 3), (1, 7)]])
def test_image_positions_equal_the_definition(grids: list[tuple[int, int]]) -> None:
    """Token by token: text moves all rows on, an image counts from where it begins, text goes on after its longer side."""
    spans, expected, place = [], list[tuple[int, int, int]](), 0
    position = 0
    for number, (rows, columns) in enumerate(grids):
        for _ in range(2 * number):
            expected.append((position,) * 3)
            position += 1
        spans.append(MediaSpan(len(expected), MediaInput("d", {}, rows * columns, "image", grid=(rows, columns))))
        expected += [(position, position + row, position + column) for row in range(rows) for column in range(columns)]
        position += max(rows, columns)
    place = len(expected)
    expected += [(position + offset,) * 3 for offset in range(3)]
    positions, delta = grid_positions(len(expected), spans)
    assert np.array_equal(positions.T, np.array(expected))
    assert delta == position - place
