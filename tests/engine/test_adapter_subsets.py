"""Adapters that touch different modules, or whose files hold copies of base weights, share a batch and equal PEFT."""

from __future__ import annotations

from pathlib import Path

from engine import Engine, EngineConfig
from engine.config import LoRAModule
from engine.request import SamplingParams, TokenPrompt
from tests.oracles import Oracle, make_adapter, random_ids

LLAMA = "LlamaForCausalLM"
TARGETS = [["q_proj"], ["k_proj"], ["v_proj"], ["q_proj", "k_proj"], ["q_proj", "v_proj"], ["gate_proj"], ["up_proj"]]


def test_adapters_of_any_subset_of_modules_share_one_batch(llama_dir: Path, tmp_path: Path) -> None:
    """Layers that are computed together have other widths with grouped-query attention; what is missing adds nothing."""
    folders = {
        "-".join(names): make_adapter(
            llama_dir, LLAMA, tmp_path / str(rank), targets=names, rank=rank, alpha=4 * rank, seed=rank
        )
        for rank, names in enumerate(TARGETS, 2)
    }
    folders["copy"] = make_adapter(
        llama_dir, LLAMA, tmp_path / "copy", targets=["q_proj"], seed=9, modules_to_save=["lm_head", "input_layernorm"]
    )
    oracle = Oracle(llama_dir, LLAMA, folders)
    engine = Engine(
        EngineConfig(
            model=str(llama_dir),
            lora_modules=[LoRAModule(name, str(folder)) for name, folder in folders.items()],
            max_loras=len(folders),
            max_lora_rank=8,
            adapter_dir=str(tmp_path / "catalogue"),
        ),
        checks_integrity=True,
    )
    try:
        names = [*folders, None]
        prompt = random_ids(12, 100)
        expected = [oracle.generate(prompt, 20, name) for name in names]
        assert len(set(map(tuple, expected))) == len(names), "each adapter must matter"
        greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        answers = [engine.start_sync(TokenPrompt(prompt), greedy, lora=name)[0] for name in names]
        assert [[token for delta in answer for token in delta.token_ids] for answer in answers] == expected
    finally:
        engine.close()
