"""Adapters in the layouts that trainers write give what PEFT computes, or what plain arithmetic does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Phi3ForCausalLM, Qwen2ForCausalLM

from adapters.errors import AdapterError, AdapterFilesNotFound
from adapters.folder import AdapterFolder
from adapters.plan import check_adapter, plan_adapter
from adapters.planned import AdapterPlan
from adapters.surface import ModelSurface
from adapters.weights import read_adapter
from engine.model import outline_model
from tests.adapters.layouts import capable, inner, make_phi, make_qwen, renamed_surface, split_phi_of, to_mlx, usual
from tests.adapters.world import (
    PREFIX,
    base_logits,
    edit,
    merged_logits,
    open_surface,
    peft_logits,
    save_peft,
    surface_of,
)

ASSETS = Path(__file__).resolve().parents[2] / "assets"
Tensors = dict[str, torch.Tensor]


def refusal(folder: Path, surface: ModelSurface) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, surface)
    return caught.value.message


def test_an_mlx_adapter_equals_pefts(
    llama: LlamaForCausalLM, reference: Path, surface: ModelSurface, tmp_path: Path
) -> None:
    folder = to_mlx(reference, tmp_path / "mlx")
    _, pairs, report, _ = read_adapter(folder, surface)
    _, plain, plain_report, _ = read_adapter(reference, surface)
    assert all(torch.equal(plain[name].a, pairs[name].a) for name in plain)
    assert all(torch.equal(plain[name].b, pairs[name].b) for name in plain)
    assert (report.digest, report.scale) == (plain_report.digest, 2.0) and report.warnings == []
    theirs = peft_logits(llama, reference)
    assert (theirs - base_logits(llama)).abs().max() > 0.1
    torch.testing.assert_close(merged_logits(llama, pairs), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type is 'full'"),
        ({"fine_tune_type": "dora"}, "use_dora is true, though the files hold no magnitude vectors"),
        ({"lora_parameters": None}, "has no lora_parameters"),
        ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale is None"),
        ({"lora_parameters": {"rank": 0, "scale": 2}}, "lora_parameters.rank is 0"),
        ({"lora_parameters": {"rank": 4, "scale": float("nan")}}, "must be a finite number"),
        ({"lora_parameters": {"rank": 4, "scale": 2, "alpha": 16}}, "versions of mlx-lm disagree"),
        ({"lora_parameters": {"rank": 4, "scale": 2, "zz": 1}}, "holds zz"),
        ({"lora_parameters": {"rank": 8, "scale": 2}}, "have rank 4"),
    ],
)
def test_an_mlx_config_that_does_not_say_what_is_computed_is_refused(
    reference: Path, surface: ModelSurface, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    assert said in refusal(to_mlx(reference, tmp_path / "mlx", **config), surface)


@pytest.fixture(scope="module")
def phi() -> Phi3ForCausalLM:
    return make_phi()


@pytest.fixture(scope="module")
def split_phi(phi: Phi3ForCausalLM) -> Phi3ForCausalLM:
    return split_phi_of(phi)


FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def test_an_adapter_for_fused_layers_is_served_on_them(phi: Phi3ForCausalLM, tmp_path: Path) -> None:
    folder = save_peft(phi, tmp_path / "x", target_modules=FUSED, r=5)
    _, pairs, report, _ = read_adapter(folder, surface_of(phi))
    theirs = peft_logits(phi, folder)
    assert (theirs - base_logits(phi)).abs().max() > 0.1
    torch.testing.assert_close(merged_logits(phi, pairs), theirs, atol=1e-4, rtol=1e-4)
    assert report.target_modules == sorted(FUSED) and report.warnings == []


def test_an_adapter_for_fused_layers_is_cut_for_separate_ones(
    phi: Phi3ForCausalLM, split_phi: Phi3ForCausalLM, tmp_path: Path
) -> None:
    folder = save_peft(phi, tmp_path / "x", target_modules=FUSED, r=5, rank_pattern={"qkv_proj": 3})
    _, pairs, report, _ = read_adapter(folder, renamed_surface(split_phi))
    theirs = peft_logits(phi, folder)
    ours = merged_logits(split_phi, {inner(name): pair for name, pair in pairs.items()})
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert report.num_modules == 14 and report.warnings == []
    assert report.ranks == {3: 6, 5: 8}


@pytest.mark.parametrize(
    "targets",
    [
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        ["q_proj", "v_proj"],
        ["q_proj"],
        ["k_proj", "up_proj"],
        ["v_proj"],
    ],
)
def test_an_adapter_for_separate_layers_is_joined_for_fused_ones(
    phi: Phi3ForCausalLM, split_phi: Phi3ForCausalLM, tmp_path: Path, targets: list[str]
) -> None:
    folder = save_peft(split_phi, tmp_path / "x", target_modules=targets, r=3)
    usual_names = edit(folder, tmp_path / "y", key=usual)
    pairs = read_adapter(usual_names, surface_of(phi)).pairs
    theirs = peft_logits(split_phi, folder)
    assert (theirs - base_logits(phi)).abs().max() > 0.05
    torch.testing.assert_close(merged_logits(phi, pairs), theirs, atol=1e-4, rtol=1e-4)


def test_parts_that_a_fused_layer_cannot_take_are_refused(
    phi: Phi3ForCausalLM, split_phi: Phi3ForCausalLM, tmp_path: Path
) -> None:
    targets = ["q_proj", "k_proj", "v_proj"]
    scales = save_peft(split_phi, tmp_path / "a", target_modules=targets, alpha_pattern={"k_proj": 99})
    assert "different scales (2, 24.75)" in refusal(edit(scales, tmp_path / "b", key=usual), surface_of(phi))

    def shorten(tensors: Tensors) -> Tensors:
        return {name: value[:-1] if "k_proj.lora_B" in name else value for name, value in tensors.items()}

    plain = save_peft(split_phi, tmp_path / "c", target_modules=targets)
    short = edit(plain, tmp_path / "d", key=usual, tensors=shorten)
    assert "do not fit" in refusal(short, surface_of(phi))
    fused = save_peft(phi, tmp_path / "e", target_modules=["qkv_proj"])

    def cut(tensors: Tensors) -> Tensors:
        return {name: value[:-8] if "lora_B" in name else value for name, value in tensors.items()}

    told = refusal(edit(fused, tmp_path / "f", tensors=cut), renamed_surface(split_phi))
    assert "q_proj, k_proj, v_proj there, 128 output features in all" in told


def test_a_fused_and_a_separate_spelling_of_one_layer_are_refused(
    phi: Phi3ForCausalLM, split_phi: Phi3ForCausalLM, tmp_path: Path
) -> None:
    fused = load_file(save_peft(phi, tmp_path / "a", target_modules=["qkv_proj"]) / "adapter_model.safetensors")
    split = edit(save_peft(split_phi, tmp_path / "b", target_modules=["q_proj"]), tmp_path / "c", key=usual)
    both = edit(split, tmp_path / "d", tensors=lambda tensors: tensors | fused)
    assert "two names lead to one layer" in refusal(both, surface_of(phi))
    assert "two names lead to one layer" in refusal(both, renamed_surface(split_phi))


def test_overlapping_rank_patterns_are_read_though_peft_sorts_them_when_it_saves(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path
) -> None:
    """In training the first entry counts, in the file another one is first: the tensors say which it was."""
    patterns = {"q_proj": 2, "layers.0.self_attn.q_proj": 3}
    folder = save_peft(llama, tmp_path / "x", target_modules=["q_proj"], r=4, lora_alpha=8, rank_pattern=patterns)
    saved = json.loads((folder / "adapter_config.json").read_text())["rank_pattern"]
    assert list(saved) != list(patterns)
    _, pairs, report, _ = read_adapter(folder, surface)
    # alpha over the rank that was trained
    assert report.ranks == {2: 2} and report.scales == {4.0: 2}
    raw = load_file(folder / "adapter_model.safetensors")
    q = "model.layers.0.self_attn.q_proj"
    assert torch.equal(pairs[q].b, raw[f"{PREFIX}{q}.lora_B.weight"] * 4.0)


def test_overlapping_alpha_patterns_are_warned_about(
    llama: LlamaForCausalLM, surface: ModelSurface, tmp_path: Path
) -> None:
    patterns = {"layers.0.self_attn.q_proj": 64, "q_proj": 32}
    folder = save_peft(llama, tmp_path / "x", target_modules=["q_proj"], alpha_pattern=patterns)
    warnings = read_adapter(folder, surface)[2].warnings
    assert (
        len(warnings) == 1 and "several entries of alpha_pattern match model.layers.0.self_attn.q_proj;" in warnings[0]
    )


SPEECH_NAMES: dict[str, Callable[[str], str]] = {
    "its own": lambda name: name.removeprefix(PREFIX).replace("model.language_model.", "language_model.model."),
    "transformers 4": lambda name: name.replace("model.language_model.", "language_model.model."),
    "transformers 5, doubled": lambda name: name.replace("model.language_model.", "model.language_model.model."),
    "the text model alone": lambda name: name.replace("model.language_model.", "model."),
}


@pytest.mark.parametrize("names", SPEECH_NAMES)
def test_names_of_every_version_reach_the_text_model_inside_a_speech_model(tmp_path: Path, names: str) -> None:
    surface = outline_model(str(ASSETS / "models" / "tiny-speech")).surface(max_lora_rank=64, lora_dtype=torch.float32)
    adapter = ASSETS / "adapters" / "speech"
    spelled = edit(adapter, tmp_path / "x", key=SPEECH_NAMES[names])
    assert (
        load_file(spelled / "adapter_model.safetensors").keys()
        != load_file(adapter / "adapter_model.safetensors").keys()
    )
    _, plain, report, _ = read_adapter(adapter, surface)
    _, renamed, renamed_report, _ = read_adapter(spelled, surface)
    assert renamed.keys() == plain.keys() and renamed_report.digest == report.digest
    assert all(name.startswith("model.language_model.layers.") for name in plain)


def test_several_adapters_of_one_file_are_refused(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    def embedded(tensors: Tensors) -> Tensors:
        names = {name: name.replace(".weight", f".{which}.weight") for name in tensors for which in ("speech",)}
        speech = {names[name]: value for name, value in tensors.items()}
        return speech | {name.replace("speech", "vision"): value.clone() for name, value in speech.items()}

    told = refusal(edit(reference, tmp_path / "x", tensors=embedded), surface)
    assert "several adapters (speech, vision)" in told


def test_a_folder_that_holds_adapters_one_level_down_names_them(
    reference: Path, surface: ModelSurface, tmp_path: Path
) -> None:
    for name in ("speech-lora", "vision-lora"):
        edit(reference, tmp_path / "both" / name)
    with pytest.raises(AdapterFilesNotFound, match="its sub-folders speech-lora, vision-lora have one"):
        read_adapter(tmp_path / "both", surface)


def test_kohya_and_mlx_vlm_are_refused_by_name(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    def kohya(tensors: Tensors) -> Tensors:
        return {f"lora_te_{name.replace('.', '_')}.lora_down.weight": value for name, value in tensors.items()}

    assert "diffusion trainers (kohya" in refusal(edit(reference, tmp_path / "x", tensors=kohya), surface)
    mlx_vlm = edit(reference, tmp_path / "y", key=lambda name: name.replace("lora_", "").removesuffix(".weight"))
    assert "format of mlx-vlm" in refusal(mlx_vlm, surface)


@pytest.fixture(scope="module")
def qwen() -> Qwen2ForCausalLM:
    return make_qwen()


COPIES: list[dict[str, Any]] = [
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "norm"]},
    {"bias": "all"},
    {"bias": "lora_only"},
]


@pytest.mark.parametrize("settings", COPIES, ids=str)
@pytest.mark.parametrize("base", ["llama", "qwen"])
def test_copies_of_base_weights_are_served_where_they_are_equal(
    base: str, llama: LlamaForCausalLM, qwen: Qwen2ForCausalLM, tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = {"llama": llama, "qwen": qwen}[base]
    folder = save_peft(model, tmp_path / "x", **settings)
    _, pairs, report, _ = read_adapter(folder, open_surface(model))
    torch.testing.assert_close(merged_logits(model, pairs), peft_logits(model, folder), atol=1e-4, rtol=1e-4)
    assert report.matched == 4


@pytest.mark.parametrize("settings", COPIES, ids=str)
def test_copies_that_differ_in_one_number_are_refused(
    qwen: Qwen2ForCausalLM, tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = save_peft(qwen, tmp_path / "x", **settings)

    def nudge(tensors: Tensors) -> Tensors:
        name = next(name for name in tensors if "lora_" not in name)
        value = tensors[name].clone()
        value.view(-1)[-1] += 1e-3
        return tensors | {name: value}

    told = refusal(edit(folder, tmp_path / "y", tensors=nudge), open_surface(qwen))
    assert "differ from the base model's in 1 of" in told
    assert ("bias='none'" if "bias" in settings else "merge the adapter") in told


@pytest.mark.parametrize("save", [True, False])
def test_embeddings_that_peft_saves_beside_the_adapter_are_compared(
    llama: LlamaForCausalLM, tmp_path: Path, save: bool
) -> None:
    """`save_embedding_layers=True` writes `embed_tokens.weight` and `lm_head.weight`."""
    folder = save_peft(llama, tmp_path / "x")

    def with_tables(tensors: Tensors) -> Tensors:
        tables = {"model.embed_tokens.weight": llama.model.embed_tokens.weight, "lm_head.weight": llama.lm_head.weight}
        return tensors | {PREFIX + name: value.detach() * (1 if save else 2) for name, value in tables.items()}

    saved = edit(folder, tmp_path / "y", tensors=with_tables)
    if save:
        assert read_adapter(saved, open_surface(llama))[2].digest == read_adapter(folder, surface_of(llama))[2].digest
    else:
        assert "differ from the base model's in 128 of 128 rows" in refusal(saved, open_surface(llama))


@pytest.mark.parametrize(("file", "base"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_copy_in_another_precision_is_equal_when_rounding_makes_it_so(
    llama: LlamaForCausalLM, tmp_path: Path, file: torch.dtype, base: torch.dtype
) -> None:
    table = llama.model.norm.weight.detach().clone().uniform_(0.5, 1.5)
    served = table.to(base)

    def with_norm(tensors: Tensors) -> Tensors:
        return tensors | {f"{PREFIX}model.norm.weight": table.to(file)}

    surface = open_surface(llama, base_tensor={"model.norm.weight": served}.get)
    folder = edit(save_peft(llama, tmp_path / "x"), tmp_path / "y", tensors=with_norm)
    assert read_adapter(folder, surface)[2].matched == 4
    served[3] += 0.25
    assert "differ from the base model's in 1 of 64 rows" in refusal(folder, surface)


def test_a_table_with_fewer_rows_keeps_the_models_further_ones(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    def shorter(tensors: Tensors) -> Tensors:
        return tensors | {f"{PREFIX}model.embed_tokens.weight": llama.model.embed_tokens.weight[:120].detach().clone()}

    folder = edit(save_peft(llama, tmp_path / "x"), tmp_path / "y", tensors=shorter)
    assert "further rows are kept" in " ".join(read_adapter(folder, open_surface(llama))[2].warnings)


def test_full_weights_of_other_shapes_or_names_are_refused(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    plain = save_peft(llama, tmp_path / "x")
    for name, said in (
        ("model.norm.weight", "is [3], but the model's is [64]"),
        ("model.blocks.0.weight", "full weight matrices"),
        ("model.embed_tokens.weight", "is [3], but the model's is [128, 64]"),
    ):
        folder = edit(plain, tmp_path / name, tensors=lambda t, name=name: t | {PREFIX + name: torch.ones(3)})  # type: ignore[misc]
        assert said in refusal(folder, open_surface(llama))


def test_biases_that_the_config_promises_must_be_there(qwen: Qwen2ForCausalLM, tmp_path: Path) -> None:
    """Some versions of PEFT saved none with `lora_only`; without them the adapter is another one."""
    folder = edit(save_peft(qwen, tmp_path / "x"), tmp_path / "y", config={"bias": "lora_only"})
    assert "the files hold no biases" in refusal(folder, open_surface(qwen))


def test_modules_that_the_config_promises_must_be_there(
    reference: Path, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    for config, said in (
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names lm_head, but the files hold no weights"),
        ({"trainable_token_indices": [1]}, "the files hold no rows"),
        ({"lora_bias": True}, "holds no biases of lora_B"),
    ):
        folder = edit(reference, tmp_path / said.replace(" ", "-"), config=config)
        assert said in refusal(folder, open_surface(llama))


def plan(folder: Path, surface: ModelSurface, look: Callable[[AdapterPlan], Any]) -> Any:
    """Look at a plan while its files are open."""
    with AdapterFolder(folder) as files:
        return look(plan_adapter(files, surface))


def test_a_plan_holds_doras_magnitudes_whole_and_cut(
    phi: Phi3ForCausalLM, split_phi: Phi3ForCausalLM, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    folder = save_peft(phi, tmp_path / "x", target_modules=["qkv_proj"], use_dora=True)
    raw = load_file(folder / "adapter_model.safetensors")
    key = f"{PREFIX}model.layers.0.self_attn.qkv_proj.lora_magnitude_vector"
    surface = renamed_surface(split_phi, serves_dora=True)
    read = plan(folder, surface, lambda made: made.pairs["model.layers.0.self_attn.k_proj"].magnitude.read())
    assert torch.equal(read, raw[key][64:96])
    mlx = to_mlx(save_peft(llama, tmp_path / "y", use_dora=True), tmp_path / "z", fine_tune_type="dora")
    q = "model.layers.0.self_attn.q_proj"
    magnitude = plan(mlx, surface_of(llama, serves_dora=True), lambda made: made.pairs[q].magnitude.read())
    theirs = load_file(tmp_path / "y" / "adapter_model.safetensors")
    assert torch.equal(magnitude, theirs[f"{PREFIX}{q}.lora_magnitude_vector"])

    def drop(tensors: Tensors) -> Tensors:
        return {name: value for name, value in tensors.items() if "1.self_attn.v_proj.lora_mag" not in name}

    partial = edit(tmp_path / "y", tmp_path / "partial", tensors=drop)
    assert "the magnitude vector is missing for" in refusal(partial, surface_of(llama, serves_dora=True))


def test_a_plan_holds_biases(qwen: Qwen2ForCausalLM, tmp_path: Path) -> None:
    trained = save_peft(qwen, tmp_path / "x", bias="all")
    biases = plan(trained, capable(qwen), lambda made: dict(made.biases))
    assert len(biases) == 6 and all(bias.replaces and bias.scale == 1.0 for bias in biases.values())
    of_lora = save_peft(qwen, tmp_path / "y", lora_bias=True)
    biases = plan(of_lora, capable(qwen), lambda made: dict(made.biases))
    assert len(biases) == 4 and all(not bias.replaces and bias.scale == 2.0 for bias in biases.values())
    silent = edit(of_lora, tmp_path / "silent", config={"lora_bias": False})
    with pytest.raises(AdapterError, match="lora_bias is false, but"):
        check_adapter(silent, capable(qwen))


def test_a_plan_holds_pairs_of_embeddings(llama: LlamaForCausalLM, qwen: Qwen2ForCausalLM, tmp_path: Path) -> None:
    targets = ["embed_tokens", "q_proj"]
    made = check_adapter(save_peft(llama, tmp_path / "x", target_modules=targets), capable(llama))
    pair = made.embeddings["model.embed_tokens"]
    assert (pair.a.shape, pair.b.shape, pair.scale, pair.also_head) == ((4, 128), (64, 4), 2.0, False)
    # PEFT saves the base's table beside a targeted embedding
    assert [one.tensor_name for one in made.copies] == ["model.embed_tokens.weight"]
    tied = save_peft(qwen, tmp_path / "y", target_modules=targets, ensure_weight_tying=True)
    made = check_adapter(tied, capable(qwen))
    assert "lm_head" in made.pairs and not made.embeddings["model.embed_tokens"].also_head

    def drop_head(tensors: Tensors) -> Tensors:
        return {name: value for name, value in tensors.items() if "lm_head" not in name}

    headless = edit(tied, tmp_path / "z", tensors=drop_head)
    assert check_adapter(headless, capable(qwen)).embeddings["model.embed_tokens"].also_head
    loose = edit(headless, tmp_path / "loose", config={"ensure_weight_tying": False})
    assert not check_adapter(loose, capable(qwen)).embeddings["model.embed_tokens"].also_head


def test_a_plan_holds_the_rows_of_trained_tokens(
    llama: LlamaForCausalLM, qwen: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    rows = check_adapter(save_peft(llama, tmp_path / "x", trainable_token_indices=[7, 2]), capable(llama)).rows
    assert {name: one.token_ids for name, one in rows.items()} == {"model.embed_tokens": (7, 2)}
    tied = check_adapter(save_peft(qwen, tmp_path / "y", trainable_token_indices=[7, 2]), capable(qwen)).rows
    assert {name: one.token_ids for name, one in tied.items()} == {"lm_head": (7, 2), "model.embed_tokens": (7, 2)}
    by_name = {"embed_tokens": [1], "lm_head": [2, 3]}
    both = check_adapter(save_peft(llama, tmp_path / "z", trainable_token_indices=by_name), capable(llama)).rows
    assert {name: one.token_ids for name, one in both.items()} == {"lm_head": (2, 3), "model.embed_tokens": (1,)}


@pytest.mark.parametrize("num_added", [2, 5])
def test_a_plan_holds_added_tokens_within_the_bound(
    llama: LlamaForCausalLM, reference: Path, tmp_path: Path, num_added: int
) -> None:
    table = torch.cat([llama.model.embed_tokens.weight.detach(), torch.ones(num_added, 64)])
    resized = edit(reference, tmp_path / "x", tensors=lambda t: t | {f"{PREFIX}model.embed_tokens.weight": table})
    appended = edit(reference, tmp_path / "y")
    save_file({"input_embeddings": torch.ones(num_added, 64)}, appended / "new_embeddings.safetensors")
    for folder in (resized, appended):
        if num_added > 4:
            with pytest.raises(AdapterError, match="start it with --lora-extra-vocab-size 5"):
                check_adapter(folder, capable(llama))
            continue
        made = check_adapter(folder, capable(llama))
        assert made.rows["model.embed_tokens"].token_ids == (128, 129) and made.num_added_tokens == 2
        ones = plan(folder, capable(llama), lambda made: made.rows["model.embed_tokens"].rows.read())
        assert torch.equal(ones, torch.ones(2, 64))
    assert "added token embeddings are not served" in refusal(resized, open_surface(llama))


def test_faults_of_rows_and_added_tokens_are_refused(reference: Path, llama: LlamaForCausalLM, tmp_path: Path) -> None:
    key = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
    cases: list[tuple[dict[str, Any], Tensors, str]] = [
        ({"trainable_token_indices": [1, 2]}, {key: torch.ones(3, 64)}, "lists 2 tokens there"),
        (
            {"trainable_token_indices": {"lm_head": [1]}},
            {key: torch.ones(1, 64)},
            "has no entry of trainable_token_indices",
        ),
        ({"trainable_token_indices": [1]}, {key: torch.ones(1, 32)}, "rows are 32 wide"),
        ({"trainable_token_indices": [500]}, {key: torch.ones(1, 64)}, "--lora-extra-vocab-size 373"),
    ]
    for number, (config, tensors, said) in enumerate(cases):
        folder = edit(reference, tmp_path / str(number), config=config, tensors=lambda t, new=tensors: t | new)  # type: ignore[misc]
        with pytest.raises(AdapterError) as caught:
            check_adapter(folder, capable(llama))
        assert said in caught.value.message
