"""GPTQ and AWQ checkpoints, read by GPTQModel, against PEFT on the same quantised model.

Skipped where the package is missing:

    pip install gptqmodel optimum
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel

from benchmarks.quantized_copies import write_awq, write_gptq
from engine import Engine, EngineConfig, SamplingParams
from engine.config import LoRAModule
from engine.linears import is_linear
from engine.request import TokenPrompt
from tests.oracles import make_adapter, make_model, random_ids

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

LLAMA = "LlamaForCausalLM"
NUM_TOKENS = 8
NAMES = [None, "all", None, "all"]
PROMPTS = [random_ids(7 + 9 * row, row) for row in range(len(NAMES))]


@pytest.mark.parametrize("write", [write_gptq, write_awq])
def test_a_mixed_batch_equals_peft(write: Callable[[Path, Path], Path], tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    source = make_model(LLAMA, tmp_path / "model", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    adapter = make_adapter(source, LLAMA, tmp_path / "adapter", targets="all-linear", rank=8, std=0.2)
    folder = write(source, tmp_path / "quantised")
    engine = Engine(
        EngineConfig(
            model=str(folder), lora_modules=[LoRAModule("all", str(adapter))], max_loras=2, max_lora_rank=8,
            max_num_batched_tokens=50, adapter_dir=str(tmp_path / "catalogue"),
        ),
        checks_integrity=True,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    try:
        started = [
            engine.start_sync(TokenPrompt(ids), greedy, lora=name)[0] for ids, name in zip(PROMPTS, NAMES, strict=True)
        ]
        answers = [[token_id for delta in answer for token_id in delta.token_ids] for answer in started]
        linears = [module for name, module in engine.base.model.named_modules() if name.endswith("_proj")]
        assert all(is_linear(module) and not isinstance(module, torch.nn.Linear) for module in linears)
    finally:
        engine.close()

    def load() -> transformers.LlamaForCausalLM:
        return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    models = {None: load(), "all": PeftModel.from_pretrained(load(), adapter).eval()}
    for ids, name, answer in zip(PROMPTS, NAMES, answers, strict=True):
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            output = models[name].generate(
                input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NUM_TOKENS, do_sample=False,
                eos_token_id=None,
            )  # fmt: skip
        assert answer == output[0, len(ids) :].tolist()
