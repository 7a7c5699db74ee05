"""Adapters land on the model exactly as PEFT puts them there, or are refused with the reason."""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from adapters.errors import AdapterError, AdapterFilesNotFound, AdapterRefused
from adapters.report import AdapterReport
from adapters.surface import ModelSurface
from adapters.tensor_file import TensorFile
from adapters.weights import read_adapter
from tests.adapters.world import PREFIX, base_logits, edit, merged_logits, peft_logits, save_peft, surface_of

LAYER = f"{PREFIX}model.layers.0.self_attn.q_proj"


def refusal(folder: Path, surface: ModelSurface) -> str:
    """The refusal's sentence; it must come quickly and name no folder."""
    started = time.process_time()
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, surface)
    assert time.process_time() - started < 2.0
    assert str(folder) not in caught.value.message and str(folder.parent) not in caught.value.message
    return caught.value.message


def check_against_peft(llama: LlamaForCausalLM, folder: Path, surface: ModelSurface) -> AdapterReport:
    """The merged model answers as PEFT's does, and not as the base model does."""
    _, pairs, report, _ = read_adapter(folder, surface)
    ours, theirs = merged_logits(llama, pairs), peft_logits(llama, folder)
    assert (theirs - base_logits(llama)).abs().max() > 0.1, "the adapter must matter"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    return report


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["k_proj"], "r": 3},
        {"target_modules": ["v_proj"], "r": 5},
        {"target_modules": ["q_proj", "k_proj"], "r": 7},
        {"target_modules": ["gate_proj"], "r": 2},
        {"target_modules": ["up_proj"], "r": 1},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(o|down)_proj"},
        {"r": 16, "lora_alpha": 32, "use_rslora": True, "target_modules": ["q_proj"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.v_proj"]},
        {"r": 8, "lora_alpha": 16, "rank_pattern": {r".*\.layers\.0\..*q_proj": 4}},
        {"r": 8, "lora_alpha": 16, "alpha_pattern": {"layers.0.self_attn.q_proj": 64}},
        {"r": 8, "lora_alpha": 16, "alpha_pattern": {"q_proj": 32, "layers.0.self_attn.q_proj": 64}},
        {"r": 8, "lora_alpha": 16, "use_rslora": True, "rank_pattern": {"^model.layers.1.self_attn.q_proj": 2}},
        {"lora_alpha": -4},
        {"init_lora_weights": "gaussian"},
        {"fan_in_fan_out": True},
    ],
)
def test_the_models_answer_is_pefts(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path, settings: dict[str, Any]
) -> None:
    report = check_against_peft(llama, save_peft(llama, tmp_path / "x", **settings), surface)
    assert report.matched == report.total == report.num_modules and not report.is_zero_effect


def test_scales_are_those_that_peft_computes(llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path) -> None:
    folder = save_peft(llama, tmp_path / "x", r=8, lora_alpha=16, rank_pattern={r".*\.layers\.0\..*q_proj": 4})
    _, pairs, report, _ = read_adapter(folder, surface)
    peft = PeftModel.from_pretrained(copy.deepcopy(llama), folder)
    theirs = {
        name.removeprefix(PREFIX): module.scaling["default"]
        for name, module in peft.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert {name: pair.scale for name, pair in pairs.items()} == theirs
    assert pairs["model.layers.0.self_attn.q_proj"].scale == 4.0 and report.scale == 2.0
    assert (report.rank, report.ranks, report.scales) == (8, {4: 1, 8: 3}, {2.0: 3, 4.0: 1})


def fsdp(name: str) -> str:
    return name.replace(".self_attn", "._fsdp_wrapped_module.self_attn")


@pytest.mark.parametrize(
    "key",
    [
        lambda name: name.replace("model.model.model.", "model.model.model.language_model."),
        lambda name: "_orig_mod." + name,
        fsdp,
        lambda name: name.removeprefix(PREFIX),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: "module." + name,
        lambda name: name.replace(f"{PREFIX}model.", f"{PREFIX}language_model.model."),
    ],
)
def test_known_wrappings_of_the_names_give_the_very_same_adapter(
    reference: Path, surface: ModelSurface, tmp_path: Path, key: Callable[[str], str]
) -> None:
    _, plain, report, _ = read_adapter(reference, surface)
    _, wrapped, wrapped_report, _ = read_adapter(edit(reference, tmp_path / "x", key=key), surface)
    assert plain.keys() == wrapped.keys() and report.digest == wrapped_report.digest
    assert all(torch.equal(plain[name].b, wrapped[name].b) for name in plain)


def test_unmatched_names_are_counted_and_the_first_are_named(
    reference: Path, surface: ModelSurface, tmp_path: Path
) -> None:
    folder = edit(reference, tmp_path / "x", key=lambda name: name.replace("layers.1.", "layers.7."))
    told = refusal(folder, surface)
    assert "matched 2 of 4 tensor pairs" in told and "model.layers.7.self_attn.q_proj" in told
    folder = edit(reference, tmp_path / "y", key=lambda name: name.replace("layers.", "blocks."))
    assert "changes 0 modules of this model (matched 0 of 4" in refusal(folder, surface)


def test_a_tower_and_a_decoder_are_told_apart_in_the_report(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"tower": nn.ModuleList([nn.Linear(6, 10)]), "layers": nn.ModuleList([nn.Linear(6, 4)])})
    save_file(
        {f"{name}.lora_{half}.weight": torch.randn(shape) for name, outs in (("tower.0", 10), ("layers.0", 4))
         for half, shape in (("A", (2, 6)), ("B", (outs, 2)))},
        tmp_path / "adapter_model.safetensors",
    )  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    assert read_adapter(tmp_path, surface_of(model))[2].parts == ["decoder", "tower"]


