"""Quantised bases on a CUDA device, in recorded graphs and without, against PEFT on the same quantised model there.

Each method is skipped where its package is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from benchmarks import quantized_copies
from engine import Engine, EngineConfig, SamplingParams
from engine.architectures import find_architecture
from engine.config import LoRAModule
from engine.model import outline_model
from engine.quantization import choose_quantization, declared_in
from engine.request import TokenPrompt
from tests.oracles import make_adapter, make_model, random_ids

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

LLAMA = "LlamaForCausalLM"
# torchao pads rows of 4-bit weights to 1024.
SIZES = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 2}
METHODS = {
    "int8": "torchao", "int8-dynamic": "torchao", "int4": "torchao", "fp8": "torchao", "fp8-dynamic": "torchao",
    "bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors",
}  # fmt: skip
NAMES = [None, "all", None, "all", "all"]
PROMPTS = [random_ids(length, length) for length in (7, 20, 33, 1, 64)]
NUM_TOKENS = 12
MAX_TIE = 0.5
"""Most that a token's logit may lie below PEFT's best, in bfloat16, where inputs may be rounded too."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(LLAMA, tmp_path_factory.mktemp("models") / "llama", **SIZES)


@pytest.fixture(scope="module")
def adapter(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "all"
    return make_adapter(model_dir, LLAMA, folder, targets="all-linear", rank=8, std=0.1)


def load(folder: Path, asked: str | None) -> Any:
    """The model as transformers loads it with the engine's settings."""
    config = transformers.AutoConfig.from_pretrained(folder)
    chosen = choose_quantization(
        declared_in(config), asked, architecture=find_architecture(config), device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert chosen is not None
    if chosen.declared is not None:
        config.quantization_config = dict(chosen.declared)
    return transformers.LlamaForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, **chosen.loading
    ).eval()


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_the_likeliest_of_peft_on_the_same_quantised_model(
    model_dir: Path, adapter: Path, tmp_path: Path, method: str, enforce_eager: bool
) -> None:
    pytest.importorskip(METHODS[method])
    folder, asked = model_dir, method
    if method == "compressed-tensors":
        folder, asked = quantized_copies.write_compressed_fp8(model_dir, tmp_path / "copy"), None
    engine = Engine(
        EngineConfig(
            model=str(folder), quantization=asked, device="cuda", dtype="bfloat16", enforce_eager=enforce_eager,
            lora_modules=[LoRAModule("all", str(adapter))], kv_cache_memory_mb=64, max_loras=2, max_lora_rank=8,
            max_num_seqs=8, max_model_len=128, adapter_dir=str(tmp_path / "catalogue"),
        ),
        checks_integrity=True,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    try:
        started = [
            engine.start_sync(TokenPrompt(ids), greedy, lora=name)[0] for ids, name in zip(PROMPTS, NAMES, strict=True)
        ]
        answers = [[token_id for delta in answer for token_id in delta.token_ids] for answer in started]
        num_bytes, full_bytes = engine.base.num_bytes, outline_model(str(model_dir)).num_bytes
        has_graphs = engine._loop._runner._graphs is not None
    finally:
        engine.close()
    assert has_graphs == (not enforce_eager and method != "int8-dynamic")  # Its products look at numbers on the device.
    models = {None: load(folder, asked), "all": PeftModel.from_pretrained(load(folder, asked), adapter).eval()}
    gaps = []
    for ids, name, answer in zip(PROMPTS, NAMES, answers, strict=True):
        with torch.inference_mode():
            logits = models[name](input_ids=torch.tensor([ids + answer], device="cuda")).logits[0, len(ids) - 1 : -1]
        chosen = logits.float().gather(-1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
        gaps.append(float((logits.float().amax(-1) - chosen).max()))
    print(f"{method:<20} gap {max(gaps):.4f}  bytes {num_bytes / full_bytes:.2f} of float32")
    assert len(set(map(tuple, answers))) == len(answers)
    assert max(gaps) < MAX_TIE
    assert num_bytes < 0.45 * full_bytes
