"""A model over two GPUs answers as it does on one, with recorded graphs and without; a worker that dies frees the other."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.config import LoRAModule
from engine.errors import AppError, InvalidRequest, WorkerLost
from engine.request import TokenPrompt
from tests.conftest import LLAMA
from tests.oracles import Oracle, random_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[{"enforce_eager": True}, {}, {"fully_sharded_loras": True}],
    ids=["eager", "graphs", "graphs, fully sharded"],
)
def engine(
    request: pytest.FixtureRequest,
    llama_dir: Path,
    llama_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    settings: dict[str, Any] = request.param
    engine = Engine(
        EngineConfig(
            model=str(llama_dir), device="cuda", dtype="float32", kv_cache_memory_mb=64, tensor_parallel_size=2,
            lora_modules=[LoRAModule(name, str(path)) for name, path in llama_adapters.items()],
            max_loras=3, max_lora_rank=8, max_num_batched_tokens=50, max_num_seqs=7, max_model_len=200,
            adapter_dir=str(tmp_path_factory.mktemp("catalogue")), **settings,
        ),
        checks_integrity=True,
    )  # fmt: skip
    yield engine
    engine.close()


def test_a_start_that_is_refused_after_loading_ends_soon(llama_dir: Path, tmp_path: Path) -> None:
    """First, while this process is in no group: nothing waits for workers that are at another place."""
    config = EngineConfig(
        model=str(llama_dir), device="cuda", dtype="float32", kv_cache_memory_mb=64, tensor_parallel_size=2,
        max_model_len=1_000_000, adapter_dir=str(tmp_path),
    )  # fmt: skip
    errors: list[BaseException] = []

    def start() -> None:
        try:
            Engine(config)
        except AppError as error:
            errors.append(error)

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    thread.join(180)
    assert not thread.is_alive() and isinstance(errors[0], InvalidRequest)
    assert not torch.distributed.is_initialized()


def test_mixed_batches_equal_peft_one_by_one(engine: Engine, llama_dir: Path, llama_adapters: dict[str, Path]) -> None:
    oracle = Oracle(llama_dir, LLAMA, llama_adapters)
    names = [None, "qv", "all", "rs", "patterns"]
    plan = [(names[row % 5], random_ids(length, 100 + row % 3)) for row, length in enumerate([1, 7, 64, 65, 12] * 3)]
    expected = [oracle.generate(prompt, 20, adapter) for adapter, prompt in plan]
    for _ in range(2):  # The second time through the prefix cache, and with other adapters in the rows.
        answers = [engine.start_sync(TokenPrompt(prompt), GREEDY, lora=name)[0] for name, prompt in plan]
        assert [[token for delta in answer for token in delta.token_ids] for answer in answers] == expected


def test_a_killed_worker_ends_running_answers(engine: Engine) -> None:
    """Last for each engine: rank 0's kernels wait for sums that never come, and must be let go."""
    assert engine._team is not None
    (worker,) = engine._team._workers
    sampling = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
    events = iter(engine.start_sync(TokenPrompt(random_ids(10, 1)), sampling)[0])
    next(events)
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="killed by signal 9"):
        for _ in events:
            pass
