"""The probe: the numbers are those of PEFT, and content that was tried leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig
from engine.probe import NUM_POSITIONS
from engine.request import SamplingParams, TextPrompt
from tests.oracles import make_adapter
from tests.pace import held_after

LLAMA = "LlamaForCausalLM"


@pytest.fixture(scope="module")
def engine(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = EngineConfig(model=str(llama_dir), adapter_dir=str(tmp_path_factory.mktemp("catalogue")), max_loras=2)
    engine = Engine(config, checks_integrity=True)
    yield engine
    engine.close()
    engine.check_integrity()


def files_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir() if path.name.startswith("adapter_")}


def peft_probe(llama_dir: Path, folder: Path, prompts: list[list[int]]) -> tuple[float, float]:
    """Mean KL and share of changed top-1 over the base model's own greedy answers, by transformers and PEFT."""
    base = transformers.AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(llama_dir), folder)
    kls, changes = [], []
    with torch.inference_mode():
        for token_ids in prompts:
            ids = list(token_ids)
            for _ in range(NUM_POSITIONS):
                q = base(torch.tensor([ids])).logits[0, -1].double()
                p = adapted(torch.tensor([ids])).logits[0, -1].double()
                kls.append(torch.nn.functional.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="sum").item())
                changes.append(bool(p.argmax() != q.argmax()))
                ids.append(int(q.argmax()))
    return sum(kls) / len(kls), sum(changes) / len(changes)


def test_the_numbers_are_those_of_peft(engine: Engine, llama_dir: Path, tmp_path: Path) -> None:
    folder = make_adapter(llama_dir, LLAMA, tmp_path / "x")
    finished = engine.stats().num_finished
    report = engine.inspect_upload(files_of(folder))
    assert report.is_ok and report.probe is not None
    assert engine.stats().num_finished == finished  # What the engine asks itself is no answer to anybody.
    prompts = [built.token_ids for built in engine._prober.built_prompts()]
    mean_kl, top1_changed = peft_probe(llama_dir, folder, prompts)
    assert mean_kl > 0.01 and report.probe.num_tokens == NUM_POSITIONS * len(prompts)
    assert report.probe.mean_kl == pytest.approx(mean_kl, rel=1e-3) and report.probe.top1_changed == top1_changed
    assert report.probe.verdict == "effect"


@pytest.mark.parametrize(("factor", "verdict"), [(0.0, "no effect"), (1e-4, "no effect"), (1e19, "broken")])
def test_no_effect_and_broken_numbers_are_called_so(
    factor: float, verdict: str, engine: Engine, llama_dir: Path, tmp_path: Path
) -> None:
    folder = make_adapter(llama_dir, LLAMA, tmp_path / "x")
    weights = folder / "adapter_model.safetensors"
    save_file({name: tensor * factor for name, tensor in load_file(weights).items()}, weights)
    report = engine.inspect_upload(files_of(folder))
    assert report.probe is not None and report.probe.verdict == verdict
    assert (report.probe.mean_kl is None) == (verdict == "broken")


def test_content_that_was_tried_without_a_name_leaves_nothing(engine: Engine, llama_dir: Path, tmp_path: Path) -> None:
    folder = make_adapter(llama_dir, LLAMA, tmp_path / "x", seed=7)
    report = engine.inspect_upload(files_of(folder))
    assert report.report is not None
    done = threading.Event()
    engine._loop.call(done.set)
    assert done.wait(120)
    assert engine.adapters.names() == [] and engine.adapters.stats().num_cpu == 0
    assert engine.stats().lora_rows_used == 0 and engine.stats().kv_blocks_used == 0
    engine.check_integrity()
    engine.adapters.load("same", str(folder))
    again, named = engine.inspect_upload(files_of(folder)).probe, engine.probe("same")
    assert report.probe is not None and again is not None
    assert again.mean_kl == pytest.approx(report.probe.mean_kl) and named.mean_kl == pytest.approx(report.probe.mean_kl)
    assert engine.adapters.get("same").state == "gpu"
    engine.adapters.unload("same")


def test_a_probe_that_has_no_time_left_says_so_and_ends(engine: Engine, llama_dir: Path, tmp_path: Path) -> None:
    folder = make_adapter(llama_dir, LLAMA, tmp_path / "x", seed=8)
    engine.adapters.load("x", str(folder))
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    with held_after(engine, 0):  # else it may have its tokens before it looks at the clock
        busy = engine.start_sync(TextPrompt("hello"), sampling)[0]
        report = engine.probe("x", timeout_s=0.0)
    assert (report.verdict, report.num_tokens, report.mean_kl) == ("not measured", 0, None)
    assert len([token for delta in busy for token in delta.token_ids]) == 8
    engine.adapters.unload("x")
    engine.check_integrity()


def test_a_model_that_hears_is_tried_on_a_clip_too(tiny_engine: Engine) -> None:
    prompts = tiny_engine._prober.built_prompts()
    assert [bool(built.spans) for built in prompts] == [False, False, False, True]
    report = tiny_engine.probe("tower")
    assert report.verdict == "effect" and report.num_tokens == NUM_POSITIONS * 4


def test_media_that_a_server_takes_none_of_are_left_out(
    speech_dir: Path, speech_adapters: dict[str, Path], tmp_path: Path
) -> None:
    config = EngineConfig(model=str(speech_dir), adapter_dir=str(tmp_path), limit_mm_per_prompt={"audio": 0})
    engine = Engine(config)
    try:
        engine.adapters.load("speech", str(speech_adapters["speech"]))
        report = engine.probe("speech")
        assert (report.verdict, report.num_tokens) == ("effect", NUM_POSITIONS * 3)
    finally:
        engine.close()
