"""`python -m adapters` says about files and memory what a server would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from adapters.__main__ import main
from adapters.report import AdapterReport
from adapters.weights import read_adapter
from engine.lora_embedding import EmbeddingLora
from engine.lora_layers import LoraBuffers
from engine.model import load_model, outline_model
from kernels import LoraMetadata
from tests.adapters.layouts import to_mlx
from tests.adapters.world import edit, save_peft, surface_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and no weights at all."""
    folder = tmp_path_factory.mktemp("base") / "tiny-llama"
    llama.config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"})
    )
    return folder


Capture = pytest.CaptureFixture[str]


def found(capsys: Capture, *words: str) -> tuple[int, dict[str, Any]]:
    status = main(["inspect", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_inspecting_on_a_base_gives_the_servers_report(
    llama: LlamaForCausalLM, base: Path, reference: Path, capsys: Capture
) -> None:
    status, told = found(capsys, str(reference), "--base", str(base))
    theirs = read_adapter(reference, surface_of(llama, lora_dtype=torch.bfloat16))[2]
    assert status == 0 and told["base"] == "tiny-llama" and told["format"].startswith("PEFT 0.")
    assert AdapterReport.from_dict(told["report"]) == theirs
    groups = told["report"]["groups"]
    assert [(group["name"], group["num_modules"], group["ranks"], group["scales"]) for group in groups] == [
        ("q_proj", 2, {"4": 2}, {"2": 2}), ("v_proj", 2, {"4": 2}, {"2": 2}),
    ]  # fmt: skip
    assert (told["report"]["file_dtypes"], told["report"]["dtype"]) == ({"F32": 8}, "bfloat16")


def test_inspecting_without_a_base_says_what_the_files_show(reference: Path, tmp_path: Path, capsys: Capture) -> None:
    status, told = found(capsys, str(to_mlx(reference, tmp_path / "mlx")))
    assert status == 0 and told["format"] == "mlx-lm" and told["base"] is None
    assert told["report"]["matched"] == 4 and told["report"]["base_match"] == "unknown"
    assert "whether the adapter fits one is not known" in told["notes"][0]


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ({"use_dora": True}, "the adapter has DoRA"),
        ({"lora_bias": True}, "the adapter has trained biases"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, "the adapter has LoRA on embeddings"),
        ({"trainable_token_indices": [3, 5]}, "trained or added tokens"),
        ({"modules_to_save": ["lm_head"]}, "hold full weights of lm_head"),
    ],
)
def test_what_a_base_would_decide_is_noted(
    llama: LlamaForCausalLM, tmp_path: Path, capsys: Capture, settings: dict[str, Any], noted: str
) -> None:
    status, told = found(capsys, str(save_peft(llama, tmp_path / "x", **settings)))
    assert status == 0 and noted in " ".join(told["notes"])


def test_what_is_refused_on_a_server_is_refused_here(
    base: Path, reference: Path, tmp_path: Path, capsys: Capture
) -> None:
    wrong = edit(reference, tmp_path / "x", key=lambda name: name.replace("layers.1", "layers.5"))
    status, told = found(capsys, str(wrong), "--base", str(base))
    assert status == 1 and told["report"] is None and "matched 2 of 4 tensor pairs" in told["reasons"][0]
    assert found(capsys, str(wrong))[0] == 0
    bad = edit(reference, tmp_path / "y", config={"use_qalora": True})
    status, told = found(capsys, str(bad))
    assert status == 1 and "QALoRA" in told["reasons"][0]
    pickle = edit(reference, tmp_path / "z")
    (pickle / "adapter_model.safetensors").rename(pickle / "adapter_model.bin")
    status, told = found(capsys, str(pickle))
    assert status == 1 and told["format"] == "not readable" and "never opened" in told["reasons"][0]
    status, told = found(capsys, str(reference), "--base", str(base), "--max-lora-rank", "2")
    assert status == 1 and "--max-lora-rank 4" in told["reasons"][0]


def test_copies_of_base_weights_are_noted_where_the_base_has_no_weights(
    llama: LlamaForCausalLM, base: Path, tmp_path: Path, capsys: Capture
) -> None:
    folder = save_peft(llama, tmp_path / "x", modules_to_save=["lm_head"])
    status, told = found(capsys, str(folder), "--base", str(base))
    assert status == 0 and "cannot be seen without its weights" in told["notes"][0]


