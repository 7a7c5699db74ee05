"""What adapters hold beside pairs: DoRA's arithmetic, rows from several tensors, and combinations that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from adapters import magnitude
from adapters.errors import AdapterRefused
from adapters.magnitude import output_change, row_norms
from adapters.surface import EmbeddingSite
from adapters.weights import read_adapter
from tests.adapters.world import PREFIX, make_llama, save_peft, surface_of

LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("chunk", [1, 100, 1 << 22])
def test_row_norms_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(magnitude, "_MAX_CHUNK", chunk)
    weight, a, b = torch.randn(13, 7), torch.randn(2, 7), torch.randn(13, 2)
    expected = (weight.double() + b.double() @ a.double()).norm(dim=1)
    torch.testing.assert_close(row_norms(weight.bfloat16().float(), a, b).double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(row_norms(weight, a, b).double(), expected, rtol=1e-5, atol=1e-5)


def test_an_output_change_gives_the_gain_to_the_product_alone() -> None:
    product, gain, base, trained, added = torch.randn(5, 3), torch.rand(3) + 0.5, *torch.randn(3, 3)
    for use_gain, bias, use_added in (
        (True, None, False),
        (True, trained, False),
        (False, trained, False),
        (False, None, True),
    ):
        change = output_change(
            3, gain=gain if use_gain else None, base_bias=base, trained_bias=bias, added_bias=added if use_added else None
        )  # fmt: skip
        assert change is not None
        expected = product * (gain if use_gain else 1) + (base if bias is None else bias) + (added if use_added else 0)
        torch.testing.assert_close((product + base) * change.scale + change.shift, expected)
    assert output_change(3, gain=None, base_bias=base, trained_bias=None, added_bias=None) is None


def served_surface(model: LlamaForCausalLM, **settings: Any) -> Any:
    embedding = EmbeddingSite("model.embed_tokens", 128, 64)
    tensors = dict(model.named_parameters())
    values: dict[str, Any] = {
        "serves_dora": True, "serves_bias": True, "serves_embeddings": True, "extra_vocab_size": 8, "unsupported": {},
        "embeddings": {embedding.name: embedding}, "base_tensor": tensors.get, "base_tensor_names": tuple(tensors),
    }  # fmt: skip
    return surface_of(model, **(values | settings))


def test_dora_counts_for_the_digest_and_the_effect(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = save_peft(llama, tmp_path / "dora", use_dora=True, target_modules=["q_proj"])
    first = read_adapter(folder, served_surface(llama))
    assert set(first.extras.changes) == set(first.pairs) and not first.report.is_zero_effect
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    tensors[f"{PREFIX}{LAYER}.lora_magnitude_vector"] *= 2
    save_file(tensors, weights)
    second = read_adapter(folder, served_surface(llama))
    assert second.report.digest != first.report.digest
    torch.testing.assert_close(second.pairs[LAYER].b, 2 * first.pairs[LAYER].b)
    torch.testing.assert_close(second.extras.changes[LAYER].scale, 2 * first.extras.changes[LAYER].scale)


def why_refused(folder: Path, surface: Any) -> str:
    with pytest.raises(AdapterRefused) as caught:
        read_adapter(folder, surface)
    return caught.value.message


def test_dora_is_refused_where_it_has_no_room_or_no_weight(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = save_peft(llama, tmp_path / "dora", use_dora=True)
    without = served_surface(llama, serves_dora=False, scale_shift_flag="--enable-dora")
    assert "start the server with --enable-dora" in why_refused(folder, without)
    quantised = served_surface(llama, base_tensor=lambda name: torch.zeros(4, 4, dtype=torch.uint8))
    assert "quantised" in why_refused(folder, quantised)
    zero = make_llama()
    folder = save_peft(zero, tmp_path / "zero", use_dora=True)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"{PREFIX}{LAYER}.lora_B.weight"].zero_()
    save_file(tensors, folder / "adapter_model.safetensors")
    with torch.no_grad():
        zero.get_submodule(LAYER).weight[3] = 0  # type: ignore[operator]
    assert "scales nothing" in why_refused(folder, served_surface(zero))


def test_a_bias_that_the_layer_does_not_have_is_refused(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = save_peft(llama, tmp_path / "bias")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"{PREFIX}{LAYER}.base_layer.bias"] = torch.ones(64)
    save_file(tensors, folder / "adapter_model.safetensors")
    assert "the model's layer has none" in why_refused(folder, served_surface(llama))


def with_rows(llama: LlamaForCausalLM, folder: Path, targets: list[str]) -> Path:
    """An adapter with two tensors of rows: a table of three more tokens, and rows that were trained for some of them."""
    save_peft(llama, folder, target_modules=targets)
    tensors = load_file(folder / "adapter_model.safetensors")
    table = torch.cat([llama.get_input_embeddings().weight.data, torch.full((3, 64), 5.0)])
    tensors[f"{PREFIX}model.embed_tokens.token_adapter.base_layer.weight"] = table
    tensors[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = torch.full((2, 64), 7.0)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"trainable_token_indices": [129, 3]}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_trained_rows_count_before_those_of_a_resized_table(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    content = read_adapter(with_rows(llama, tmp_path / "rows", ["q_proj"]), served_surface(llama))
    rows = content.extras.rows["model.embed_tokens"]
    assert {token_id: float(row[0]) for token_id, row in zip(rows.token_ids, rows.rows, strict=True)} == {
        129: 7.0, 3: 7.0, 128: 5.0, 130: 5.0,
    }  # fmt: skip
    assert content.extras.num_added_tokens == 3 and content.extras.tokenizer_files == {"tokenizer.json": b"{}"}


def test_added_tokens_without_a_row_are_refused(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = with_rows(llama, tmp_path / "rows", ["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors[f"{PREFIX}model.embed_tokens.token_adapter.base_layer.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")
    assert "no row of model.embed_tokens for 1 of them, the first is 128" in why_refused(folder, served_surface(llama))


def test_a_tied_head_out_of_reach_refuses_the_shared_lora(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    site = EmbeddingSite("model.embed_tokens", 128, 64, tied_head="lm_head")
    folder = save_peft(llama, tmp_path / "tied", target_modules=["embed_tokens"])
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"ensure_weight_tying": True}))
    tied = {"embeddings": {site.name: site}, "target_suffixes": ("embed_tokens",)}
    assert "also holds for lm_head" in why_refused(folder, served_surface(llama, **tied))


def test_more_rows_than_there_is_room_for_are_refused_with_the_number(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = with_rows(llama, tmp_path / "rows", ["q_proj"])
    assert "--lora-extra-vocab-size 4" in why_refused(folder, served_surface(llama, extra_vocab_size=3))
    assert "--lora-extra-vocab-size 3" in why_refused(folder, served_surface(llama, extra_vocab_size=2))


def test_lora_and_rows_on_one_table_are_refused(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    plain = save_peft(llama, tmp_path / "lora", target_modules=["embed_tokens"])
    lora = load_file(plain / "adapter_model.safetensors")
    folder = with_rows(llama, tmp_path / "rows", ["q_proj"])
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors |= {name: tensor for name, tensor in lora.items() if "lora_embedding" in name}
    save_file(tensors, folder / "adapter_model.safetensors")
    assert "both LoRA and rows of its own" in why_refused(folder, served_surface(llama))


def test_a_tokenizer_that_leads_elsewhere_or_is_too_large_is_refused(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_rows(llama, tmp_path / "roots" / "rows", ["q_proj"])
    monkeypatch.setattr("adapters.tokenizer_files.MAX_BYTES", 1)
    assert "tokenizer is over" in why_refused(folder, served_surface(llama))
    monkeypatch.undo()
    (tmp_path / "secret").write_text("{}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterRefused, match="leads out of the folders"):
        read_adapter(folder, served_surface(llama), allowed_roots=[tmp_path / "roots"])
