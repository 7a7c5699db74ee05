"""Each row of the tables in docs/adapters.md is done: such a file is written and loaded, and the outcome is the row's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from adapters.__main__ import _size
from adapters.config_fields import CONVERTIBLE_KINDS, INERT_FIELDS, READ_FIELDS, REFUSED_FIELDS
from adapters.errors import AdapterError
from adapters.estimate import pair_bytes
from adapters.plan import check_adapter
from adapters.surface import ModelSurface
from adapters.weights import read_adapter
from tests.adapters.layouts import capable, make_phi, make_qwen, renamed_surface, split_phi_of, to_mlx, usual
from tests.adapters.world import PREFIX, edit, open_surface, save_peft, surface_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"
Tensors = dict[str, torch.Tensor]


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, as cells."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


@dataclass
class World:
    """Where cases write, and what they write about."""

    root: Path
    llama: LlamaForCausalLM
    qwen: Qwen2ForCausalLM
    phi: nn.Module
    split_phi: nn.Module
    reference: Path

    def folder(self) -> Path:
        return self.root / str(len(list(self.root.iterdir())))

    def edit(self, source: Path | None = None, **changes: Any) -> Path:
        return edit(source or self.reference, self.folder(), **changes)

    def save(self, model: nn.Module | None = None, **settings: Any) -> Path:
        return save_peft(model or self.llama, self.folder(), **settings)


@pytest.fixture
def world(llama: LlamaForCausalLM, reference: Path, tmp_path: Path) -> World:
    phi = make_phi()
    return World(tmp_path, llama, make_qwen(), phi, split_phi_of(phi), reference)


Case = tuple[Path, ModelSurface, ModelSurface | None]


def plain(world: World, folder: Path, model: nn.Module | None = None) -> Case:
    """A case on a server that serves LoRA on linear layers, and on one that serves all that plans can hold."""
    chosen = model or world.llama
    able = None if isinstance(chosen, type(world.phi)) else capable(chosen)
    return folder, open_surface(chosen), able


def with_tensors(world: World, new: Callable[[Tensors], Tensors]) -> Case:
    return plain(world, world.edit(tensors=lambda tensors: tensors | new(tensors)))


def tables_of(model: LlamaForCausalLM, num_more: int = 0) -> Tensors:
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    more = torch.ones(num_more, 64)
    return {
        f"{PREFIX}model.embed_tokens.weight": torch.cat([embedding, more]),
        f"{PREFIX}lm_head.weight": torch.cat([head, more]),
    }


def spelled(change: Callable[[str], str]) -> Callable[[World], Case]:
    return lambda world: plain(world, world.edit(key=change))


def beside(world: World, name: str, content: str) -> Case:
    folder = world.edit()
    (folder / name).write_text(content)
    return plain(world, folder)


def sub_folders(world: World) -> Case:
    folder = world.folder()
    for name in ("one", "two"):
        edit(world.reference, folder / name)
    return plain(world, folder)


def pickle(world: World) -> Case:
    folder = world.edit()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    return plain(world, folder)


def shards(world: World) -> Case:
    folder = world.edit()
    path = folder / "adapter_model.safetensors"
    places = {}
    for number, (name, tensor) in enumerate(load_file(path).items()):
        places[name] = f"adapter_model-{number}.safetensors"
        save_file({name: tensor}, folder / places[name])
    path.unlink()
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return plain(world, folder)


def new_embeddings(world: World) -> Case:
    folder = world.edit()
    save_file({"input_embeddings": torch.ones(2, 64)}, folder / "new_embeddings.safetensors")
    return plain(world, folder)


def in_base(tensors: Tensors) -> Tensors:
    return {
        name.removeprefix(PREFIX).replace(".weight", f".{which}.weight"): value.clone()
        for name, value in tensors.items()
        for which in ("speech", "vision")
    }


def mlx_vlm(name: str) -> str:
    return name.replace("lora_A.weight", "A").replace("lora_B.weight", "B")


def kohya(name: str) -> str:
    return name.replace("lora_A", "lora_down").replace("lora_B", "lora_up")


def targeted_table(world: World) -> Case:
    return plain(world, world.save(target_modules=["embed_tokens", "q_proj"]))


def llava_names(name: str) -> str:
    return name.replace("model.model.model.", "model.model.language_model.model.")


CASES: dict[str, Callable[[World], Case]] = {
    "PEFT, transformers 5": lambda world: plain(world, world.edit()),
    "PEFT, transformers 4, multimodal": spelled(llava_names),
    "PEFT, embedding and head saved along": lambda world: with_tensors(world, lambda _: tables_of(world.llama)),
    "PEFT, `modules_to_save`": lambda world: plain(world, world.save(modules_to_save=["lm_head", "input_layernorm"])),
    "PEFT, `bias`": lambda world: plain(world, world.save(world.qwen, bias="all"), world.qwen),
    "PEFT, targeted embedding with its table": targeted_table,
    "PEFT, DoRA": lambda world: plain(world, world.save(use_dora=True)),
    "PEFT, `lora_bias`": lambda world: plain(world, world.save(lora_bias=True)),
    "PEFT, LoRA on embeddings": targeted_table,
    "PEFT, trained tokens": lambda world: plain(world, world.save(trainable_token_indices=[1, 5])),
    "PEFT, resized embedding": lambda world: with_tensors(world, lambda _: tables_of(world.llama, 2)),
    "PEFT, several shards": shards,
    "PEFT, names of a model in memory": spelled(lambda name: name.replace(".weight", ".default.weight")),
    "PEFT, several adapters in one folder": sub_folders,
    "PEFT, pickle": pickle,
    "Unsloth": lambda world: plain(world, world.edit(config={"unsloth_fixed": True})),
    "LLaMA-Factory": lambda world: plain(world, world.edit(config={"task_type": "CAUSAL_LM", "inference_mode": True})),
    "axolotl with FSDP": spelled(lambda name: name.replace(".self_attn", "._fsdp_wrapped_module.self_attn")),
    "axolotl with torch.compile": spelled(lambda name: "_orig_mod." + name),
    "DeepSpeed and DDP": spelled(lambda name: "module." + name),
    "DeepSpeed ZeRO-3, not gathered": lambda world: with_tensors(world, lambda t: {n: torch.empty(0) for n in t}),
    "ms-swift": lambda world: beside(world, "additional_config.json", '{"lora_dtype": null, "lorap_lr_ratio": 16}'),
    "Granite Speech, bundled adapter": spelled(lambda name: name.removeprefix(PREFIX)),
    "Phi-4-multimodal, `speech-lora`, `vision-lora`": lambda world: (
        world.save(world.phi, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]), surface_of(world.phi), None,
    ),
    "fused names on separate layers": lambda world: (
        world.save(world.phi, target_modules=["qkv_proj", "gate_up_proj"]), renamed_surface(world.split_phi), None,
    ),
    "separate names on fused layers": lambda world: (
        world.edit(world.save(world.split_phi), key=usual), surface_of(world.phi), None,
    ),
    "Phi-4-multimodal, adapters inside the base": lambda world: plain(world, world.edit(tensors=in_base)),
    "servers' added tokens": new_embeddings,
    "mlx-lm": lambda world: plain(world, to_mlx(world.reference, world.folder())),
    "mlx-lm, `fine_tune_type: dora`": lambda world: plain(
        world, to_mlx(world.save(use_dora=True), world.folder(), fine_tune_type="dora")
    ),
    "mlx-lm, `fine_tune_type: full`": lambda world: plain(
        world, to_mlx(world.reference, world.folder(), fine_tune_type="full")
    ),
    "mlx-vlm": spelled(mlx_vlm),
    "kohya, diffusers": spelled(kohya),
}  # fmt: skip


def refused(folder: Path, surface: ModelSurface) -> str | None:
    """The refusal's sentence, or None where the adapter is served."""
    try:
        read_adapter(folder, surface)
    except AdapterError as error:
        return error.message
    return None


