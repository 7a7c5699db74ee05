"""Files that made other servers answer wrongly, with the numbers that are right.

The layouts of names are in `test_weights` and `test_trainers`; here are scales, full matrices, and subsets of modules.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from adapters.errors import AdapterRefused
from adapters.surface import ModelSurface
from adapters.weights import read_adapter
from tests.adapters.world import IDS, base_logits, edit, merged_logits, open_surface, peft_logits, save_peft

Q0, Q1, V0 = (f"model.layers.{layer}.self_attn.{name}_proj" for layer, name in ((0, "q"), (1, "q"), (0, "v")))


def test_a_rank_stabilised_adapter_equals_its_twin_with_a_larger_alpha(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path
) -> None:
    folder = save_peft(llama, tmp_path / "x", r=16, lora_alpha=32, use_rslora=True, target_modules=["q_proj"])
    twin = edit(folder, tmp_path / "twin", config={"use_rslora": False, "lora_alpha": 128})
    weak = edit(folder, tmp_path / "weak", config={"use_rslora": False})
    stable, twins, weaker = (read_adapter(one, surface) for one in (folder, twin, weak))
    assert stable.report.scale == 8.0 and stable.report.scales == {8.0: 2}
    ours = merged_logits(llama, stable.pairs)
    torch.testing.assert_close(ours, merged_logits(llama, twins.pairs), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, peft_logits(llama, folder), atol=1e-4, rtol=1e-4)
    assert (ours - merged_logits(llama, weaker.pairs)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("patterns", "scales"),
    [
        ({"rank_pattern": {r".*\.layers\.0\..*q_proj": 4}}, {Q0: 4.0, Q1: 2.0, V0: 2.0}),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 64}}, {Q0: 8.0, Q1: 2.0, V0: 2.0}),
        ({"alpha_pattern": {"0.self_attn.q_proj": 64}}, {Q0: 8.0, Q1: 2.0, V0: 2.0}),
        ({"alpha_pattern": {"proj": 64}}, {Q0: 2.0, Q1: 2.0, V0: 2.0}),
        ({"alpha_pattern": {"^model.layers.1.self_attn.q_proj": 64}}, {Q0: 2.0, Q1: 8.0, V0: 2.0}),
    ],
)
def test_patterns_give_the_scale_of_each_module(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path, patterns: dict[str, Any], scales: dict[str, float]
) -> None:
    folder = save_peft(llama, tmp_path / "x", r=8, lora_alpha=16, **patterns)
    pairs = read_adapter(folder, surface)[1]
    assert {name: pairs[name].scale for name in scales} == scales
    torch.testing.assert_close(merged_logits(llama, pairs), peft_logits(llama, folder), atol=1e-4, rtol=1e-4)


def test_of_overlapping_alphas_the_first_in_the_file_counts(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path
) -> None:
    alphas = {"q_proj": 32, "layers.0.self_attn.q_proj": 64}
    folder = edit(
        save_peft(llama, tmp_path / "x", r=8, lora_alpha=16), tmp_path / "y", config={"alpha_pattern": alphas}
    )
    pairs = read_adapter(folder, surface)[1]
    assert (pairs[Q0].scale, pairs[Q1].scale, pairs[V0].scale) == (4.0, 4.0, 2.0)


@pytest.mark.parametrize("module", ["lm_head", "input_layernorm"])
def test_a_full_matrix_that_was_trained_is_refused_at_load(
    llama: LlamaForCausalLM, tmp_path: Path, module: str
) -> None:
    folder = save_peft(llama, tmp_path / "x", target_modules=["q_proj"], modules_to_save=[module])
    untrained = read_adapter(folder, open_surface(llama))
    torch.testing.assert_close(merged_logits(llama, untrained[1]), peft_logits(llama, folder), atol=1e-4, rtol=1e-4)

    def train(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        noise = torch.Generator().manual_seed(1)
        return {
            name: value + torch.randn(value.shape, generator=noise) / 2 if f".{module}." in name else value
            for name, value in tensors.items()
        }

    trained = edit(folder, tmp_path / "y", tensors=train)
    assert (peft_logits(llama, trained) - peft_logits(llama, folder)).abs().max() > 0.1, "leaving it out would matter"
    with pytest.raises(AdapterRefused) as caught:
        read_adapter(trained, open_surface(llama))
    assert "modules_to_save" in caught.value.message and module in caught.value.message


TARGETS = [["q_proj"], ["k_proj"], ["v_proj"], ["q_proj", "k_proj"], ["q_proj", "v_proj"], ["gate_proj"], ["up_proj"]]


def test_adapters_of_any_subset_of_modules_equal_pefts_mixed_batch(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path
) -> None:
    """q gives 64 features, k and v 32: a gap that is filled by guessed shapes would show."""
    folders = [
        save_peft(llama, tmp_path / str(rank), r=rank, seed=rank, target_modules=names)
        for rank, names in enumerate(TARGETS, 2)
    ]
    peft = PeftModel.from_pretrained(copy.deepcopy(llama), folders[0], adapter_name="0").eval()
    for number, folder in enumerate(folders[1:], 1):
        peft.load_adapter(folder, adapter_name=str(number))
    names = [*map(str, range(len(folders))), "__base__"]
    with torch.inference_mode():
        mixed = peft(input_ids=IDS.expand(len(names), -1), adapter_names=names).logits
    torch.testing.assert_close(mixed[-1], base_logits(llama), atol=1e-4, rtol=1e-4)
    for folder, theirs in zip(folders, mixed, strict=False):
        assert (theirs - mixed[-1]).abs().max() > 0.1
        pairs = read_adapter(folder, surface)[1]
        torch.testing.assert_close(merged_logits(llama, pairs), theirs, atol=1e-4, rtol=1e-4)
