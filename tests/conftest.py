"""Fixtures that many tests share: tiny models and adapters on disk, and engines on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig
from engine.config import LoRAModule
from tests.oracles import make_adapter, make_model

LLAMA = "LlamaForCausalLM"
SPEECH = "GraniteSpeechForConditionalGeneration"


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return make_model(LLAMA, tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def llama_adapters(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of different rank, scale and modules on the tiny Llama."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "qv": make_adapter(llama_dir, LLAMA, root / "qv", rank=4, seed=1),
        "all": make_adapter(llama_dir, LLAMA, root / "all", targets="all-linear", rank=8, alpha=6, seed=2, std=0.2),
        "rs": make_adapter(llama_dir, LLAMA, root / "rs", targets=["k_proj", "down_proj"], rank=3, alpha=5, seed=3,
                           use_rslora=True),
        "patterns": make_adapter(
            llama_dir, LLAMA, root / "patterns", targets=["o_proj", "gate_proj"], rank=6, alpha=9, seed=4,
            rank_pattern={"layers.0.self_attn.o_proj": 2}, alpha_pattern={"gate_proj": 12},
        ),
    }  # fmt: skip


@pytest.fixture(scope="session")
def speech_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Granite Speech."""
    return make_model(SPEECH, tmp_path_factory.mktemp("models") / "tiny-granite-speech")


@pytest.fixture(scope="session")
def speech_adapters(speech_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters on the tiny Granite Speech: on the language model alone, and on tower and connector too."""
    root = tmp_path_factory.mktemp("speech-adapters")
    everything = r".*\.(q_proj|up_proj|to_q|to_kv|query|key|linear)"
    return {
        "speech": make_adapter(speech_dir, SPEECH, root / "speech", rank=8, seed=11),
        "style": make_adapter(speech_dir, SPEECH, root / "style", targets=["o_proj"], rank=4, seed=12, std=0.4),
        "tower": make_adapter(speech_dir, SPEECH, root / "tower", targets=everything, rank=5, seed=13, std=0.15),
    }


@pytest.fixture(scope="session")
def tiny_engine(
    speech_dir: Path, speech_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine on the tiny Granite Speech with three adapters; `speech` is the default for audio."""
    engine = Engine(
        EngineConfig(
            model=str(speech_dir),
            lora_modules=[LoRAModule(name, str(path)) for name, path in speech_adapters.items()],
            default_mm_loras={"audio": "speech"},
            max_num_seqs=16,
            max_loras=4,
            adapter_dir=str(tmp_path_factory.mktemp("catalogue")),
        ),
        checks_integrity=True,
    )
    yield engine
    engine.close(drain_s=1.0)
    engine.check_integrity()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
