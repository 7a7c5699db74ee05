"""Load on the HTTP server: throughput and latencies with Zipf's adapters, and what HTTP costs beside the bare engine.

    python -m benchmarks.serve --shape llama-3.1-8b --adapters 32 --streams 64 --seconds 20
    python -m benchmarks.serve --shape tiny --rate 20

The server is a process of its own; every request streams. Closed loop: `--streams` requests are under way at any time. Open
loop: requests come at `--rate` a second (Poisson), and their times count from when they were due. Then the same closed loop
runs on an engine in this process, read by coroutines, without HTTP. Each answer must have all its tokens and name the
adapter that was asked for; else no figure is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import finish, refuse
from benchmarks.server import running_server
from benchmarks.workload import add_load_flags, make_prompts, write_adapter, write_model
from engine import Engine, EngineConfig, SamplingParams
from engine.config import LoRAModule
from engine.request import TokenPrompt

RANK = 16
LINEARS = ("q_proj", "v_proj")
TOKENIZER_SIZE = 256  # of `write_model`; the server takes no other ids


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_load_flags(parser)
    parser.add_argument("--adapters", type=int, default=32, help="0 is the base model alone")
    parser.add_argument("--streams", type=int, default=64, help="requests under way in the closed loop")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second of the open loop; 0 leaves it out")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each loop, after a fifth as much")
    return parser.parse_args(words)


@dataclasses.dataclass
class Times:
    """One answer: when it was due, when its tokens came, in seconds on the monotonic clock."""

    due_at: float
    tokens_at: list[float] = dataclasses.field(default_factory=list)


Ask = Callable[[list[int], str | None, Times], Awaitable[None]]


class Load:
    """Asks again and again; prompts and adapters are the same in each run."""

    def __init__(self, ask: Ask, options: argparse.Namespace) -> None:
        self._ask = ask
        self._options = options
        self._random = random.Random(0)
        names = [f"adapter-{number}" for number in range(options.adapters)]
        self._names: list[str | None] = list(names) or [None]
        self._weights = [1 / rank**options.zipf for rank in range(1, len(self._names) + 1)]
        self._prompts = make_prompts(256, options.input_len, TOKENIZER_SIZE)
        self._times: list[Times] = []

    async def closed(self) -> dict[str, Any]:
        """`--streams` requests at any time."""
        await self._closed_for(self._options.seconds / 5)
        self._times.clear()
        started = time.perf_counter()
        await self._closed_for(self._options.seconds)
        return self._figures(started, started + self._options.seconds)

    async def open(self) -> dict[str, Any]:
        """Requests at a rate, whatever becomes of the earlier ones."""
        self._times.clear()
        started = due = time.perf_counter()
        tasks = []
        while due < started + self._options.seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._one(due)))
            due += self._random.expovariate(self._options.rate)
        await asyncio.gather(*tasks)
        return self._figures(started, time.perf_counter())

    async def _closed_for(self, seconds: float) -> None:
        until = time.perf_counter() + seconds

        async def lane() -> None:
            while time.perf_counter() < until:
                await self._one(time.perf_counter())

        await asyncio.gather(*(lane() for _ in range(self._options.streams)))

    async def _one(self, due_at: float) -> None:
        (name,) = self._random.choices(self._names, self._weights)
        times = Times(due_at)
        await self._ask(self._random.choice(self._prompts), name, times)
        if len(times.tokens_at) < 2:
            refuse("an answer came in fewer than two pieces")
        self._times.append(times)

    def _figures(self, started: float, ended: float) -> dict[str, Any]:
        """Only tokens that came within the time count for the throughput."""
        num_tokens = sum(started <= at <= ended for times in self._times for at in times.tokens_at)
        first = sorted(times.tokens_at[0] - times.due_at for times in self._times)
        gaps = sorted((times.tokens_at[-1] - times.tokens_at[0]) / (len(times.tokens_at) - 1) for times in self._times)
        return {
            "requests": len(self._times),
            "tokens_per_s": round(num_tokens / (ended - started), 1),
            **{f"first_token_ms_p{share}": _percentile(first, share) for share in (50, 90, 99)},
            **{f"per_token_ms_p{share}": _percentile(gaps, share) for share in (50, 90, 99)},
        }


def _percentile(ordered: Sequence[float], share: int) -> float:
    return round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)] * 1000, 2)


def ask_http(client: httpx.AsyncClient, output_len: int) -> Ask:
    """Ask over HTTP; the text of a random model may hold several tokens back, so pieces are not counted but tokens are."""

    async def ask(prompt: list[int], name: str | None, times: Times) -> None:
        body = {
            "model": name or "model", "prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}, "logprobs": 0,
        }  # fmt: skip
        num_tokens, receipt = 0, {}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                refuse((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                receipt = chunk.get("lora", receipt)
                num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
                if chunk["choices"] and chunk["choices"][0]["logprobs"]:
                    times.tokens_at += [time.perf_counter()] * len(chunk["choices"][0]["logprobs"]["tokens"])
        if num_tokens != output_len or receipt.get("name") != name:
            refuse(f"asked {name!r} for {output_len} tokens; got {num_tokens} of {receipt.get('name')!r}")

    return ask


def ask_engine(engine: Engine, output_len: int) -> Ask:
    """Ask an engine in this process, with the same settings."""
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, logprobs=0)

    async def ask(prompt: list[int], name: str | None, times: Times) -> None:
        [answer] = await engine.start(TokenPrompt(prompt), sampling, lora=name)
        async for delta in answer:
            times.tokens_at += [time.perf_counter()] * len(delta.token_ids)
        if answer.num_output_tokens != output_len or answer.receipt.name != name:
            refuse(f"asked {name!r} for {output_len} tokens; got {answer.num_output_tokens}")

    return ask


async def measure_server(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both loops over HTTP."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        load = Load(ask_http(client, options.output_len), options)
        figures = {"closed": await load.closed()}
        if options.rate:
            figures["open"] = await load.open()
        return figures


def main() -> None:
    """Measure and print."""
    options = parse()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        model = write_model(options.shape, root / "model")
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
        with running_server(words) as server:
            figures = asyncio.run(measure_server(server.url, options))
        engine = Engine(
            EngineConfig(
                model=str(model), served_model_name=["model"], adapter_dir=str(root / "bare"),
                lora_modules=[LoRAModule(name, str(folder)) for name, folder in folders.items()],
                enforce_eager=options.enforce_eager, **common,
            )
        )  # fmt: skip
        try:
            figures["bare"] = asyncio.run(Load(ask_engine(engine, options.output_len), options).closed())
        finally:
            engine.close(0)
    figures["http_overhead"] = round(1 - figures["closed"]["tokens_per_s"] / figures["bare"]["tokens_per_s"], 4)
    finish(vars(options), figures)


if __name__ == "__main__":
    main()