def test_dora_is_refused_by_flag_and_by_tensor(
    llama: LlamaForCausalLM, surface: ModelSurface, reference: Path, tmp_path: Path
) -> None:
    dora = save_peft(llama, tmp_path / "dora", use_dora=True)
    assert "DoRA adapters are not supported" in refusal(dora, surface)
    silent = edit(dora, tmp_path / "silent", config={"use_dora": False})
    assert "though use_dora is false" in refusal(silent, surface)
    odd = edit(dora, tmp_path / "odd", key=lambda name: name + ".weight" if "magnitude" in name else name)
    assert "DoRA adapters are not supported" in refusal(odd, surface)
    empty = edit(reference, tmp_path / "empty", config={"use_dora": True})
    assert "hold no magnitude vectors" in refusal(empty, surface)


@pytest.mark.parametrize("module", ["lm_head", "input_layernorm"])
def test_full_matrices_are_refused_by_config_and_by_tensor(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path, module: str
) -> None:
    folder = save_peft(llama, tmp_path / "x", target_modules=["q_proj"], modules_to_save=[module])
    told = refusal(folder, surface)
    assert "modules_to_save" in told and module in told
    silent = edit(folder, tmp_path / "silent", config={"modules_to_save": None})
    assert "full weight matrices" in refusal(silent, surface) and module in refusal(silent, surface)


def test_embedding_lora_and_trained_tokens_are_refused(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path
) -> None:
    embedding = save_peft(llama, tmp_path / "embedding", target_modules=["embed_tokens", "q_proj"])
    assert "LoRA on embeddings is not served" in refusal(embedding, surface)
    tokens = save_peft(llama, tmp_path / "tokens", trainable_token_indices=[1, 2])
    assert "trainable_token_indices" in refusal(tokens, surface)
    silent = edit(tokens, tmp_path / "silent", config={"trainable_token_indices": None})
    assert "trained token embeddings" in refusal(silent, surface)


def test_lora_on_the_head_is_refused_with_the_surfaces_reason(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path
) -> None:
    folder = save_peft(llama, tmp_path / "x", target_modules=["lm_head", "q_proj"])
    assert "LoRA on lm_head is not served: LoRA on embeddings and heads" in refusal(folder, surface)


