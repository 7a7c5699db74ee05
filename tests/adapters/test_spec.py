"""What a config says, and what is refused because of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import AdapterRefused
from adapters.spec import AdapterSpec, parse_spec, scale_for


def config(**fields: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]} | fields


def reasons(**fields: Any) -> str:
    with pytest.raises(AdapterRefused) as caught:
        parse_spec(config(**fields))
    return " | ".join(caught.value.reasons)


def test_a_config_that_peft_writes_is_understood_whole(reference: Path) -> None:
    spec = parse_spec(json.loads((reference / "adapter_config.json").read_text()))
    assert (spec.rank, spec.alpha, spec.use_rslora) == (4, 8.0, False)
    assert set(spec.target_modules or ()) == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_alpha": 16.0},
        {"r": "8"},
        {"r": 8.0, "lora_alpha": "16"},
        {"use_rslora": None, "rank_pattern": None, "alpha_pattern": None, "bias": None},
        {"use_rslora": "false", "modules_to_save": []},
        {"target_modules": None},
        {"peft_type": "lora"},
    ],
)
def test_odd_json_types_that_mean_the_same_give_the_same_spec(fields: dict[str, Any]) -> None:
    spec = parse_spec(config(**fields))
    assert (spec.rank, spec.alpha, spec.use_rslora) == (8, 16.0, False)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"r": "many"}, "r in adapter_config.json is 'many'"),
        ({"r": 0}, "must be a whole number of 1 or more"),
        ({"r": 4.5}, "must be a whole number"),
        ({"r": True}, "must be a whole number"),
        ({"r": [8]}, "must be a whole number"),
        ({"r": None}, "has no r"),
        ({"r": 10**400}, "must be a whole number"),
        ({"lora_alpha": None}, "has no lora_alpha"),
        ({"lora_alpha": float("nan")}, "must be a finite number"),
        ({"lora_alpha": {}}, "must be a finite number"),
        ({"use_rslora": "maybe"}, "must be true or false"),
        ({"target_modules": 5}, "must be a list of module names"),
        ({"target_modules": [1, 2]}, "must be a list of module names"),
        ({"layers_to_transform": ["x"]}, "must be a layer number"),
        ({"layers_pattern": {"a": 1}}, "must be a name or a list"),
        ({"rank_pattern": [1]}, "must be an object"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern['q_proj']"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
        ({"alpha_pattern": {"q_(": 3}}, "is not a regular expression"),
        ({"alpha_pattern": {"(a+)+": 3}}, "a repeat inside a repeat"),
        ({"base_model_name_or_path": 3}, "must be a text or null"),
        ({"bias": "some"}, "must be none, all or lora_only"),
        ({"modules_to_save": [1]}, "modules_to_save in adapter_config.json is a list"),
        ({"lora_bias": "perhaps"}, "must be true or false"),
        ({"trainable_token_indices": [1, 1]}, "must be a list of different token ids"),
        ({"trainable_token_indices": [-1]}, "must be a list of different token ids"),
        ({"trainable_token_indices": {"embed_tokens": 3}}, "must be a list of different token ids"),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(fields: dict[str, Any], said: str) -> None:
    assert said in reasons(**fields)


@pytest.mark.parametrize("top", [None, [], "text", 3, [["r", 8]]])
def test_a_config_that_is_no_object_is_refused(top: Any) -> None:
    with pytest.raises(AdapterRefused, match="must hold a JSON object"):
        parse_spec(top)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "mlp.experts.gate_up_proj"),
        ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1, 2]}, "activated LoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"arrow_config": {"top_k": 3}}, "Arrow"),
        ({"kasa_config": {"x": 1}}, "KaSA"),
        ({"monteclora_config": {"x": 1}}, "MonteCLoRA"),
        ({"megatron_config": {"x": 1}}, "Megatron"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "pissa_niter_16"}, "also changes the base model's weights"),
        ({"init_lora_weights": "olora"}, "also changes the base model's weights"),
        ({"init_lora_weights": "corda"}, "also changes the base model's weights"),
        ({"init_lora_weights": "loftq"}, "also changes the base model's weights"),
        ({"init_lora_weights": "brand_new"}, "not known here"),
        ({"zz_future": {"mode": "x"}}, "'zz_future'"),
        ({"zz_future": 3}, "set it to null"),
    ],
)
def test_fields_that_change_the_maths_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    assert said in reasons(**fields)


def test_all_faults_are_told_at_once() -> None:
    told = reasons(r=None, bias="some", use_qalora=True, zz_future=1)
    assert all(word in told for word in ("has no r", "bias", "use_qalora", "zz_future"))


def test_what_was_trained_beside_lora_is_kept_for_the_plan() -> None:
    spec = parse_spec(
        config(bias="lora_only", lora_bias=True, modules_to_save=["lm_head"], trainable_token_indices=[5, 9])
    )
    assert (spec.bias, spec.lora_bias, spec.modules_to_save) == ("lora_only", True, ("lm_head",))
    assert spec.trainable_tokens == {"": (5, 9)}
    by_module = parse_spec(config(trainable_token_indices={"embed_tokens": [1], "lm_head": [2, 3]}))
    assert by_module.trainable_tokens == {"embed_tokens": (1,), "lm_head": (2, 3)}


@pytest.mark.parametrize("kind", ["LOHA", "LOKR", "VERA", "RANDLORA"])
def test_kinds_that_peft_can_convert_are_refused_with_the_conversion(kind: str) -> None:
    assert "save_as_lora" in reasons(peft_type=kind)


def test_the_kinds_said_to_be_convertible_are_those_that_peft_converts() -> None:
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    from adapters.config_fields import CONVERTIBLE_KINDS

    known = {kind.name for kind in PEFT_TYPE_TO_TUNER_MAPPING}
    assert known >= CONVERTIBLE_KINDS, CONVERTIBLE_KINDS - known


@pytest.mark.parametrize("kind", ["IA3", "PREFIX_TUNING", "PROMPT_TUNING", "ADALORA", 3, ["LORA"]])
def test_other_kinds_are_refused_with_another_remedy(kind: Any) -> None:
    told = reasons(peft_type=kind)
    assert "only LORA is served" in told and "save_as_lora" not in told


def test_neutral_unknown_fields_are_ignored_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    neutral = {
        "corda_config": None, "eva_config": None, "exclude_modules": None, "trainable_token_indices": None,
        "lora_bias": False, "arrow_config": None, "alora_invocation_tokens": None, "qalora_group_size": 16,
        "target_parameters": None, "ensure_weight_tying": False, "use_bdlora": None, "lora_ga_config": None,
        "monteclora_config": None, "velora_config": None, "kasa_config": None, "peft_version": "0.99.0",
    }  # fmt: skip
    with caplog.at_level(logging.INFO, "adapters.spec"):
        parse_spec(config(**neutral, zz_future=None, zz_list=[], zz_flag=False))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3 and all("zz_" in line for line in told)


def test_neutral_unknown_fields_are_named_in_one_warning() -> None:
    spec = parse_spec(config(zz_future=None, zz_list=[], corda_config=None))
    assert len(spec.warnings) == 1 and "'zz_future', 'zz_list'" in spec.warnings[0]


def test_every_field_of_the_installed_peft_has_a_meaning_here() -> None:
    from peft import LoraConfig

    from adapters.config_fields import INERT_FIELDS, READ_FIELDS, REFUSED_FIELDS

    fields = set(LoraConfig(target_modules=["q_proj"]).to_dict())
    assert fields <= READ_FIELDS | INERT_FIELDS | set(REFUSED_FIELDS)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_scale_is_alpha_over_rank_or_over_its_root(use_rslora: bool) -> None:
    spec = AdapterSpec(rank=16, alpha=32.0, use_rslora=use_rslora)
    assert scale_for(spec, "model.layers.0.self_attn.q_proj", 16) == (8.0 if use_rslora else 2.0)


def test_the_first_alpha_pattern_that_matches_decides() -> None:
    spec = AdapterSpec(rank=8, alpha=16.0, alpha_pattern={"q_proj": 32.0, "layers.0.self_attn.q_proj": 64.0})
    assert [scale_for(spec, f"model.layers.{layer}.self_attn.q_proj", 8) for layer in (0, 1)] == [4.0, 4.0]


def test_a_pattern_may_be_written_on_the_models_name_of_the_layer() -> None:
    spec = AdapterSpec(rank=8, alpha=16.0, alpha_pattern={"^model.language_model.layers.0.q": 64.0})
    assert scale_for(spec, "language_model.model.layers.0.q", 8, "model.language_model.layers.0.q") == 8.0
    assert scale_for(spec, "language_model.model.layers.0.q", 8) == 2.0
