"""Load on the HTTP server: throughput and latencies with Zipf's adapters, and what HTTP costs beside the bare engine.

    python -m benchmarks.serve --shape llama-3.1-8b --adapters 32 --streams 64 --seconds 20
    python -m benchmarks.serve --shape tiny --rate 20

The server is a process of its own, and so are its clients, of which there are `--clients`; every request streams. Closed loop:
`--streams` requests are under way at any time. Open loop: requests come at `--rate` a second (Poisson), and their times count
from when they were due. Then the same closed loop runs on an engine in this process, read by coroutines, without HTTP. Answers
have half to one and a half times `--output-len` tokens, so that requests do not end together. Each answer must have all its
tokens and name the adapter that was asked for; else no figure is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.load_client import Ask, Job, Load, Request, Times
from benchmarks.report import finish, refuse
from benchmarks.server import running_server
from benchmarks.workload import SHAPES, WORD_LEN, add_load_flags, around, make_prompts, write_adapter, write_model
from engine import Engine, EngineConfig, SamplingParams
from engine.config import LoRAModule
from engine.request import TokenPrompt
from engine.setup import freeze_startup_objects

RANK = 16
LINEARS = ("q_proj", "v_proj")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_load_flags(parser)
    parser.add_argument("--adapters", type=int, default=32, help="0 is the base model alone")
    parser.add_argument("--streams", type=int, default=64, help="requests under way in the closed loop")
    parser.add_argument("--clients", type=int, default=4, help="processes that the requests are shared among")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second of the open loop; 0 leaves it out")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each loop, after a fifth as much")
    return parser.parse_args(words)


def make_job(options: argparse.Namespace) -> Job:
    """What is asked, in all."""
    names: list[str | None] = [f"adapter-{number}" for number in range(options.adapters)]
    return Job(
        prompts=make_prompts(256, options.input_len, SHAPES[options.shape]["vocab_size"]),
        names=names or [None],
        zipf=options.zipf,
        output_lens=around(options.output_len),
        streams=options.streams,
        rate=options.rate,
        seconds=options.seconds,
        seed=0,
    )


def summarize(found: Sequence[Times], started: float, ended: float) -> dict[str, Any]:
    """Only tokens that came within the time count for the throughput."""
    num_tokens = sum(started <= at <= ended for times in found for at in times.tokens_at)
    first = sorted(times.tokens_at[0] - times.due_at for times in found)
    gaps = sorted((times.tokens_at[-1] - times.tokens_at[0]) / (len(times.tokens_at) - 1) for times in found)
    return {
        "requests": len(found),
        "tokens_per_s": round(num_tokens / (ended - started), 1),
        **{f"first_token_ms_p{share}": _percentile(first, share) for share in (50, 90, 99)},
        **{f"per_token_ms_p{share}": _percentile(gaps, share) for share in (50, 90, 99)},
    }


def _percentile(ordered: Sequence[float], share: int) -> float:
    return round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)] * 1000, 2)


def ask_engine(engine: Engine) -> Ask:
    """Ask an engine in this process, with the same settings."""

    async def ask(request: Request, times: Times) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=request.output_len, ignore_eos=True)
        [answer] = await engine.start(TokenPrompt(request.prompt), sampling, lora=request.name)
        async for delta in answer:
            times.tokens_at += [time.perf_counter()] * len(delta.token_ids)
        if answer.num_output_tokens != request.output_len or answer.receipt.name != request.name:
            raise RuntimeError(
                f"asked {request.name!r} for {request.output_len} tokens; got {answer.num_output_tokens}"
            )

    return ask


def load_engine(engine: Engine, job: Job) -> dict[str, Any]:
    """The closed loop without HTTP. Ends the program where an answer is wrong."""
    started = time.perf_counter() + job.seconds / 5
    try:
        found = asyncio.run(Load(ask_engine(engine), job).closed())
    except RuntimeError as error:
        refuse(str(error))
    return summarize(found, started, started + job.seconds)


def load_server(url: str, job: Job, num_clients: int, *, is_closed: bool) -> dict[str, Any]:
    """A loop over HTTP, shared among client processes. Ends the program where an answer is wrong."""
    num_clients = min(num_clients, job.streams)
    port = int(url.rpartition(":")[2])
    with ExitStack() as stack:
        clients = []
        for index in range(num_clients):
            own = dataclasses.replace(
                job, seed=index, rate=job.rate / num_clients, streams=len(range(index, job.streams, num_clients))
            )
            command = [sys.executable, "-m", "benchmarks.load_client"]
            client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            clients.append(stack.enter_context(client))
            assert client.stdin is not None
            said = {"port": port, "model": "model", "word_len": WORD_LEN, "is_closed": is_closed}
            client.stdin.write(json.dumps({**said, "job": dataclasses.asdict(own)}) + "\n")
            client.stdin.flush()
        for client in clients:
            assert client.stdout is not None
            client.stdout.readline()  # it is ready
        with ThreadPoolExecutor(num_clients) as pool:
            told = list(pool.map(lambda client: client.communicate("\n")[0], clients))
    if any(client.returncode for client in clients):
        refuse("a client found a wrong answer")
    results = [json.loads(one) for one in told]
    found = [Times(due_at, tokens_at) for result in results for due_at, tokens_at in result["times"]]
    started = max(result["started_at"] for result in results)
    ended = started + job.seconds if is_closed else max(times.tokens_at[-1] for times in found)
    return summarize(found, started, ended)


def main() -> None:
    """Measure and print."""
    options = parse()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        model = write_model(options.shape, root / "model", has_words=True)
        folders = {
            f"adapter-{number}": write_adapter(
                options.shape, RANK, number, root / "adapters" / str(number), "cpu", LINEARS
            )
            for number in range(options.adapters)
        }
        common: dict[str, Any] = {
            "load_format": "dummy", "max_num_seqs": options.streams, "max_loras": max(1, min(32, options.adapters)),
            "max_lora_rank": RANK, "max_cpu_loras": max(64, options.adapters), "max_model_len": 2048,
        }  # fmt: skip
        words = [str(model), "--served-model-name", "model", "--adapter-dir", str(root / "catalogue")]
        words += [word for name, value in common.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        words += ["--enforce-eager"] if options.enforce_eager else []
        words += ["--lora-modules", *(f"{name}={folder}" for name, folder in folders.items())] if folders else []
        job, figures = make_job(options), {}

        def note(loop: str, row: dict[str, Any]) -> None:
            figures[loop] = row
            print(f"{loop}:", "  ".join(f"{name}={value}" for name, value in row.items()), flush=True)

        with running_server(words) as server:
            note("closed", load_server(server.url, job, options.clients, is_closed=True))
            if options.rate:
                note("open", load_server(server.url, job, options.clients, is_closed=False))
        engine = Engine(
            EngineConfig(
                model=str(model), served_model_name=["model"], adapter_dir=str(root / "bare"),
                lora_modules=[LoRAModule(name, str(folder)) for name, folder in folders.items()],
                enforce_eager=options.enforce_eager, **common,
            )
        )  # fmt: skip
        freeze_startup_objects()  # As `app.py` does.
        try:
            note("bare", load_engine(engine, job))
        finally:
            engine.close(0)
    figures["http_overhead"] = round(1 - figures["closed"]["tokens_per_s"] / figures["bare"]["tokens_per_s"], 4)
    finish(vars(options), figures)


if __name__ == "__main__":
    main()