def test_added_token_embeddings_are_refused(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    folder = edit(reference, tmp_path / "x")
    save_file({"new_embeddings": torch.zeros(2, 64)}, folder / "new_embeddings.safetensors")
    assert "new_embeddings.safetensors" in refusal(folder, surface)


def test_a_trained_lora_bias_is_refused(llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path) -> None:
    folder = save_peft(llama, tmp_path / "x", lora_bias=True)
    assert "lora_bias" in refusal(folder, surface)
    silent = edit(folder, tmp_path / "silent", config={"lora_bias": False})
    assert "trained bias vectors are not served" in refusal(silent, surface)


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig", "VeraConfig", "IA3Config"])
def test_other_peft_kinds_are_refused_by_name(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path, kind: str
) -> None:
    import peft

    extra = {"feedforward_modules": []} if kind == "IA3Config" else {}
    config = getattr(peft, kind)(target_modules=["q_proj"], **extra)
    get_peft_model(copy.deepcopy(llama), config).save_pretrained(tmp_path / "x")
    told = refusal(tmp_path / "x", surface)
    assert "only LORA is served" in told and ("save_as_lora" in told) == (kind != "IA3Config")


Tensors = dict[str, torch.Tensor]


def drop_one_b(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if name != f"{LAYER}.lora_B.weight"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {name: torch.empty(0) for name in t}, "is empty ([0]); the checkpoint was probably saved from"),
        (lambda t: {n: v[:, :0] if "lora_B" in n else v for n, v in t.items()}, "is empty"),
        (drop_one_b, "lora_B is missing for model.layers.0.self_attn.q_proj"),
        (lambda t: t | {f"{LAYER}.lora_B.weight": torch.ones(64, 8)}, "disagree about the rank: 4 and 8"),
        (lambda t: t | {f"{LAYER}.lora_A.weight": torch.ones(4, 128)}, "lora_A [4, 128] and lora_B [64, 4] do not fit"),
        (lambda t: t | {f"{LAYER}.lora_B.weight": torch.ones(32, 4)}, "which needs [4, 64] and [64, 4] there"),
        (lambda t: t | {f"{LAYER}.lora_A.weight": torch.ones(4, 8, 8)}, "two dimensions"),
        (lambda t: t | {f"{LAYER}.lora_A.weight": torch.ones(4, 64).int()}, "is I32"),
        (lambda t: t | {f"{LAYER}.lora_A.weight": torch.full((4, 64), torch.nan)}, "holds NaN or infinity"),
        (lambda t: t | {f"{LAYER}.lora_B.weight": torch.full((64, 4), torch.inf)}, "holds NaN or infinity"),
        (lambda t: t | {f"{LAYER}.hada_w1_a": torch.ones(2)}, "tensors of unknown meaning"),
        (lambda t: t | {LAYER.removeprefix(PREFIX) + ".lora_A.weight": torch.ones(4, 64)}, "occur twice"),
        (lambda t: t | {f"{LAYER}.lora_A.other.weight": torch.ones(4, 64), f"{LAYER}.lora_B.x.weight": torch.ones(1)},
         "several adapters (other, x)"),
        (lambda t: {}, "hold no LoRA tensors"),
    ],
)  # fmt: skip
def test_damaged_tensors_are_refused_with_the_module(
    reference: Path, surface: ModelSurface, tmp_path: Path, change: Callable[[Tensors], Tensors], said: str
) -> None:
    assert said in refusal(edit(reference, tmp_path / "x", tensors=change), surface)


def test_two_spellings_of_one_layer_in_one_file_are_refused(
    reference: Path, surface: ModelSurface, tmp_path: Path
) -> None:
    def double(tensors: Tensors) -> Tensors:
        return tensors | {
            name.replace("model.model.model.", "model.model.model.language_model."): value.clone()
            for name, value in tensors.items()
        }

    assert "two names lead to one layer" in refusal(edit(reference, tmp_path / "x", tensors=double), surface)


