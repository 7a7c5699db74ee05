"""Damaged files never give anything but an adapter or an `AdapterError`: no other exception, no hang."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from adapters.config_fields import INERT_FIELDS, READ_FIELDS, REFUSED_FIELDS
from adapters.errors import AdapterError
from adapters.folder import AdapterFolder
from adapters.full_tensors import check_copies
from adapters.intake import read_generation
from adapters.plan import plan_adapter
from adapters.surface import ModelSurface
from tests.adapters.layouts import capable
from tests.adapters.world import edit, open_surface

WEIGHTS = "adapter_model.safetensors"
NUM_DRAWS = 60
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**70, 1e308, float("nan"), float("inf"), "", "x", "(", "a" * 5000, "(a+)+", ".*" * 9,
    [], [None], [[1]], ["q_proj"], [1, "x"], {}, {"q_proj": 4}, {"q_proj": None}, {"(": 1}, {"a": {"b": []}},
]  # fmt: skip


def outcome(folder: Path, surface: ModelSurface) -> str:
    """`served`, or the refusal's sentence; anything else is the test's failure."""
    started = time.process_time()
    fault: AdapterError | None = None
    try:
        read_generation(folder, surface)
    except AdapterError as error:
        fault = error
    assert time.process_time() - started < 5.0
    if fault is None:
        return "served"
    assert fault.status in (400, 404) and str(folder) not in fault.message and len(fault.message) < 4000
    return fault.message


@pytest.fixture
def victim(reference: Path, tmp_path: Path) -> Path:
    return edit(reference, tmp_path / "victim")


def header_len(data: bytes) -> int:
    return int(struct.unpack("<Q", data[:8])[0])


def test_a_truncated_file_is_refused_wherever_it_ends(victim: Path, surface: ModelSurface) -> None:
    data = (victim / WEIGHTS).read_bytes()
    draw = random.Random(1)
    lengths = {0, 1, 7, 8, 9, len(data) - 1, *(draw.randrange(len(data)) for _ in range(NUM_DRAWS))}
    for length in lengths:
        (victim / WEIGHTS).write_bytes(data[:length])
        assert "not a whole safetensors file" in outcome(victim, surface), length
    (victim / WEIGHTS).write_bytes(data + b"\0")
    assert "belong to no tensor" in outcome(victim, surface)


def test_flipped_bits_are_an_adapter_or_a_refusal(victim: Path, surface: ModelSurface) -> None:
    data = (victim / WEIGHTS).read_bytes()
    draw, outcomes = random.Random(2), []
    for number in range(2 * NUM_DRAWS):
        damaged = bytearray(data)
        end = header_len(data) + 8 if number % 2 else len(data)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(end)] ^= 1 << draw.randrange(8)
        (victim / WEIGHTS).write_bytes(damaged)
        outcomes.append(outcome(victim, surface))
    assert "served" in outcomes and len(set(outcomes)) > 10


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
def test_a_header_of_an_impossible_length_is_refused_at_once(victim: Path, surface: ModelSurface, length: int) -> None:
    data = (victim / WEIGHTS).read_bytes()
    (victim / WEIGHTS).write_bytes(struct.pack("<Q", length) + data[8:])
    assert "not a whole safetensors file" in outcome(victim, surface)


def odd_headers(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Tables of contents that promise what the file cannot hold."""
    name = next(key for key in header if key != "__metadata__")
    row = header[name]
    for change in (
        {"shape": [2**62, 2**62]}, {"shape": [-4, 64]}, {"shape": [4.0, 64]}, {"shape": "x"}, {"shape": []},
        {"shape": [0, 64]}, {"dtype": "F128"}, {"dtype": None}, {"data_offsets": [0]}, {"data_offsets": [2**70, 2**71]},
        {"data_offsets": [64, 0]}, {"data_offsets": [-1, 1023]}, {"shape": [1] * 9},
    ):  # fmt: skip
        yield header | {name: row | change}
    yield header | {name: None}
    yield header | {"x" * 600: row}
    yield {key: value for key, value in header.items() if key != name}


