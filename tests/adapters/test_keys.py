"""Names of tensors, in every spelling that trainers write, lead to one layer or to a refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adapters import keys
from adapters.keys import KeyResolver, split_key
from adapters.surface import LinearSite, ModelSurface

Q = "model.layers.0.self_attn.q_proj"


def surface(*names: str, **settings: object) -> ModelSurface:
    return ModelSurface("base", {name: LinearSite(name, 8, 8) for name in names}, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "module", "kind", "adapter"),
    [
        (f"base_model.model.{Q}.lora_A.weight", Q, "A", None),
        (f"base_model.model.{Q}.lora_B.default.weight", Q, "B", "default"),
        (f"{Q}.lora_A.speech.weight", Q, "A", "speech"),
        (f"_orig_mod.base_model.model.{Q}.lora_A.weight", Q, "A", None),
        (f"base_model.model._orig_mod.{Q}.lora_A.weight", Q, "A", None),
        ("base_model.model.model.layers.0._fsdp_wrapped_module.self_attn.q_proj.lora_A.weight", Q, "A", None),
        ("model.layers.0._checkpoint_wrapped_module.self_attn.q_proj.lora_A.weight", Q, "A", None),
        (f"module.base_model.model.{Q}.lora_B.weight", Q, "B", None),
        (f"base_model.model.base_model.model.{Q}.lora_B.weight", Q, "B", None),
        (f"base_model.model.{Q}.lora_magnitude_vector", Q, "magnitude", None),
        (f"base_model.model.{Q}.lora_magnitude_vector.weight", Q, "magnitude", None),
        (f"base_model.model.{Q}.lora_magnitude_vector.default.weight", Q, "magnitude", "default"),
        (f"base_model.model.{Q}.lora_B.bias", Q, "lora_bias", None),
        (f"base_model.model.{Q}.lora_B.default.bias", Q, "lora_bias", "default"),
        (f"base_model.model.{Q}.bias", Q, "bias", None),
        (f"base_model.model.{Q}.base_layer.bias", Q, "bias", None),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "model.embed_tokens", "embedding_a", None),
        ("base_model.model.model.embed_tokens.lora_embedding_B.default", "model.embed_tokens", "embedding_b", "default"),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "model.embed_tokens", "rows", None,
        ),
        ("base_model.model.lm_head.weight", "lm_head", "full", None),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head", "full", None),
        ("base_model.model.lm_head.base_layer.weight", "lm_head", "full", None),
        (f"base_model.model.{Q}.lora_diag", Q, "diag", None),
        ("base_model.model.model.projector.linear.weight", "model.projector.linear", "full", None),
        (f"{Q}.lora_a", Q, "A", None),
        (f"{Q}.lora_b", Q, "B", None),
        (f"{Q}.m", Q, "magnitude", None),
        (f"{Q}.A", Q, "mlx_vlm", None),
        ("lora_unet_down_blocks_0.lora_down.weight", "lora_unet_down_blocks_0", "kohya", None),
        ("lora_te_text_model.alpha", "lora_te_text_model", "kohya", None),
        (f"base_model.model.module.module.{Q}.lora_A.weight", Q, "A", None),
        (f"base_model.model.{Q}.hada_w1_a", f"{Q}.hada_w1_a", "other", None),
    ],
)  # fmt: skip
def test_a_name_is_taken_apart(raw: str, module: str, kind: str, adapter: str | None) -> None:
    key = split_key(raw)
    assert (key.module, key.kind, key.adapter) == (module, kind, adapter)


SPEECH = surface(
    "model.language_model.layers.0.self_attn.q_proj",
    "model.encoder.layers.0.attn.to_q",
    "model.projector.linear",
    unsupported={"model.language_model.embed_tokens": "no embeddings"},
)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
        ("language_model.model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
        ("model.language_model.model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
        ("model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
        ("layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
        ("encoder.layers.0.attn.to_q", "model.encoder.layers.0.attn.to_q"),
        ("projector.linear", "model.projector.linear"),
    ],
)
def test_names_of_other_versions_and_wrappings_lead_to_the_layer(written: str, meant: str) -> None:
    assert KeyResolver(SPEECH).resolve(written).name == meant


@pytest.mark.parametrize(
    "written",
    [
        "model.layers.7.self_attn.q_proj",
        "audio_model.layers.0.self_attn.q_proj",
        "model.language_model.layers.0.self_attn.q_projector",
        "model.language_model.layers.0.q_proj",
        "",
        "model",
    ],
)
def test_names_that_no_layer_has_lead_nowhere(written: str) -> None:
    assert KeyResolver(SPEECH).resolve(written).name is None


def test_a_vision_tower_is_found_under_its_old_name() -> None:
    new = "model.vision_tower.encoder.layers.0.fc1"
    resolver = KeyResolver(surface(new))
    assert resolver.resolve("vision_tower.vision_model.encoder.layers.0.fc1").name == new


def test_a_name_that_fits_two_layers_is_ambiguous() -> None:
    both = ("model.layers.0.fc", "language_model.layers.0.fc")
    landing = KeyResolver(surface(*both)).resolve("layers.0.fc")
    assert landing.name is None and set(landing.candidates) == set(both)


def test_a_full_name_is_not_ambiguous_beside_a_similar_one() -> None:
    resolver = KeyResolver(surface("model.layers.0.fc", "language_model.layers.0.fc"))
    assert resolver.resolve("model.layers.0.fc").name == "model.layers.0.fc"


def test_the_models_own_rename_decides_before_similarity() -> None:
    renames = {"old.fc": "new.fc"}
    resolver = KeyResolver(surface("new.fc", "model.old.fc", rename_key=lambda name: renames.get(name, name)))
    assert resolver.resolve("old.fc").name == "new.fc"


def test_a_child_of_an_unsupported_module_has_its_reason() -> None:
    experts = surface(Q, unsupported={"model.layers.0.mlp.experts": "expert LoRA is not served"})
    resolver = KeyResolver(experts)
    assert resolver.why_unsupported("model.layers.0.mlp.experts.3.gate_proj") == "expert LoRA is not served"
    assert resolver.why_unsupported(Q) is None


def test_what_names_mean_is_worked_out_once_and_for_a_bounded_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_NUM_REMEMBERED", 3)
    asked: list[str] = []

    def rename(name: str) -> str:
        asked.append(name)
        return f"model.{name}"

    long = "x" * 600
    resolver = KeyResolver(surface("model.a", "model.b", "model.c", "model.d", f"model.{long}", rename_key=rename))
    for _ in range(2):
        assert [resolver.resolve(name).name for name in (long, *"abcde")] == [
            f"model.{long}", *(f"model.{name}" for name in "abcd"), None,
        ]  # fmt: skip
    assert asked == [long, *"abcde", long, *"de"]


def test_a_surface_has_its_own_names_and_a_changed_one_others() -> None:
    first = surface("model.a")
    second = replace(first, linears=surface("model.b").linears)
    assert first.names is first.names
    assert [one.names.modules.resolve("a").name for one in (first, second)] == ["model.a", None]
    assert [one.names.linears.resolve("b").name for one in (first, second)] == [None, "model.b"]