def test_wrong_shapes_say_which_base_the_adapter_names(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> Tensors:
        return {n: torch.ones(4, 128) if "lora_A" in n else v for n, v in tensors.items()}

    folder = edit(reference, tmp_path / "x", tensors=widen, config={"base_model_name_or_path": "/home/me/llama-128"})
    told = refusal(folder, surface)
    assert "'tiny-llama'" in told and "trained on 'llama-128'" in told and "/home/me" not in told


@pytest.mark.parametrize("fields", [{"r": 8}, {"rank_pattern": {"layers.0.self_attn.q_proj": 2}}])
def test_a_rank_that_contradicts_the_tensors_is_refused(
    reference: Path, surface: ModelSurface, tmp_path: Path, fields: dict[str, Any]
) -> None:
    told = refusal(edit(reference, tmp_path / "x", config=fields), surface)
    assert "have rank 4, but adapter_config.json gives rank" in told


def test_a_rank_over_the_limit_names_both_and_the_flag(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path
) -> None:
    told = refusal(save_peft(llama, tmp_path / "x", r=80), surface)
    assert "rank is 80" in told and "room for rank 64" in told and "--max-lora-rank 80" in told


def test_modules_outside_the_deploy_time_filter_are_refused(
    llama: LlamaForCausalLM, reference: Path, tmp_path: Path
) -> None:
    told = refusal(reference, surface_of(llama, target_suffixes=("q_proj",)))
    assert "matched 2 of 4" in told and "--lora-target-modules" in told and "v_proj" in told
    down = save_peft(llama, tmp_path / "x", target_modules=["down_proj"])
    assert "changes 0 modules of this model" in refusal(down, surface_of(llama, target_suffixes=("qkv_proj",)))
    assert read_adapter(reference, surface_of(llama, target_suffixes=("qkv_proj",)))[2].matched == 4


def test_another_base_by_name_is_a_warning_and_still_loads(
    reference: Path, surface: ModelSurface, tmp_path: Path
) -> None:
    folder = edit(reference, tmp_path / "x", config={"base_model_name_or_path": "meta/other-llama"})
    report = read_adapter(folder, surface)[2]
    assert any("'meta/other-llama'" in line and "'tiny-llama'" in line for line in report.warnings)
    same = edit(reference, tmp_path / "y", config={"base_model_name_or_path": "org/Tiny-Llama"})
    assert read_adapter(same, surface)[2].warnings == []


def test_an_adapter_without_effect_loads_with_a_warning(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    def zero_b(tensors: Tensors) -> Tensors:
        return {name: value * ("lora_A" in name) for name, value in tensors.items()}

    for folder in (
        edit(reference, tmp_path / "x", tensors=zero_b),
        edit(reference, tmp_path / "y", config={"lora_alpha": 0}),
    ):
        report = read_adapter(folder, surface)[2]
        assert report.is_zero_effect and "changes nothing" in report.warnings[-1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "names 2 modules that the files hold no tensors for"),
        ({"target_modules": ["q_proj"]}, "hold tensors for 2 modules that target_modules does not name"),
        ({"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]}, "hold tensors for 2 modules"),
        ({"target_modules": r".*\.q_proj"}, "hold tensors for 2 modules"),
        ({"target_modules": "(a+)+"}, "was not compared"),
        (
            {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*1\.self_attn.*"},
            "hold tensors for 2 modules",
        ),
    ],
)
def test_target_modules_is_checked_against_the_tensors_that_decide(
    reference: Path, surface: ModelSurface, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    report = read_adapter(edit(reference, tmp_path / "x", config=fields), surface)[2]
    assert report.matched == 4 and said in " ".join(report.warnings)


@pytest.mark.parametrize("fields", [{}, {"target_modules": "all-linear"}, {"target_modules": None}])
def test_target_modules_that_agree_give_no_warning(
    reference: Path, surface: ModelSurface, tmp_path: Path, fields: dict[str, Any]
) -> None:
    assert read_adapter(edit(reference, tmp_path / "x", config=fields), surface)[2].warnings == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_is_folded_in_before_the_cast(reference: Path, llama: LlamaForCausalLM, dtype: torch.dtype) -> None:
    raw = load_file(reference / "adapter_model.safetensors")
    _, pairs, report, _ = read_adapter(reference, surface_of(llama, lora_dtype=dtype))
    pair = pairs["model.layers.0.self_attn.q_proj"]
    assert torch.equal(pair.b, (raw[f"{LAYER}.lora_B.weight"] * 2.0).to(dtype))
    assert torch.equal(pair.a, raw[f"{LAYER}.lora_A.weight"].to(dtype))
    assert report.num_bytes == sum(p.a.nbytes + p.b.nbytes for p in pairs.values())
    assert report.dtype == str(dtype).removeprefix("torch.")


def test_numbers_that_do_not_fit_the_serving_dtype_are_refused(
    reference: Path, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    folder = edit(reference, tmp_path / "x", config={"lora_alpha": 8e6})
    assert "--lora-dtype float32" in refusal(folder, surface_of(llama, lora_dtype=torch.float16))


def test_the_digest_follows_content_and_scale_but_not_folder_or_dtype(
    reference: Path, llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path
) -> None:
    def digest(folder: Path, where: ModelSurface = surface) -> str:
        return read_adapter(folder, where)[2].digest

    first = digest(reference)
    assert first.startswith("sha256:") and first == digest(edit(reference, tmp_path / "copy"))
    assert first == digest(reference, surface_of(llama, lora_dtype=torch.bfloat16))
    assert first != digest(edit(reference, tmp_path / "alpha", config={"lora_alpha": 9}))
    nudged = edit(reference, tmp_path / "nudged", tensors=lambda t: t | {f"{LAYER}.lora_A.weight": torch.ones(4, 64)})
    assert first != digest(nudged)


def shard(source: Path, folder: Path) -> dict[str, str]:
    """Split an adapter's weights into two files with an index; returns the index's map."""
    edit(source, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"adapter_model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_with_an_index_equal_the_single_file(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    shard(reference, tmp_path / "x")
    assert read_adapter(tmp_path / "x", surface)[2] == read_adapter(reference, surface)[2]


def test_an_index_that_does_not_match_its_shards_is_refused(
    reference: Path, surface: ModelSurface, tmp_path: Path
) -> None:
    folder = tmp_path / "x"
    weight_map = shard(reference, folder)
    names = sorted(weight_map)
    for wrong, said in (
        ({name: weight_map[name] for name in names[1:]}, "does not list"),
        (weight_map | {"ghost": weight_map[names[0]]}, "which does not hold it"),
        (weight_map | {names[0]: "../../secret.safetensors"}, "not a safetensors file of this folder"),
        (weight_map | {names[0]: "lost.safetensors"}, "does not hold it"),
        ("text", "has no weight_map"),
        ({names[0]: 3}, "has no weight_map"),
    ):
        write_index(folder, wrong)
        assert said in refusal(folder, surface)
    (folder / "adapter_model.safetensors.index.json").unlink()
    assert "add the index of the shards" in refusal(folder, surface)


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return (Path.touch, (self.marker,))


def test_a_pickle_is_never_opened_and_the_answer_says_how_to_convert(
    reference: Path, surface: ModelSurface, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    folder = edit(reference, tmp_path / "x")
    torch.save(Trap(marker), folder / "adapter_model.bin")
    assert read_adapter(folder, surface)[2].matched == 4
    (folder / "adapter_model.safetensors").unlink()
    told = refusal(folder, surface)
    assert "never opened" in told and "save_file" in told and not marker.exists()
    torch.load(folder / "adapter_model.bin", weights_only=False)
    assert marker.exists(), "the trap must work"


def test_the_conversion_that_a_refusal_gives_really_converts(
    reference: Path, surface: ModelSurface, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edit(reference, tmp_path / "x")
    weights = folder / "adapter_model.safetensors"
    torch.save(load_file(weights), folder / "adapter_model.bin")
    weights.unlink()
    command = refusal(folder, surface).split("where you trust it: ", 1)[1].split('"')[1]
    monkeypatch.chdir(folder)
    exec(command, {})
    assert read_adapter(folder, surface)[2].digest == read_adapter(reference, surface)[2].digest


def test_missing_files_say_what_is_missing(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    with pytest.raises(AdapterFilesNotFound, match="not a folder"):
        read_adapter(tmp_path / "nowhere", surface)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterFilesNotFound, match=r"no adapter_config\.json"):
        read_adapter(tmp_path / "empty", surface)
    folder = edit(reference, tmp_path / "x")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterRefused, match=r"no adapter_model\.safetensors"):
        read_adapter(folder, surface)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xff", b"[" * 100_000, b'{"r": 1e999}', b"nul"])
def test_a_config_that_is_not_json_is_refused(
    reference: Path, surface: ModelSurface, tmp_path: Path, text: bytes
) -> None:
    folder = edit(reference, tmp_path / "x")
    (folder / "adapter_config.json").write_bytes(text)
    assert "adapter_config.json" in refusal(folder, surface)


def test_a_config_that_is_a_pipe_is_not_waited_for(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    folder = edit(reference, tmp_path / "x")
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")
    assert "not a regular file" in refusal(folder, surface)


def test_links_out_of_the_allowed_folders_are_refused(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    folder = edit(reference, tmp_path / "roots" / "x")
    outside = edit(reference, tmp_path / "outside")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    assert read_adapter(folder, surface)[2].matched == 4
    with pytest.raises(AdapterRefused, match="leads out of the folders"):
        read_adapter(folder, surface, allowed_roots=[tmp_path / "roots"])


def test_files_that_are_overwritten_during_the_read_are_refused(
    reference: Path, surface: ModelSurface, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = edit(reference, tmp_path / "x")
    real = TensorFile.read_at

    def read_at(file: TensorFile, position: int, memories: Sequence[memoryview]) -> None:
        os.utime(folder / "adapter_model.safetensors", ns=(1, 1))
        real(file, position, memories)

    monkeypatch.setattr(TensorFile, "read_at", read_at)
    assert "written to while it was read" in refusal(folder, surface)


def test_a_report_survives_json(reference: Path, surface: ModelSurface) -> None:
    report = read_adapter(reference, surface)[2]
    assert AdapterReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