def test_tables_of_contents_that_lie_are_refused(victim: Path, surface: ModelSurface) -> None:
    data = (victim / WEIGHTS).read_bytes()
    end = 8 + header_len(data)
    for header in odd_headers(json.loads(data[8:end])):
        raw = json.dumps(header).encode()
        (victim / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + data[end:])
        assert outcome(victim, surface) != "served", header


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_are_refused_wherever_they_are(
    reference: Path, surface: ModelSurface, tmp_path: Path, value: float
) -> None:
    draw = random.Random(3)

    def poison(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = draw.choice(sorted(tensors))
        poisoned = tensors[name].clone()
        poisoned.view(-1)[draw.randrange(poisoned.numel())] = value
        return tensors | {name: poisoned}

    for number in range(4):
        assert "holds NaN or infinity" in outcome(edit(reference, tmp_path / str(number), tensors=poison), surface)


def test_odd_values_in_the_config_are_an_adapter_or_a_refusal(victim: Path, surface: ModelSurface) -> None:
    path = victim / "adapter_config.json"
    config = json.loads(path.read_text())
    draw = random.Random(4)
    fields = sorted(READ_FIELDS | INERT_FIELDS | set(REFUSED_FIELDS) | {"zz_future", "lora_parameters"})
    for name in fields:
        for value in draw.sample(ODD_VALUES, 6):
            path.write_text(json.dumps(config | {name: value}))
            outcome(victim, surface)


def test_configs_that_are_no_objects_of_json_are_refused(victim: Path, surface: ModelSurface) -> None:
    path = victim / "adapter_config.json"
    raw = path.read_bytes()
    draw = random.Random(5)
    for data in (
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"r": 1' + b"0" * 5000 + b"}",
        raw[: len(raw) // 2],
    ):
        path.write_bytes(data)
        assert outcome(victim, surface) != "served"
    for _ in range(NUM_DRAWS):
        damaged = bytearray(raw)
        damaged[draw.randrange(len(raw))] = draw.randrange(256)
        path.write_bytes(damaged)
        outcome(victim, surface)


MODULES = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj",
           "model.embed_tokens", "lm_head", "model.norm", "model", "", "scale"]  # fmt: skip
LEAVES = [
    "lora_A.weight", "lora_B.weight", "lora_a", "lora_b", "lora_magnitude_vector", "m", "lora_B.bias", "bias", "weight",
    "base_layer.bias", "base_layer.weight", "modules_to_save.default.weight", "lora_embedding_A", "lora_embedding_B",
    "token_adapter.trainable_tokens_delta", "lora_E", "A", "alpha", "x",
]  # fmt: skip
SHAPES = [
    (),
    (0,),
    (1,),
    (4,),
    (64,),
    (128,),
    (4, 64),
    (64, 4),
    (128, 4),
    (4, 128),
    (128, 64),
    (131, 64),
    (2, 64),
    (2, 2, 2),
]
CONFIGS: list[dict[str, Any]] = [
    {}, {"use_dora": True}, {"lora_bias": True}, {"bias": "all"}, {"trainable_token_indices": [1, 2]},
    {"modules_to_save": ["lm_head"]}, {"ensure_weight_tying": True},
    {"peft_type": None, "lora_parameters": {"rank": 4, "scale": 2.0}},
]  # fmt: skip


def test_odd_tensors_are_an_adapter_or_a_refusal(reference: Path, llama: LlamaForCausalLM, tmp_path: Path) -> None:
    draw = random.Random(6)
    scale = {"scale": torch.tensor(1.0)}
    plain = open_surface(llama)
    tensors = {name: plain.base_tensor(name) for name in plain.base_tensor_names} | scale
    settings: dict[str, Any] = {"base_tensor": tensors.get, "base_tensor_names": list(tensors)}
    servers = [open_surface(llama, **settings), replace(capable(llama), **settings)]
    outcomes = set()
    for number in range(3 * NUM_DRAWS):
        names = [f"{draw.choice(MODULES)}.{draw.choice(LEAVES)}".strip(".") for _ in range(draw.randint(1, 4))]
        names = ["scale"] if draw.random() < 0.1 else names
        dtypes = [torch.float32, torch.bfloat16, torch.int32]
        shapes = {name: () if name == "scale" else draw.choice(SHAPES) for name in names}
        odd = {name: torch.ones(shapes[name], dtype=draw.choices(dtypes, [8, 3, 1])[0]) for name in names}
        keeps = draw.random() < 0.5
        folder = edit(
            reference, tmp_path / str(number), config=draw.choice(CONFIGS),
            tensors=lambda given, odd=odd, keeps=keeps: (given if keeps else {}) | odd,
        )  # fmt: skip
        for surface in servers:
            outcomes.add(plan_outcome(folder, surface))
    assert len(outcomes) > 30


def plan_outcome(folder: Path, surface: ModelSurface) -> str:
    """`served` where a plan is made and its copies are compared, or the refusal's sentence."""
    try:
        with AdapterFolder(folder) as files:
            check_copies(plan_adapter(files, surface).copies, surface)
    except AdapterError as error:
        return error.message
    return "served"