def test_the_text_names_everything(base: Path, reference: Path, tmp_path: Path, capsys: Capture) -> None:
    other = edit(reference, tmp_path / "x", config={"base_model_name_or_path": "org/other", "zz_future": None})
    assert main(["inspect", str(other), "--base", str(base)]) == 0
    text = capsys.readouterr().out
    for words in (
        "trained on  org/other (another by name)", "4 of 4 tensor pairs, 0 unmatched", "F32 in the files, bfloat16 served",
        "q_proj", "(decoder)", "warnings:", "'zz_future'", "is served on 'tiny-llama'",
    ):  # fmt: skip
        assert words in text
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    assert "the path is not a folder" in capsys.readouterr().err
    assert main(["inspect", str(reference), "--base", "/nothing"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_an_outline_has_the_layers_of_the_loaded_model_and_no_weights(base: Path) -> None:
    outline = outline_model(str(base))
    loaded = load_model(
        str(base), load_format="dummy", dtype="bfloat16", device="cpu", gguf_file=None, seed=0, quantization=None
    )
    surfaces = [model.surface(max_lora_rank=8, lora_dtype=torch.bfloat16) for model in (outline, loaded)]
    assert surfaces[0].linears == surfaces[1].linears and surfaces[0].unsupported == surfaces[1].unsupported
    assert outline.num_bytes == loaded.num_bytes and all(p.is_meta for p in outline.model.parameters())


def test_the_base_shows_its_own_tensors_also_where_layers_are_computed_together(base: Path) -> None:
    loaded = load_model(
        str(base), load_format="dummy", dtype="float32", device="cpu", gguf_file=None, seed=0, quantization=None
    )
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    surface = loaded.surface(max_lora_rank=4, lora_dtype=torch.float32)
    assert set(before) <= set(surface.base_tensor_names)
    parts = ("decoder", "head", "tower", "connector")
    metadata = {part: LoraMetadata(8, 2, torch.device("cpu"), max_columns=12, max_in=128) for part in parts}
    LoraBuffers(loaded.model, surface.linears, metadata, num_slots=2, max_rank=4, dtype=torch.float32)
    for name, tensor in before.items():
        now = surface.base_tensor(name)
        assert now is not None and torch.equal(now, tensor)
    assert surface.base_tensor("model.layers.9.weight") is None and surface.base_tensor("model") is None


def test_the_estimate_is_what_files_and_buffers_take(
    llama: LlamaForCausalLM, base: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["estimate", str(base), "--ranks", "4,6", "--max-loras", "3", "--target-modules", "q_proj,v_proj"]) == 0
    text = capsys.readouterr().out
    folder = save_peft(llama, tmp_path / "x", r=4)
    num_numbers = sum(tensor.numel() for tensor in load_file(folder / "adapter_model.safetensors").values())
    assert f"{2 * num_numbers / 1000:.3g} kB" in text and f"{3 * num_numbers / 1000:.3g} kB" in text
    loaded = load_model(
        str(base), load_format="dummy", dtype="bfloat16", device="cpu", gguf_file=None, seed=0, quantization=None
    )
    surface = loaded.surface(max_lora_rank=6, lora_dtype=torch.bfloat16)
    metadata = {
        part: LoraMetadata(8, 3, torch.device("cpu"), max_columns=18, max_in=128) for part in ("decoder", "head")
    }
    buffers = LoraBuffers(loaded.model, surface.linears, metadata, num_slots=3, max_rank=6, dtype=torch.bfloat16)
    embedding = EmbeddingLora(
        loaded.embedding_name, loaded.decoder.get_input_embeddings(), metadata["decoder"], num_slots=3, max_rank=6,
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert f"{(buffers.num_bytes + embedding.num_bytes) / 1000:.3g} kB" in text.splitlines()[-1]
    assert main(["estimate", str(base), "--target-modules", "nothing"]) == 2
    assert "it has down_proj" in capsys.readouterr().err


def test_the_program_runs_as_a_module(reference: Path) -> None:
    words = [sys.executable, "-m", "adapters", "inspect", str(reference)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 tensor pairs" in done.stdout


def test_a_whole_model_is_told_apart_from_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) != 0
    assert "no adapter_config.json, but a model's config.json, which --model serves" in capsys.readouterr().err
