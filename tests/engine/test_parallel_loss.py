"""Adapters that are fully sharded over two processes answer as in one; when one of the processes dies, everybody hears of it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine import SamplingParams
from engine import engine as engine_module
from engine.config import EngineConfig
from engine.errors import InvalidRequest, WorkerLost
from engine.parallel import team as team_module
from engine.parallel.messages import SharedSlab, WriteRow, receive
from engine.parallel.team import Team, _Worker
from engine.request import TokenPrompt
from tests.engine.test_parallel import NAMES, PROMPTS, answers, check_equal, make_engine, make_models, planned, workers
from tests.oracles import make_model
from tests.pace import held_after


def test_fully_sharded_adapters_equal_one_process_until_a_worker_is_killed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_dir, adapters = make_models(tmp_path)
    single = make_engine(model_dir, adapters, tmp_path / "single")
    expected = answers(single, PROMPTS, NAMES)
    single.close(drain_s=0)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)  # Whose modules no worker imports.
    engine = make_engine(model_dir, adapters, tmp_path / "split", tensor_parallel_size=2, fully_sharded_loras=True)
    try:
        sites = single.base.surface(max_lora_rank=8, lora_dtype=torch.float32).linears.values()
        assert engine.lora_bytes == 3 * 8 * 4 * sum(site.in_features + site.out_features for site in sites) // 2
        assert planned(engine.config).lora_rows == engine.lora_bytes
        check_equal(answers(engine, PROMPTS, NAMES), expected)
        (process,) = workers(engine)
        sampling = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        with held_after(engine):
            events = iter(engine.start_sync(TokenPrompt(PROMPTS[0]), sampling, lora="all")[0])
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


def test_somebody_elses_process_group_is_left_alone(tmp_path: Path) -> None:
    model_dir = make_model("LlamaForCausalLM", tmp_path / "llama")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(InvalidRequest, match="another process group, already"):
            make_engine(model_dir, {}, tmp_path / "catalogue", tensor_parallel_size=2)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_a_worker_that_dies_before_it_meets_the_others_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = make_model("LlamaForCausalLM", tmp_path / "llama")
    monkeypatch.setattr(team_module, "_PROGRAM", "import sys; sys.stdin.close(); sys.exit(3)")
    monkeypatch.setattr(team_module, "join_group", lambda *_: pytest.fail("waited where nobody comes"))
    with pytest.raises(WorkerLost, match="worker 1 ended with status 3"):
        make_engine(model_dir, {}, tmp_path / "catalogue", tensor_parallel_size=2)


def test_an_adapter_that_arrives_in_part_ends_the_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "_NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(SharedSlab, "send", lambda *_: (_ for _ in ()).throw(OSError("no descriptors left")))
    team = Team(EngineConfig(tensor_parallel_size=2))
    losses: list[WorkerLost] = []
    team.on_loss = losses.append
    process = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)
    ours, theirs = Pipe()
    team._workers.append(_Worker(1, process, ours))
    slab = SharedSlab(4, torch.float32)
    try:
        with pytest.raises(WorkerLost, match="worker 1 does not listen"):
            team.send_row(lambda _: (WriteRow(1, [], 4, torch.float32), slab))
        assert isinstance(receive(theirs), WriteRow), "the worker would take what comes next for the adapter's file"
        assert len(losses) == 1 and process.returncode == -signal.SIGKILL
        with pytest.raises(OSError):
            os.fstat(slab._descriptor)
    finally:
        team.close()


def test_a_fault_while_the_team_is_closed_is_not_swallowed() -> None:
    team = Team(EngineConfig(tensor_parallel_size=2))
    team.close()
    with pytest.raises(ValueError, match="lost"), team.in_step():
        raise ValueError("lost")


def test_a_refused_start_ends_the_workers_without_a_word_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model_dir = make_model("LlamaForCausalLM", tmp_path / "llama")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    teams: list[Team] = []
    least_kv_bytes = Team.least_kv_bytes
    monkeypatch.setattr(Team, "least_kv_bytes", lambda team, own: teams.append(team) or least_kv_bytes(team, own))
    with pytest.raises(InvalidRequest, match="max-model-len"):
        make_engine(model_dir, {}, tmp_path / "catalogue", tensor_parallel_size=2, max_model_len=100_000)
    ((worker,),) = [team._workers for team in teams]
    assert worker.process.returncode is not None and not dist.is_initialized()
    assert "worker_failed" not in capfd.readouterr().err
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_stalled_worker_does_not_keep_the_engine_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "STALL_S", 0.5)
    model_dir = make_model("LlamaForCausalLM", tmp_path / "llama")
    engine = make_engine(model_dir, {}, tmp_path / "catalogue", tensor_parallel_size=2)
    (process,) = workers(engine)
    sampling = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    with held_after(engine):
        events = iter(engine.start_sync(TokenPrompt(PROMPTS[0]), sampling)[0])
        next(events)
        process.send_signal(signal.SIGSTOP)
    watch = threading.Timer(60, process.kill)  # So that the test ends where closing does not.
    watch.start()
    engine.close(drain_s=0)
    watch.cancel()
    with pytest.raises(WorkerLost, match="one of them does not answer"):
        for _ in events:
            pass
    assert process.returncode == -signal.SIGKILL and not dist.is_initialized()
