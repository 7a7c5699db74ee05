"""Quantised copies of checkpoints of text models: rounded weights in the layouts that others' tools write.

Each takes a model's folder, with one file of weights, and writes another. The linears of its layers are rounded to the nearest
and nothing is calibrated, so what calibration gains is not seen. Nothing here uses the code under test, nor the packages that
read the files. Used by `benchmarks/quantization` and by tests.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

GROUP = 32
"""Weights that share a scale."""

_Tensors = dict[str, torch.Tensor]


def write_compressed_int4(source: Path, folder: Path) -> Path:
    """compressed-tensors, W4A16: eight weights in an int32, a scale a group."""

    def quantize(weight: torch.Tensor) -> _Tensors:
        blocks = weight.view(weight.shape[0], -1, GROUP)
        scale = blocks.abs().amax(-1) / 7
        rounded = (blocks / scale[..., None]).round().clamp(-8, 7).view(weight.shape).int()
        return {
            "weight_packed": _packed(rounded + 8),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    return _write(source, folder, quantize, _compressed(weights, None, "pack-quantized"))


def write_compressed_fp8(source: Path, folder: Path) -> Path:
    """compressed-tensors, FP8 with a scale a row, inputs to be rounded token by token."""

    def quantize(weight: torch.Tensor) -> _Tensors:
        scale = weight.abs().amax(1, keepdim=True) / 448
        return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return _write(source, folder, quantize, _compressed(weights, inputs, "float-quantized"))


def write_fp8_blocks(source: Path, folder: Path) -> Path:
    """Fine-grained FP8: a scale a block of `GROUP` by `GROUP` weights."""

    def quantize(weight: torch.Tensor) -> _Tensors:
        num_rows, num_columns = weight.shape
        blocks = weight.view(num_rows // GROUP, GROUP, num_columns // GROUP, GROUP)
        scale = blocks.abs().amax((1, 3)) / 448
        rounded = (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        return {"weight": rounded, "weight_scale_inv": scale}

    declared = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
        "modules_to_not_convert": ["lm_head"],
    }
    return _write(source, folder, quantize, declared)


def write_gptq(source: Path, folder: Path) -> Path:
    """GPTQ, 4 bits with a zero point: packed along the inputs, zero points stored less one."""

    def quantize(weight: torch.Tensor) -> _Tensors:
        rounded, zero, scale = _with_zero_point(weight)
        return {
            "qweight": _packed(rounded).t().contiguous(),
            "qzeros": _packed((zero - 1).t().contiguous() & 15),
            "scales": scale.t().contiguous().half(),
            "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
        }

    declared = {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "checkpoint_format": "gptq",
    }  # fmt: skip
    return _write(source, folder, quantize, declared)


def write_awq(source: Path, folder: Path) -> Path:
    """AWQ, 4 bits with a zero point: packed along the outputs, in the order of its GPU kernel."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def quantize(weight: torch.Tensor) -> _Tensors:
        rounded, zero, scale = _with_zero_point(weight)
        return {
            "qweight": _packed(rounded.t().contiguous(), order),
            "qzeros": _packed(zero.t().contiguous(), order),
            "scales": scale.t().contiguous().half(),
        }

    declared = {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return _write(source, folder, quantize, declared)


def write_gguf(source: Path, file: Path) -> Path:
    """A GGUF file of a Qwen2, its linears in blocks of eight bits, its tokenizer inside.

    The tokenizer is one of bytes alone; the file's has one token more, since readers expect at least one merge. So the model must
    have room for it.
    """
    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"] | {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    ids["ab"] = len(ids)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(len(ids))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    names = sorted(ids, key=ids.__getitem__)
    writer.add_token_list(names)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3 if name in special else 1 for name in names])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, tensor in load_file(source / "model.safetensors").items():
        numbers = tensor.float().numpy()
        if "_proj.weight" in name:
            blocks = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(_gguf_name(name), blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(_gguf_name(name), numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    leaves = {
        "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
        "up_proj": "ffn_up", "down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    module, _, ending = name.rpartition(".")
    if module in whole:
        return f"{whole[module]}.{ending}"
    return f"blk.{module.split('.')[2]}.{leaves[module.rpartition('.')[2]]}.{ending}"


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _with_zero_point(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights as 0 to 15, [out, in] int32, with zero point and scale of each group, [out, groups]."""
    blocks = weight.view(weight.shape[0], -1, GROUP)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    rounded = ((blocks / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    return rounded.view(weight.shape).int(), zero.int(), scale


def _packed(numbers: torch.Tensor, order: Iterable[int] = range(8)) -> torch.Tensor:
    """[..., n] of 0 to 15 -> [..., n / 8] int32; place k of the eight holds number order[k]."""
    eights = numbers.view(*numbers.shape[:-1], -1, 8).long()
    whole = torch.stack([eights[..., number] << (4 * place) for place, number in enumerate(order)]).sum(0)
    return torch.where(whole >= 2**31, whole - 2**32, whole).int()


def _write(source: Path, folder: Path, quantize: Callable[[torch.Tensor], _Tensors], declared: dict[str, Any]) -> Path:
    shutil.copytree(source, folder)
    tensors: _Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, ending = name.rpartition(".")
        if module.endswith("_proj") and ending == "weight":
            tensors |= {f"{module}.{part}": value for part, value in quantize(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    return folder