def spoil_copies(world: World, folder: Path) -> Path:
    """The same adapter with full tensors that are not the base's."""

    def spoil(tensors: Tensors) -> Tensors:
        return {name: value if "lora_" in name else value + 1 for name, value in tensors.items()}

    return edit(folder, world.folder(), tensors=spoil)


def test_every_format_of_the_page_has_a_case() -> None:
    rows = table("Formats")
    assert {row[0] for row in rows} == set(CASES)
    assert {row[2] for row in rows} == {"served", "by model", "if equal", "refused"}


@pytest.mark.parametrize("row", table("Formats"), ids=lambda row: row[0])
def test_a_format_has_the_outcome_that_the_page_says(world: World, row: list[str]) -> None:
    folder, surface, able = CASES[row[0]](world)
    told = refused(folder, surface)
    if row[2] in ("served", "if equal"):
        assert told is None
    else:
        assert told is not None and ";" in told + ";"
    if row[2] == "if equal":
        assert "not served" in (refused(spoil_copies(world, folder), surface) or "")
    if row[2] == "by model":
        assert able is not None
        check_adapter(folder, able)
    if row[2] == "refused" and able is not None:
        assert refused(folder, able) is not None


# Fields whose effect shows only beside another one, or on another adapter.
COMPANIONS: dict[str, dict[str, Any]] = {"layers_pattern": {"layers_to_transform": [0, 1]}}


