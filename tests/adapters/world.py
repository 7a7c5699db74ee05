"""A small model and adapters for it, and PEFT as the judge of numbers. Nothing here uses the code under test to judge it."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from adapters.surface import LinearSite, ModelSurface
from adapters.weights import LoraPair

PREFIX = "base_model.model."
IDS = torch.tensor([[3, 17, 42, 99, 5, 64, 23]])


def make_llama() -> LlamaForCausalLM:
    """Hidden 64, two layers, four heads over two KV heads: q gives 64 features, k and v give 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def surface_of(model: nn.Module, **settings: Any) -> ModelSurface:
    """All linears but the head; the embedding and the head are out of reach."""
    linears, unsupported = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or name == "lm_head":
            unsupported[name] = "LoRA on embeddings and heads is not served"
        elif isinstance(module, nn.Linear):
            part = next((part for part in ("tower", "connector") if part in name), "decoder")
            linears[name] = LinearSite(name, module.in_features, module.out_features, part)  # type: ignore[arg-type]
    values: dict[str, Any] = {"model_name": "tiny-llama", "linears": linears, "unsupported": unsupported}
    return ModelSurface(**(values | settings))


def open_surface(model: nn.Module, **settings: Any) -> ModelSurface:
    """A surface that shows the base's own tensors."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return surface_of(model, **{"base_tensor": tensors.get, "base_tensor_names": list(tensors)} | settings)


def save_peft(model: nn.Module, folder: Path, *, seed: int = 1, std: float = 0.3, **settings: Any) -> Path:
    """A real PEFT adapter whose halves are all random and strong; `init_lora_weights` stays true."""
    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    with warnings.catch_warnings():
        # PEFT warns about settings that some cases have on purpose
        warnings.simplefilter("ignore")
        return _save_peft(copy.deepcopy(model), LoraConfig(**(values | settings)), folder, seed, std)


def _save_peft(model: nn.Module, config: LoraConfig, folder: Path, seed: int, std: float) -> Path:
    peft = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    peft.save_pretrained(folder)
    return folder


def edit(
    source: Path,
    folder: Path,
    *,
    key: Callable[[str], str] = str,
    tensors: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
    config: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """A copy of an adapter with renamed keys, changed tensors, or other config fields."""
    shutil.copytree(source, folder)
    weights = folder / "adapter_model.safetensors"
    save_file(tensors({key(name): value for name, value in load_file(weights).items()}), weights)
    path = folder / "adapter_config.json"
    values = {name: value for name, value in json.loads(path.read_text()).items() if name not in drop}
    path.write_text(json.dumps(values | dict(config or {})))
    return folder


def peft_logits(model: nn.Module, folder: Path) -> torch.Tensor:
    """[P, V] of PEFT's own adapted model."""
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()
        return peft(input_ids=IDS).logits[0]  # type: ignore[no-any-return]


def merged_logits(model: nn.Module, pairs: Mapping[str, LoraPair]) -> torch.Tensor:
    """[P, V] of the model with B @ A added to its dense weights."""
    merged = copy.deepcopy(model)
    with torch.inference_mode():
        for name, pair in pairs.items():
            merged.get_submodule(name).weight += pair.b.float() @ pair.a.float()  # type: ignore[operator]
        return merged(input_ids=IDS).logits[0]  # type: ignore[no-any-return]


def base_logits(model: nn.Module) -> torch.Tensor:
    """[P, V] without any adapter."""
    with torch.inference_mode():
        return model(input_ids=IDS).logits[0]  # type: ignore[no-any-return]
