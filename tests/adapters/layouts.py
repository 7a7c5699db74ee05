"""The reference adapter in other trainers' layouts, and models whose layers are fused, separate, biased or tied."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from adapters.surface import EmbeddingSite, ModelSurface
from tests.adapters.world import PREFIX, open_surface, surface_of


def to_mlx(source: Path, folder: Path, **config: Any) -> Path:
    """The same adapter as mlx-lm writes it: halves transposed, names without prefix, its own config."""
    peft = json.loads((source / "adapter_config.json").read_text())
    folder.mkdir()
    tensors = {}
    for name, value in load_file(source / "adapter_model.safetensors").items():
        name = name.removeprefix(PREFIX)
        if "magnitude" in name:
            tensors[name.replace("lora_magnitude_vector", "m")] = value
        else:
            half = name.replace("lora_A.weight", "lora_a").replace("lora_B.weight", "lora_b")
            tensors[half] = value.T.contiguous()
    save_file(tensors, folder / "adapters.safetensors")
    values = {
        "fine_tune_type": "lora", "num_layers": 2, "model": "org/tiny-llama", "batch_size": 4, "learning_rate": 1e-5,
        "lora_parameters": {"rank": peft["r"], "scale": peft["lora_alpha"] / peft["r"], "dropout": 0.0},
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(values | config))
    return folder


def make_phi() -> Phi3ForCausalLM:
    """Fused `qkv_proj` [64 + 32 + 32, 64] and `gate_up_proj`, as Phi-3 and Phi-4-multimodal have them."""
    torch.manual_seed(0)
    config = Phi3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return Phi3ForCausalLM(config).eval()


class Split(nn.Module):
    """A layer's parts as linears of their own, whose outputs are joined: the same function with other names."""

    def __init__(self, fused: nn.Linear, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        super().__init__()
        for name, weight in zip(names, fused.weight.split(sizes), strict=True):
            part = nn.Linear(fused.in_features, len(weight), bias=False)
            part.weight = nn.Parameter(weight.detach().clone())
            setattr(self, name, part)
        self.names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([getattr(self, name)(x) for name in self.names], -1)


def split_phi_of(phi: Phi3ForCausalLM) -> Phi3ForCausalLM:
    """The same model with q, k, v, gate and up apart; `inner` and `usual` translate its layers' names."""
    model = copy.deepcopy(phi)
    for layer in model.model.layers:
        layer.self_attn.qkv_proj = Split(layer.self_attn.qkv_proj, ("q_proj", "k_proj", "v_proj"), (64, 32, 32))
        layer.mlp.gate_up_proj = Split(layer.mlp.gate_up_proj, ("gate_proj", "up_proj"), (96, 96))
    return model


def usual(name: str) -> str:
    return name.replace("qkv_proj.", "").replace("gate_up_proj.", "")


def inner(name: str) -> str:
    """The name of a split layer in the test's model."""
    leaf = name.rpartition(".")[2]
    fused = "qkv_proj" if leaf in ("q_proj", "k_proj", "v_proj") else "gate_up_proj"
    return (
        name.replace(leaf, f"{fused}.{leaf}")
        if leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        else name
    )


def renamed_surface(model: nn.Module, **settings: Any) -> ModelSurface:
    """The split model's surface under the names that models with separate layers use."""
    plain = surface_of(model, **settings)
    linears = {
        usual(name): type(site)(usual(name), site.in_features, site.out_features)
        for name, site in plain.linears.items()
    }
    return surface_of(model, linears=linears, **settings)


def make_qwen() -> Qwen2ForCausalLM:
    """Biases on q, k and v; the head shares the embedding's table."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def capable(model: nn.Module, extra_vocab_size: int = 4) -> ModelSurface:
    """A surface of a server that serves everything that plans can hold."""
    tied = "lm_head" if model.config.tie_word_embeddings else None  # type: ignore[union-attr]
    site = EmbeddingSite("model.embed_tokens", 128, 64, tied)
    linears = {
        **surface_of(model).linears,
        "lm_head": type(surface_of(model).linears["model.layers.0.mlp.up_proj"])("lm_head", 64, 128, "head"),
    }
    return open_surface(
        model, unsupported={}, linears=linears, embeddings={site.name: site}, serves_dora=True, serves_bias=True,
        serves_embeddings=True, extra_vocab_size=extra_vocab_size,
    )  # fmt: skip