def test_every_field_is_on_the_page_with_its_kind() -> None:
    rows = {row[0].strip("`"): row[2] for row in table("Config fields")}
    expected = {
        **dict.fromkeys(READ_FIELDS, "honoured"), **dict.fromkeys(INERT_FIELDS, "no effect"),
        **dict.fromkeys(REFUSED_FIELDS, "refused"),
    }  # fmt: skip
    assert rows == expected and len(table("Config fields")) == len(rows)


@pytest.mark.parametrize("row", table("Config fields"), ids=lambda row: row[0])
def test_a_field_has_the_outcome_that_the_page_says(world: World, row: list[str]) -> None:
    name, value = row[0].strip("`"), json.loads(row[1].strip("`"))
    if name == "ensure_weight_tying":
        tied = world.save(world.qwen, target_modules=["embed_tokens"])
        table_name, able = "model.embed_tokens", capable(world.qwen)
        assert not check_adapter(tied, able).embeddings[table_name].also_head
        assert check_adapter(world.edit(tied, config={name: value}), able).embeddings[table_name].also_head
        return
    base = world.save(world.qwen)
    surface = open_surface(world.qwen)
    before = read_adapter(world.edit(base, config=COMPANIONS.get(name, {})), surface)[2]
    changed = world.edit(base, config=COMPANIONS.get(name, {}) | {name: value})
    told = refused(changed, surface)
    if row[2] == "refused":
        assert told is not None and name in told
    elif row[2] == "no effect":
        assert told is None and read_adapter(changed, surface)[2] == before
    else:
        assert told is not None or read_adapter(changed, surface)[2] != before


SHAPES = {
    "Llama 3.1 8B": (LlamaConfig, 4096, 14336, 32, 32, 8, 128256),
    "Llama 3.1 70B": (LlamaConfig, 8192, 28672, 80, 64, 8, 128256),
    "Qwen2.5 7B": (Qwen2Config, 3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5 72B": (Qwen2Config, 8192, 29568, 80, 64, 8, 152064),
    "Mistral 7B v0.3": (LlamaConfig, 4096, 14336, 32, 32, 8, 32768),
}


def sizes_of(name: str, num_layers: int) -> list[int]:
    """Bytes of the weights and of adapters of rank 8, 16, 32, 64, from transformers' own model, cut to some layers."""
    kind, hidden, inner, _, heads, kv_heads, vocab = SHAPES[name]
    config = kind(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=num_layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab,
    )  # fmt: skip
    model_class = Qwen2ForCausalLM if kind is Qwen2Config else LlamaForCausalLM
    with torch.device("meta"):
        model = model_class(config).bfloat16()
    sites = list(surface_of(model).linears.values())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return [weights, *(pair_bytes(sites, rank, torch.bfloat16) for rank in (8, 16, 32, 64))]


@pytest.mark.parametrize("row", table("Memory by rank"), ids=lambda row: row[0])
def test_the_table_of_memory_is_what_the_models_shapes_give(row: list[str]) -> None:
    one, two = sizes_of(row[0], 1), sizes_of(row[0], 2)
    num_layers = SHAPES[row[0]][3]
    whole = [first + (num_layers - 1) * (second - first) for first, second in zip(one, two, strict=True)]
    assert row[1:] == [_size(size) for size in whole]


def test_the_kinds_that_the_page_says_convert_are_those_of_the_code() -> None:
    known = {kind.name for kind in PEFT_TYPE_TO_TUNER_MAPPING}
    text = re.search(r"turns (.*?) into a LoRA", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert text is not None
    named = {re.sub(r"\W", "", word).upper() for word in re.split(r",| and ", text[1])}
    assert named == CONVERTIBLE_KINDS and named <= known
