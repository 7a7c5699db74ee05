"""Prefetch brings an adapter into CPU memory and a row before any request asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.config import LoRAModule
from engine.errors import EngineClosed
from engine.request import TokenPrompt
from tests.oracles import random_ids


@pytest.fixture
def engine(llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path) -> Iterator[Engine]:
    modules = [LoRAModule(name, str(path)) for name, path in llama_adapters.items()]
    engine = Engine(
        EngineConfig(
            model=str(llama_dir), device="cpu", lora_modules=modules, max_loras=1, max_cpu_loras=1, max_num_seqs=4,
            max_model_len=100, kv_cache_memory_mb=16, adapter_dir=str(tmp_path),
        ),
        checks_integrity=True,
    )  # fmt: skip
    yield engine
    engine.close()
    engine.check_integrity()


def test_a_prefetched_adapter_is_in_its_row_and_counts_no_request(engine: Engine) -> None:
    assert engine.adapters.get("qv").state != "gpu" and engine.adapters.get("all").state != "gpu"
    assert engine.prefetch("qv").result(120)
    info = engine.adapters.get("qv")
    assert info.state == "gpu" and info.num_requests == 0
    assert engine.prefetch("all").result(120)
    assert engine.adapters.get("all").state == "gpu" and engine.adapters.get("qv").state == "disk"
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    list(engine.start_sync(TokenPrompt(random_ids(5, 1)), sampling, lora="all")[0])
    assert engine._slots is not None and engine._slots.loads == 2


def test_faults_of_a_prefetch_are_logged_and_not_raised(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    assert not engine.prefetch("nobody").result(120)
    assert "event=prefetch_failed adapter=nobody" in caplog.text
    engine.close()
    with pytest.raises(EngineClosed):
        engine.prefetch("qv")
