"""The plan's memory is what an engine allocates; its speeds are what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from engine.__main__ import main
from engine.capacity import GPUS, MAX_BESIDE_TOKENS, MAX_RECORDED_TOKENS, Workload, estimate_speed, plan_memory
from engine.graphs import mixed_sizes
from engine.model import BaseModel, outline_model
from kernels import MAX_DELTA_TOKENS
from tests.oracles import make_model

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance.md"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config of an 8B model, which is all that a plan needs."""
    folder = tmp_path_factory.mktemp("llama-8b")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


@pytest.fixture(scope="module")
def base(llama: Path) -> BaseModel:
    return outline_model(str(llama))


def test_memory_is_what_an_engine_allocates(tmp_path: Path) -> None:
    model = make_model("LlamaForCausalLM", tmp_path / "model")
    config = EngineConfig(
        model=str(model), device="cpu", max_loras=3, max_lora_rank=24, max_num_seqs=4, max_model_len=96,
        adapter_dir=str(tmp_path / "catalogue"),
    )  # fmt: skip
    plan = plan_memory(outline_model(str(model)), config, GPUS["h200"], [8])
    engine = Engine(config)
    try:
        assert plan.weights == engine.base.num_bytes
        assert plan.lora_rows == engine.lora_bytes
        assert plan.kv_bytes_per_token == engine.base.kv_shape.bytes_per_token
        assert plan.kv_tokens == 4 * 96
    finally:
        engine.close()


def test_speeds_are_within_a_tenth_of_the_measured_tables(base: BaseModel) -> None:
    text = PERFORMANCE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) >= 17
    for batch, num_adapters, step_ms, prompts_ms in rows:
        answer_len = 256 if int(batch) <= 32 else 128
        work = Workload(int(batch), prompt_len=128, answer_len=answer_len, num_adapters=int(num_adapters), rank=16)
        found = estimate_speed(base, GPUS["h200"], work)
        assert found.step_s * 1e3 == pytest.approx(float(step_ms), rel=0.1), work
        assert found.all_first_tokens_s * 1e3 == pytest.approx(float(prompts_ms), rel=0.1), work
    prompts = re.findall(r"^\| (no|8) adapters? \| ([\d.]+) \|", text, re.MULTILINE)
    assert len(prompts) == 2
    for adapters, measured_s in prompts:
        work = Workload(8, prompt_len=2048, answer_len=16, num_adapters=8 if adapters == "8" else 0)
        found = estimate_speed(base, GPUS["h200"], work)
        assert found.all_first_tokens_s == pytest.approx(float(measured_s), rel=0.1)


def test_prompts_one_by_one_cost_hardly_more_than_together(base: BaseModel) -> None:
    assert mixed_sizes(10 * MAX_RECORDED_TOKENS)[-1] == MAX_RECORDED_TOKENS and MAX_BESIDE_TOKENS == MAX_DELTA_TOKENS
    longest = MAX_RECORDED_TOKENS - 7  # beside 7 other requests
    for prompt_len in (64, longest, longest + 1, 4096):
        found = estimate_speed(base, GPUS["h200"], Workload(8, prompt_len, answer_len=64, num_adapters=8))
        assert 0.95 < found.tokens_per_s / found.tokens_per_s_together <= 1, prompt_len
        assert found.requests_per_s == pytest.approx(found.tokens_per_s / 64)
    alone = estimate_speed(base, GPUS["h200"], Workload(1, 64, answer_len=64))
    assert alone.first_token_s == alone.all_first_tokens_s
    assert alone.tokens_per_s == pytest.approx(alone.tokens_per_s_together, rel=0.01), "nobody is there to hold up"


def test_what_does_not_fit_is_said(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", str(llama), "--gpu", "l4"]
    assert main([*words, "--max-loras", "32"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main([*words, "--max-loras", "4", "--max-lora-rank", "16"]) == 0
    assert "not measured" in capsys.readouterr().out


def test_a_plan_for_several_gpus_is_each_ones_share(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", str(llama), "--max-loras", "8", "--max-lora-rank", "16", "--json"]
    found = []
    for more in ([], ["--tensor-parallel-size", "2"], ["--tensor-parallel-size", "2", "--fully-sharded-loras"]):
        assert main([*words, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    one, half, fully = found
    assert half["kv_bytes_per_token"] * 2 == one["kv_bytes_per_token"]
    assert one["weights"] / 2 < half["weights"] < one["weights"] * 0.6, "the embedding is whole on each"
    assert one["lora_rows"] / 2 < half["lora_rows"] < one["lora_rows"] and fully["lora_rows"] < half["lora_rows"]
    assert half["speeds"] == []
    assert main([*words, "--tensor-parallel-size", "5"]) == 2
    assert "take one of 1, 2, 4, 8" in capsys.readouterr().err


def test_the_plan_as_json(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(llama), "--max-loras", "8", "--max-lora-rank", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["adapter_bytes"]["16"] == 16 * 2 * 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    assert found["lora_rows"] > 8 * found["adapter_bytes"]["16"]
    assert {row["num_adapters"] for row in found["speeds"]} == {0, 1, 8}
    slower = [row["step_s"] for row in found["speeds"] if row["batch"] == 8]
    assert slower == sorted(slower)


def test_the_plan_of_named_batches_and_adapters(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", str(llama), "--max-loras", "8", "--max-lora-rank", "16", "--prompt-len", "128"]
    assert main([*words, "--batch", "2,16", "--adapters", "0,4,9", "--json"]) == 0
    speeds = json.loads(capsys.readouterr().out)["speeds"]
    assert [(row["batch"], row["num_adapters"]) for row in speeds] == [(2, 0), (16, 0), (16, 4)]
    with pytest.raises(SystemExit):
        main([*words, "--batch", "0"])


def test_a_wrong_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(tmp_path / "nothing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
