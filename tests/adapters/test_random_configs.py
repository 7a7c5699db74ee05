"""Random PEFT configs on small models of several architectures: what is read gives PEFT's own logits.

Each case is a draw of targets, ranks, patterns, scales, layers, exclusions, types and key spellings from its seed.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from adapters.weights import read_adapter
from engine.model import _key_renamer
from tests.adapters.world import (
    PREFIX,
    base_logits,
    edit,
    make_llama,
    merged_logits,
    peft_logits,
    save_peft,
    surface_of,
)

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_llava() -> nn.Module:
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIZES), image_token_id=127)
    return LlavaForConditionalGeneration(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": make_llama,
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=12, tie_word_embeddings=True)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=2.0, attention_multiplier=0.25)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)),
    "llava": make_llava,
}
SPELLINGS: dict[str, Callable[[str], str]] = {
    "plain": lambda name: name,
    "no prefix": lambda name: name.removeprefix(PREFIX),
    "compiled": lambda name: name.replace(PREFIX, f"{PREFIX}_orig_mod."),
    "fsdp": lambda name: name.replace(".self_attn", "._fsdp_wrapped_module.self_attn"),
    "ddp": lambda name: "module." + name,
    "in memory": lambda name: name.replace(".weight", ".default.weight"),
    # how transformers 4 named a language model inside a multimodal one
    "transformers 4": lambda name: name.replace("model.language_model.layers", "language_model.model.layers"),
}


def draw_config(draw: random.Random, model: nn.Module) -> dict[str, Any]:
    """A LoRA config that touches at least one layer of the decoder; entries of patterns in the order in which PEFT saves."""
    leaves = draw.sample(LEAVES, draw.randint(1, len(LEAVES)))
    config: dict[str, Any] = {
        "r": draw.choice([1, 2, 3, 5, 8, 13]),
        "lora_alpha": draw.choice([1, 7, 16, 2.5]),
        "use_rslora": draw.random() < 0.4,
        "target_modules": draw.choice([leaves, rf".*\.layers\.\d+\..*\.(?:{'|'.join(leaves)})", "all-linear"]),
    }
    if isinstance(model, LlavaForConditionalGeneration):
        # PEFT's oracle runs text alone, where a tower's LoRA does nothing
        config["exclude_modules"] = r".*(vision_tower|projector).*"
    elif draw.random() < 0.3:
        config["exclude_modules"] = [f"layers.1.self_attn.{draw.choice(LEAVES[:4])}"]
    if draw.random() < 0.5:
        keys = [
            draw.choice(leaves),
            rf".*\.layers\.{draw.randint(0, 1)}\..*",
            f"layers.0.self_attn.{draw.choice(LEAVES[:4])}",
        ]
        config["rank_pattern"] = {key: draw.choice([1, 4, 6]) for key in sorted(draw.sample(keys, draw.randint(1, 3)))}
    if draw.random() < 0.5:
        keys = [draw.choice(leaves), rf".*layers\.{draw.randint(0, 1)}\.mlp\..*", rf"^.*\.{draw.choice(leaves)}"]
        config["alpha_pattern"] = {
            key: draw.choice([3, 20, 0.5]) for key in sorted(draw.sample(keys, draw.randint(1, 3)))
        }
    if isinstance(config["target_modules"], list) and draw.random() < 0.3:
        config["layers_to_transform"] = draw.choice([0, [1], [0, 1]])
    return config


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    made = {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        made[name] = make().eval()
        with torch.no_grad():
            for key, parameter in made[name].named_parameters():
                if key.endswith("bias"):
                    parameter.normal_(0, 0.3)
    return made


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MODELS)
def test_a_random_config_gives_pefts_logits(models: dict[str, nn.Module], tmp_path: Path, name: str, seed: int) -> None:
    draw, model = random.Random(f"{name} {seed}"), models[name]
    config = draw_config(draw, model)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    spelling = draw.choice(list(SPELLINGS))
    told = f"{config} {dtype} {spelling}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = save_peft(model, tmp_path / "written", seed=seed, **config)
    plain = edit(written, tmp_path / "plain", tensors=lambda t: {key: value.to(dtype) for key, value in t.items()})
    spelled = edit(plain, tmp_path / "spelled", key=SPELLINGS[spelling])
    surface = surface_of(model, rename_key=_key_renamer(model, {}))  # type: ignore[arg-type]
    _, pairs, report, _ = read_adapter(spelled, surface)
    ours, theirs = merged_logits(model, pairs), peft_logits(model, plain)
    assert (theirs - base_logits(model)).abs().max() > 0.05, f"the adapter must matter: {told}"
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4, msg=lambda text: f"{text}\n{told}")
    assert not report.is_zero_effect and sum(group.num_modules for group in report.groups) == report.matched
    # Nothing that PEFT wrote and read may seem to be missing here; a config about other names may.
    assert not any("hold no tensors" in warning for warning in report.warnings), report.warnings


def test_the_spellings_and_the_draws_differ() -> None:
    name = f"{PREFIX}model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    assert len({spell(name) for spell in SPELLINGS.values()}) == len(SPELLINGS)
    draws = [draw_config(random.Random(f"llama {seed}"), make_llama()) for seed in range(5)]
    assert len({str(config) for config in draws}) == 5
