"""The benchmarks of whole steps: they run to their end on a CPU, and refuse figures where answers are wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from safetensors.torch import load_file

from api.app import create_app
from api.settings import ServerSettings
from benchmarks import decode, load_client, load_parts, scale, serve, step_profile, stream_cost, workload
from engine import Engine, EngineConfig
from engine.request import TokenLogprob


def figures_of(module: Any, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a benchmark's `main`; returns what its last line holds."""
    monkeypatch.setattr(sys, "argv", ["benchmark", *words.split()])
    module.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A random model with two adapters, and one whose alpha is zero."""
    root = tmp_path_factory.mktemp("bench")
    model = workload.write_model("tiny", root / "model", has_words=True)
    engine = Engine(
        EngineConfig(
            model=str(model), load_format="dummy", device="cpu", dtype="float32", max_model_len=64, max_num_seqs=4,
            max_loras=2, max_lora_rank=4, enable_prefix_caching=False, adapter_dir=str(root / "catalogue"),
        )
    )  # fmt: skip
    first = workload.write_adapter("tiny", 4, 0, root / "first", "cpu")
    folders = {
        "first": first,
        "second": workload.write_adapter("tiny", 2, 1, root / "second", "cpu", ("q_proj", "v_proj")),
        "nothing": workload.link_adapter(first, 0, root / "nothing"),
    }
    for name, folder in folders.items():
        engine.adapters.load(name, str(folder))
    yield engine
    engine.close()


NAMES = [None, "first", "second", None]


def test_adapters_are_as_strong_at_any_rank(tmp_path: Path) -> None:
    def strength(rank: int) -> float:
        folder = workload.write_adapter("tiny", rank, 0, tmp_path / str(rank), "cpu", ("q_proj",))
        tensors = load_file(folder / "adapter_model.safetensors")
        pairs = zip(*(sorted(key for key in tensors if half in key) for half in ("lora_A", "lora_B")), strict=True)
        return float(sum((tensors[b].float() @ tensors[a].float()).square().sum() for a, b in pairs))

    assert strength(64) == pytest.approx(strength(16), rel=0.3)


def test_load_parts_runs_to_its_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(load_parts, "--shape tiny --rank 4 --repeat 1", monkeypatch, capsys)["figures"]
    names = {
        "open",
        "open_and_judge",
        "numbers_8",
        "numbers_8_reused",
        "load",
        "load_reused",
        "fresh_memory_1",
        "sha256_8",
    }
    assert names <= figures["disk"].keys()
    assert (
        all(times["ms"] > 0 for times in figures["disk"].values()) and ("cpu" in figures) == torch.cuda.is_available()
    )


def test_a_row_that_is_not_the_adapter_is_refused(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    writer = engine._slots._writer._writers[0]
    with engine.adapters.borrow("first") as first, engine.adapters.borrow("nothing") as nothing:
        writer.write(0, first.generation)
        load_parts.check_row(writer.groups, first.generation)
        with pytest.raises(SystemExit):
            load_parts.check_row(writer.groups, nothing.generation)
        writer.clear(0)
    assert "does not hold" in capsys.readouterr().out


def test_right_answers_pass_the_check(engine: Engine) -> None:
    prompts = workload.make_prompts(4, 9, 512)
    workload.check_rows(engine, prompts, NAMES, workload.answer_all(engine, prompts, NAMES, 3))


def test_answers_of_another_row_are_refused(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = workload.make_prompts(4, 9, 512)
    answers = workload.answer_all(engine, prompts, NAMES, 3)
    with pytest.raises(SystemExit):
        workload.check_rows(engine, prompts, NAMES, [answers[1], answers[0], *answers[2:]])
    assert "answers otherwise" in json.loads(capsys.readouterr().out)["error"]


def test_an_adapter_without_effect_is_refused(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = workload.make_prompts(1, 9, 512)
    with pytest.raises(SystemExit):
        workload.check_rows(engine, prompts, ["nothing"], workload.answer_all(engine, prompts, ["nothing"], 3))
    assert "changes nothing" in json.loads(capsys.readouterr().out)["error"]


def test_a_linked_adapter_is_other_content(engine: Engine) -> None:
    assert engine.adapters.get("first").generation != engine.adapters.get("nothing").generation


def entry(token_id: int, *values: float) -> TokenLogprob:
    """A step whose tokens 0, 1, … have these log probabilities."""
    return TokenLogprob(token_id, values[token_id], list(enumerate(values)))


def test_runs_are_compared_up_to_the_step_where_they_part() -> None:
    near, same, far = entry(0, -1.0, -1.1), entry(1, -1.1, -1.0), entry(0, -5.0, -9.0)
    assert workload.difference([near, near], [near, near], is_exact=True) is None
    assert workload.difference([near, near], [same, far], is_exact=False) is None
    assert workload.difference([near, near], [same, far], is_exact=True) is not None
    assert workload.difference([near, near], [near, far], is_exact=False) is not None


def test_pauses_of_overlapping_kernels_are_counted_once() -> None:
    idle = step_profile._idle([(0, 100), (50, 60), (90, 200), (205, 300), (400, 1000)], 2)
    assert idle == {"busy_ms": 0.448, "idle_share": 0.105, "between_share": 0.1}


def test_decode_prints_the_rows_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--shape tiny --batch 1,3 --adapters 0,1,2,8 --rank 2,4 --quick --input-len 8 --slots 8 --profile 3:2"
    line = figures_of(decode, words, monkeypatch, capsys)
    figures = line["figures"]
    assert [(row["batch"], row["adapters"]) for row in figures["decode"]] == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)]
    assert all(row["ms_per_step"] > 0 and "goal_ms" not in row for row in figures["decode"])
    assert [(row["adapters"], row["active"]) for row in figures["prefill"]] == [(0, 0), (1, 1), (2, 2), (8, 8)]
    assert figures["load_from_disk_ms"] > figures["load_from_cpu_ms"]
    assert figures["profile"]["3:2"]["top"] and line["setup"]["quick"]


def test_goals_belong_to_the_default_workload_alone() -> None:
    options = decode.parse([])
    pairs = {(batch, count) for batch in options.batch for count in options.adapters if count <= batch}
    assert set(decode.GOALS) == pairs and set(decode.PREFILL_GOALS) == set(options.adapters)

    def has_goals(words: str) -> bool:
        bench = object.__new__(decode.Bench)
        bench.options = decode.parse(words.split())
        return bench.has_goals

    assert has_goals("") and has_goals("--batch 32 --adapters 0,1 --repeat 1")
    for words in ("--quick", "--rank 64", "--rank 8,16,64", "--shape tiny", "--output-len 40", "--input-len 64"):
        assert not has_goals(words), words


def test_scale_reports_each_number_of_adapters_and_each_tier(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--shape tiny --registered 0,2,12 --slots 3 --cpu-loras 6 --requests 4 --streams 2 --seconds 0.4 --output-len 3"
    )
    figures = figures_of(scale, words, monkeypatch, capsys)["figures"]
    assert [row["registered"] for row in figures["rows"]] == [0, 2, 12]
    assert all(row["tokens_per_s"] > 0 for row in figures["rows"])
    assert figures["rows"][-1]["reads_from_disk"] > 0 == figures["rows"][1]["reads_from_disk"]
    assert all(figures["cold"][tier]["samples"] for tier in ("gpu", "cpu", "disk"))


def job_of(words: str, **changes: Any) -> load_client.Job:
    options = serve.parse(f"--shape tiny --adapters 0 --streams 2 --seconds 0.4 --input-len 8 {words}".split())
    return dataclasses.replace(serve.make_job(options), **changes)


def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    async def slow(request: load_client.Request, times: load_client.Times) -> None:
        await asyncio.sleep(0.05)
        now = time.perf_counter()
        times.tokens_at += [now, now + 0.01]

    found = asyncio.run(load_client.Load(slow, job_of("--rate 20")).open())
    figures = serve.summarize(found, 0.0, 1e9)
    assert figures["first_token_ms_p50"] >= 50
    assert figures["per_token_ms_p50"] == pytest.approx(10, abs=1)


def test_each_answer_draws_its_own_length(engine: Engine) -> None:
    asked: list[int] = []
    ask = serve.ask_engine(engine)

    async def note(request: load_client.Request, times: load_client.Times) -> None:
        asked.append(request.output_len)
        await ask(request, times)
        assert len(times.tokens_at) == request.output_len

    asyncio.run(load_client.Load(note, job_of("--output-len 10")).closed())
    assert len(set(asked)) > 1 and all(5 <= number <= 15 for number in asked)
    assert serve.load_engine(engine, job_of("--output-len 10"))["tokens_per_s"] > 0


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    """The engine behind HTTP."""
    app = create_app(engine, ServerSettings().resolve())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_clients_time_every_token_that_comes_over_http(engine: Engine, url: str) -> None:
    job = job_of("--streams 3 --output-len 8 --rate 30", names=["first", "second", None])
    closed = serve.load_server(url, job, 2, is_closed=True)
    assert closed["requests"] >= 3 and closed["tokens_per_s"] > 0
    assert 0 < closed["per_token_ms_p50"] <= closed["per_token_ms_p99"]
    opened = serve.load_server(url, job, 2, is_closed=False)
    assert opened["requests"] > 0 and opened["first_token_ms_p50"] > 0


@pytest.mark.parametrize("kept_seconds", [60.0, 0.0])
def test_a_connection_that_lay_idle_for_long_is_not_used_again(
    kept_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may end it just then."""
    monkeypatch.setattr(load_client, "KEPT_SECONDS", kept_seconds)
    num_connections, ended = 0, asyncio.Semaphore(0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while await reader.read(1 << 16):
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n.\r\n0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        ended.release()

    async def ask_twice() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            streams = load_client.HttpStreams(server.sockets[0].getsockname()[1], "base", 7)
            for _ in range(2):
                await streams.ask(load_client.Request([1], None, 1), load_client.Times(0.0))
            for connection in streams._idle:
                connection.writer.close()
                await connection.writer.wait_closed()
            for _ in range(num_connections):
                await ended.acquire()

    asyncio.run(ask_twice())
    assert num_connections == (1 if kept_seconds else 2)


def test_serve_refuses_figures_of_answers_by_another_adapter(
    engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = engine.start

    async def other(prompt: Any, sampling: Any, *, model: Any = None, lora: str | None = None, **options: Any) -> Any:
        model, lora = (None, "second") if "first" in (model, lora) else (model, lora)
        return await real(prompt, sampling, model=model, lora=lora, **options)

    monkeypatch.setattr(engine, "start", other)
    job = job_of("--output-len 4", names=["first"])
    with pytest.raises(SystemExit):
        serve.load_engine(engine, job)
    assert "first" in json.loads(capsys.readouterr().out)["error"]
    with pytest.raises(SystemExit):
        serve.load_server(url, job, 1, is_closed=True)
    assert "wrong answer" in json.loads(capsys.readouterr().out)["error"]


def test_a_tokens_way_is_measured_with_http_and_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--step-ms 1 --streams 3 --seconds 0.3 --input-len 4 --output-len 8"
    figures = figures_of(stream_cost, words, monkeypatch, capsys)["figures"]
    for way in ("bare", "http"):
        assert figures[way]["engine_us"] > 0 and figures[way]["server_us"] > 0
    assert figures["own"]["put_us"] > 0 and figures["own"]["chunk_us"] > 0
    assert figures["http"]["client"]["answers"] > 0
