"""Each architecture's layers are one graph, are not compiled again while serving, and give the same tokens."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams, ops
from engine.compiler import StepKind, compile_decoder
from engine.graphs import recording_lora
from engine.request import TokenPrompt
from engine.warmup import recorded_steps
from tests.oracles import make_adapter, make_model, random_ids

ARCHITECTURES = [
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM", "Gemma3ForCausalLM",
]  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_are_one_graph_with_and_without_adapters(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = Mock(side_effect=ops.product_and_delta)
    folder = make_model(architecture, tmp_path / "model")
    # Qwen2's layers have biases: its adapter scales and shifts their output too.
    more = {"use_dora": True, "bias": "lora_only"} if architecture == "Qwen2ForCausalLM" else {}
    adapter = make_adapter(folder, architecture, tmp_path / "adapter", targets="all-linear", rank=8, **more)
    engine = Engine(
        EngineConfig(
            model=str(folder),
            max_loras=2,
            max_lora_rank=8,
            max_num_batched_tokens=50,
            adapter_dir=str(tmp_path / "catalogue"),
        )
    )
    engine.adapters.load("a", str(adapter))
    runner, metadata = engine._loop._runner, engine._lora.metadata

    def answers() -> list[list[int]]:
        names = [None, "a", None, "a"]
        started = [
            engine.start_sync(
                TokenPrompt(random_ids(7 + row, row)), SamplingParams(temperature=0, max_tokens=6), lora=name
            )
            for row, name in enumerate(names)
        ]
        return [[token_id for delta in answer for token_id in delta.token_ids] for (answer,) in started]

    try:
        expected = answers()
        # The backend "eager" runs the traced graph as it is: what is tested is the tracing.
        recorded = recorded_steps(runner, metadata)
        compile_decoder(engine.base.decoder, [StepKind(runner.warm_up, 50), recorded], backend="eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert answers() == expected
            monkeypatch.setattr(ops, "product_and_delta", apart)
            assert answers() == expected and not apart.called
            with recording_lora(metadata):  # LoRA apart from the product, in decodes and short prompts
                assert answers() == expected
            assert apart.called or "bias" in more, "where adapters scale and shift, LoRA comes after"
            single = engine.start_sync(TokenPrompt(random_ids(7, 0)), SamplingParams(temperature=0, max_tokens=6))[0]
            assert [token_id for delta in single for token_id in delta.token_ids] == expected[0]
    finally:
        engine.close()
        torch._dynamo.reset()
