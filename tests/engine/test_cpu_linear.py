"""Packed weights give the products of plain ones, leave names and ties alone, and keep within their memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine import Engine, EngineConfig, SamplingParams, cpu_linear
from engine.config import LoRAModule
from engine.lora_layers import linear_weights
from engine.request import TokenPrompt
from tests.oracles import Oracle, make_adapter, make_model, random_ids

_packs = cpu_linear.has_packing()
needs_packing = pytest.mark.skipif(not _packs, reason="this torch has no packed products")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def packs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights count as large."""
    monkeypatch.setattr(cpu_linear, "MIN_OUT_FEATURES", 1)
    monkeypatch.setattr(cpu_linear, "MIN_ELEMENTS", 1)


@needs_packing
@pytest.mark.parametrize("has_bias", [True, False])
def test_packed_products_equal_plain_ones(has_bias: bool, packs_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(37, 133, bias=has_bias).requires_grad_(False)
    assert cpu_linear.pack_linears([(layer, layer.weight)], 2**20) == layer.weight.nbytes
    used: list[int] = []
    product = cpu_linear.packed_product
    monkeypatch.setattr(
        cpu_linear, "packed_product", lambda x, *rest: used.append(x.numel() // 37) or product(x, *rest)
    )
    for rows in (1, 2, 16, 63, 64, 65):
        x = torch.randn(1, rows, 37)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
    assert used == [2, 16, 63, 64]


@needs_packing
def test_a_packed_layer_saves_moves_and_ties_as_before(packs_all: None) -> None:
    embedding, layer = nn.Embedding(24, 8), nn.Linear(8, 24, bias=False)
    layer.weight = embedding.weight
    names = list(layer.state_dict())
    cpu_linear.pack_linears([(layer, layer.weight)], 2**20)
    assert layer.weight is embedding.weight and cpu_linear.is_packed(layer.weight)
    assert list(layer.state_dict()) == names and isinstance(layer, nn.Linear)
    assert not cpu_linear.is_packed(layer.to(torch.float64).weight.clone())


@needs_packing
def test_the_widest_are_packed_first_and_within_the_budget(packs_all: None) -> None:
    layers = [nn.Linear(8, width, bias=False) for width in (16, 64, 32)]
    num_bytes = cpu_linear.pack_linears([(layer, layer.weight) for layer in layers], (64 + 16) * 8 * 4)
    assert [cpu_linear.is_packed(layer.weight) for layer in layers] == [True, True, False]
    assert num_bytes == (64 + 16) * 8 * 4


@pytest.mark.parametrize("layer", [nn.Linear(64, 64), nn.Linear(2048, 2048, dtype=torch.bfloat16)])
def test_small_and_half_precision_weights_stay_as_they_are(layer: nn.Linear) -> None:
    assert cpu_linear.pack_linears([(layer, layer.weight)], 2**30) == 0
    assert type(layer) is nn.Linear


def test_without_the_operators_nothing_is_packed(
    packs_all: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(cpu_linear, "pack", missing)
    layer = nn.Linear(8, 16)
    with caplog.at_level("INFO"):
        assert cpu_linear.pack_linears([(layer, layer.weight)], 2**20) == 0
    assert "weights_not_packed" in caplog.text and type(layer) is nn.Linear


@needs_packing
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Qwen2ForCausalLM"])  # tied head; biases
def test_an_engine_with_packed_weights_equals_generate(architecture: str, packs_all: None, tmp_path: Path) -> None:
    folder = make_model(architecture, tmp_path / "model")
    adapter = make_adapter(folder, architecture, tmp_path / "adapter", rank=4)
    oracle = Oracle(folder, architecture, {"a": adapter})
    prompts = [random_ids(length, length) for length in (1, 7, 33)]
    expected = [[oracle.generate(prompt, 12, adapter=name) for prompt in prompts] for name in (None, "a")]
    assert expected[0] != expected[1], "the adapter changes nothing"
    engine = Engine(
        EngineConfig(
            model=str(folder), device="cpu", packed_weights_mb=64, lora_modules=[LoRAModule("a", str(adapter))],
            adapter_dir=str(tmp_path / "catalogue"),
        )
    )  # fmt: skip
    try:
        weights = [weight for _, weight in linear_weights(engine.base.model)]
        assert weights and all(cpu_linear.is_packed(weight) for weight in weights)
        answers = [
            [engine.start_sync(TokenPrompt(prompt), GREEDY, lora=name)[0] for prompt in prompts]
            for name in ("none", "a")
        ]
        got = [[[token for delta in answer for token in delta.token_ids] for answer in row] for row in answers]
        assert got == expected
    finally:
        engine.close()
