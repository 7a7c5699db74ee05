"""Many registered adapters: throughput by their number, and what a cold adapter costs itself and its neighbours.

    python -m benchmarks.scale --shape llama-3.1-8b --registered 0,1,10,100,1000 --slots 32 --cpu-loras 128

Adapters lie on disk (in the page cache), some of them in CPU memory, a few in the rows of the LoRA buffers. A closed
loop of requests chooses among them by Zipf's law. To keep disk and start-up small they are of rank 16 on q_proj and
v_proj, and share 64 sets of weights under different alphas, which makes each one other content to the engine. Requests
picked from the loop must answer as they do alone on the idle engine; else no figure is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import finish, refuse
from benchmarks.workload import (
    NUM_TOP,
    add_load_flags,
    check_rows,
    link_adapter,
    make_prompts,
    numbers,
    write_adapter,
    write_model,
)
from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.request import TokenPrompt

RANK = 16
LINEARS = ("q_proj", "v_proj")
NUM_WEIGHT_FILES = 64
NUM_CHECKED = 8
"""Requests of each row whose answers are compared with those of the idle engine."""
CHECKED_EVERY = 5
NUM_COLD = 5
"""Adapters of each tier whose first token is timed."""
POLL_S = 0.0005
MAX_MODEL_LEN = 2048


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_load_flags(parser)
    parser.add_argument("--registered", type=numbers, default=[0, 1, 10, 100, 1000], help="0 is the base model alone")
    parser.add_argument("--slots", type=int, default=32, help="rows of the LoRA buffers")
    parser.add_argument("--cpu-loras", type=int, default=128, help="adapters kept in CPU memory")
    parser.add_argument("--requests", type=int, default=64, help="requests under way at any time")
    parser.add_argument("--streams", type=int, default=32, help="requests that stream while an adapter is loaded")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time of each row, after a fifth as much")
    return parser.parse_args(words)


@dataclasses.dataclass
class Lane:
    """One request of the closed loop."""

    name: str | None
    prompt: list[int]
    is_checked: bool
    submitted_at: float
    starting: Future[list[Answer]]
    answer: Answer | None = None
    first_at: float | None = None

    def poll(self, now: float) -> bool:
        """Note the first token; True once the answer has ended. Raises what the request failed with."""
        if self.answer is None and self.starting.done():
            self.answer = self.starting.result()[0]
        if self.answer is None:
            return False
        if self.first_at is None and self.answer.num_output_tokens:
            self.first_at = now
        return self.answer.finish_reason is not None


class ClosedLoop:
    """Keeps a number of requests under way; adapters are drawn by Zipf's law.

    Answers are looked at twice a millisecond rather than read token by token, so that readers in this process take no
    time from the engine's thread.

    Args:
        engine: what is measured.
        names: adapters, the most popular first; none means the base model.
        options: the command line.
    """

    def __init__(self, engine: Engine, names: Sequence[str], options: argparse.Namespace) -> None:
        self._engine = engine
        self._names: list[str | None] = list(names) or [None]
        self._weights = [1 / rank**options.zipf for rank in range(1, len(self._names) + 1)]
        self._options = options
        self._random = random.Random(0)
        self._prompts = make_prompts(256, options.input_len, engine.base.vocab_size)
        self._num_started = 0
        self._done: list[Lane] = []

    def run(self) -> dict[str, Any]:
        """The row's figures; its checked answers have been found right."""
        with ThreadPoolExecutor(self._options.requests) as threads:
            lanes = [self._start(threads) for _ in range(self._options.requests)]
            self._keep_up(lanes, threads, time.perf_counter() + self._options.seconds / 5)
            self._done.clear()
            tokens, reads = self._engine.stats().generated_tokens, _num_reads(self._engine)
            started = time.perf_counter()
            self._keep_up(lanes, threads, started + self._options.seconds)
            seconds = time.perf_counter() - started
            tokens, reads = self._engine.stats().generated_tokens - tokens, _num_reads(self._engine) - reads
            timed = list(self._done)
            for lane in lanes:
                lane.answer = lane.answer or lane.starting.result()[0]
                lane.answer.abort()
        self._check(timed)
        waits = sorted((lane.first_at or 0.0) - lane.submitted_at for lane in timed)
        return {
            "tokens_per_s": round(tokens / seconds, 1),
            "requests_per_s": round(len(timed) / seconds, 2),
            "adapters_asked": len({lane.name for lane in timed}),
            "reads_from_disk": reads,
            "first_token_ms_p50": round(waits[len(waits) // 2] * 1000, 1),
            "first_token_ms_p99": round(waits[int(len(waits) * 0.99)] * 1000, 1),
        }

    def _start(self, threads: ThreadPoolExecutor) -> Lane:
        (name,) = self._random.choices(self._names, self._weights)
        prompt = self._prompts[self._num_started % len(self._prompts)]
        is_checked = self._num_started % CHECKED_EVERY == 0
        self._num_started += 1
        sampling = SamplingParams(
            temperature=0,
            max_tokens=self._options.output_len,
            ignore_eos=True,
            logprobs=NUM_TOP if is_checked else None,
        )
        starting = threads.submit(self._engine.start_sync, TokenPrompt(prompt), sampling, lora=name)
        return Lane(name, prompt, is_checked, time.perf_counter(), starting)

    def _keep_up(self, lanes: list[Lane], threads: ThreadPoolExecutor, until: float) -> None:
        """Replace requests that have ended by new ones until a time."""
        while (now := time.perf_counter()) < until:
            for index, lane in enumerate(lanes):
                if lane.poll(now):
                    self._done.append(lane)
                    lanes[index] = self._start(threads)
            time.sleep(POLL_S)

    def _check(self, lanes: Sequence[Lane]) -> None:
        """Answers given in the crowd equal those of the idle engine; one for each adapter, as far as they go."""
        if not lanes:
            refuse("no request ended in the measured time; raise --seconds")
        picked = {lane.name: lane for lane in lanes if lane.is_checked}
        if not picked:
            refuse("no checked request ended in the measured time; raise --seconds")
        chosen = list(picked.values())[-NUM_CHECKED:]
        answers = [[entry for delta in lane.answer or () for entry in delta.logprobs] for lane in chosen]
        if any(len(answer) != self._options.output_len for answer in answers):
            refuse(f"a checked answer does not have {self._options.output_len} tokens")
        check_rows(self._engine, [lane.prompt for lane in chosen], [lane.name for lane in chosen], answers)


def _num_reads(engine: Engine) -> int:
    return sum(engine.adapters.stats().loads.values())


def watch_gaps(streams: Sequence[Answer], is_over: Callable[[], bool]) -> list[float]:
    """Seconds between the tokens of each stream, seen twice a millisecond, until `is_over` and a token after it."""
    counts = [answer.num_output_tokens for answer in streams]
    last = [time.perf_counter()] * len(streams)
    gaps: list[float] = []
    waiting: set[int] | None = None
    while waiting is None or waiting:
        now = time.perf_counter()
        for index, answer in enumerate(streams):
            if answer.num_output_tokens != counts[index] or answer.finish_reason is not None:
                gaps.append(now - last[index])
                counts[index], last[index] = answer.num_output_tokens, now
                (waiting or set()).discard(index)
        if waiting is None and is_over():
            waiting = set(range(len(streams)))
        time.sleep(POLL_S)
    if any(answer.finish_reason is not None for answer in streams):
        refuse("the streams ended before the adapter was there")
    return gaps


class ColdStart:
    """First tokens of adapters that lie on disk, in CPU memory or in a row, while others stream.

    The streams use all rows but one: an adapter that finds none free would wait for a request to end, not for its
    weights.
    """

    def __init__(self, engine: Engine, names: Sequence[str], options: argparse.Namespace) -> None:
        self._engine = engine
        self._names = names
        self._options = options
        self._hot = names[: max(1, min(options.slots - 1, options.streams))]
        self._prompts = make_prompts(options.streams + 1, options.input_len, engine.base.vocab_size, seed=1)
        self._sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    def run(self) -> dict[str, Any]:
        """Milliseconds by the tier that holds the adapter: its first token, and the streams' longest pause meanwhile."""
        figures: dict[str, Any] = {"streams": self._options.streams, "stream_adapters": len(self._hot)}
        quiet: list[float] = []
        for tier in ("gpu", "cpu", "disk"):
            rows: list[tuple[float, float]] = []
            while len(rows) < NUM_COLD and (row := self._measure(tier, quiet)) is not None:
                rows.append(row)
            if rows:
                first, longest = zip(*rows, strict=True)
                figures[tier] = {
                    "samples": len(rows),
                    "first_token_ms": round(statistics.median(first) * 1000, 2),
                    "first_token_ms_max": round(max(first) * 1000, 2),
                    "longest_gap_ms": round(statistics.median(longest) * 1000, 2),
                    "longest_gap_ms_max": round(max(longest) * 1000, 2),
                }
            else:
                figures[tier] = None
        figures["quiet_gap_ms"] = round(statistics.median(quiet) * 1000, 2)
        figures["quiet_gap_ms_max"] = round(max(quiet) * 1000, 2)
        return figures

    def _measure(self, tier: str, quiet: list[float]) -> tuple[float, float] | None:
        """One adapter's first token and the streams' longest gap, in seconds; None where no adapter is in the tier."""
        streams = [
            self._engine.start_sync(
                TokenPrompt(self._prompts[row]), self._sampling, lora=self._hot[row % len(self._hot)]
            )[0]
            for row in range(self._options.streams)
        ]
        try:
            while not all(answer.num_output_tokens for answer in streams):
                time.sleep(POLL_S)
            goal = streams[-1].num_output_tokens + 8
            quiet += watch_gaps(streams, lambda: streams[-1].num_output_tokens >= goal)
            name = self._find(tier)
            return None if name is None else self._first_token(name, streams)
        finally:
            for answer in streams:
                answer.abort()
            for answer in streams:
                for _ in answer:
                    pass

    def _find(self, tier: str) -> str | None:
        """The least popular adapter that lies there now and is not being used."""
        if tier == "gpu":
            return self._hot[0]
        others = [name for name in reversed(self._names) if name not in self._hot]
        return next((name for name in others if self._engine.adapters.get(name).state == tier), None)

    def _first_token(self, name: str, streams: Sequence[Answer]) -> tuple[float, float]:
        sampling = dataclasses.replace(self._sampling, max_tokens=1)
        ended_at: list[float] = []

        def ask() -> None:
            for _ in self._engine.start_sync(TokenPrompt(self._prompts[-1]), sampling, lora=name)[0]:
                pass
            ended_at.append(time.perf_counter())

        with ThreadPoolExecutor(1) as threads:
            started = time.perf_counter()
            asking = threads.submit(ask)
            gaps = watch_gaps(streams, asking.done)
            asking.result()
        return ended_at[0] - started, max(gaps)


def write_adapters(shape: str, count: int, root: Path, device: str) -> list[Path]:
    """Folders of `count` adapters, each of other content."""
    sources = [
        write_adapter(shape, RANK, number, root / f"source-{number}", device, LINEARS)
        for number in range(min(count, NUM_WEIGHT_FILES))
    ]
    return [
        link_adapter(sources[number % len(sources)], RANK * (1 + number // len(sources) / 32), root / f"scale-{number}")
        for number in range(count)
    ]


def main() -> None:
    """Load, then measure row by row; each row's figures come out once its answers have been checked."""
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = max(options.registered)
    with tempfile.TemporaryDirectory() as root:
        engine = Engine(
            EngineConfig(
                model=str(write_model(options.shape, Path(root) / "model")), load_format="dummy",
                dtype="bfloat16" if device == "cuda" else "float32", max_model_len=MAX_MODEL_LEN,
                max_num_seqs=max(options.requests, options.streams + 1), max_num_batched_tokens=8192,
                max_loras=options.slots, max_cpu_loras=max(options.cpu_loras, options.slots), max_lora_rank=RANK,
                enable_prefix_caching=False, enforce_eager=options.enforce_eager,
                adapter_dir=str(Path(root) / "catalogue"),
            )
        )  # fmt: skip
        started = time.perf_counter()
        folders = write_adapters(options.shape, count, Path(root) / "adapters", device)
        write_s = time.perf_counter() - started
        names: list[str] = []
        rows = []
        register_s = 0.0
        for registered in sorted(options.registered):
            started = time.perf_counter()
            fresh = [f"adapter-{number}" for number in range(len(names), registered)]
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(engine.adapters.load, fresh, folders[len(names) : registered]))
            names += fresh
            register_s += time.perf_counter() - started
            rows.append({"registered": registered, **ClosedLoop(engine, names, options).run()})
            print("  ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
        cold = ColdStart(engine, names, options).run() if names else None
        megabytes = engine.adapters.get(names[0]).num_bytes / 1e6 if names else 0.0
        engine.close()
    for tier, figures in (cold or {}).items():
        print(f"{tier}: {figures}")
    setup = {
        **vars(options), "rank": RANK, "linears": LINEARS, "adapter_mb": round(megabytes, 2),
        "weight_files": min(count, NUM_WEIGHT_FILES), "dtype": str(engine.base.dtype),
    }  # fmt: skip
    finish(
        setup,
        {"rows": rows, "cold": cold, "write_seconds": round(write_s, 1), "register_seconds": round(register_s, 1)},
    )


if __name__ == "__main__":
    main()
