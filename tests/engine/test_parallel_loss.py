"""Adapters that are fully sharded over two processes answer as in one; when one of the processes dies, everybody hears of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from engine import SamplingParams
from engine.errors import WorkerLost
from engine.request import TokenPrompt
from tests.engine.test_parallel import NAMES, PROMPTS, answers, check_equal, make_engine, make_models, planned, workers


def test_fully_sharded_adapters_equal_one_process_until_a_worker_is_killed(
    tmp_path: Path,
) -> None:
    model_dir, adapters = make_models(tmp_path)
    single = make_engine(model_dir, adapters, tmp_path / "single")
    expected = answers(single, PROMPTS, NAMES)
    single.close(drain_s=0)
    engine = make_engine(model_dir, adapters, tmp_path / "split", tensor_parallel_size=2, fully_sharded_loras=True)
    try:
        sites = single.base.surface(max_lora_rank=8, lora_dtype=torch.float32).linears.values()
        assert engine.lora_bytes == 3 * 8 * 4 * sum(site.in_features + site.out_features for site in sites) // 2
        assert planned(engine.config).lora_rows == engine.lora_bytes
        check_equal(answers(engine, PROMPTS, NAMES), expected)
        (process,) = workers(engine)
        sampling = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        running = engine.start_sync(TokenPrompt(PROMPTS[0]), sampling, lora="all")[0]
        events = iter(running)
        next(events)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="worker 1 was killed by signal 9"):
            for _ in events:
                pass
        deadline = time.monotonic() + 60
        while engine.stats().is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(WorkerLost, match="Restart the server"):
            engine.start_sync(TokenPrompt(PROMPTS[0]), sampling)
    finally:
        engine.close(drain_s=0)
    assert process.returncode == -signal.SIGKILL
