"""Decode and prefill: milliseconds a step by batch size and number of adapters, start-up, and loading an adapter.

    python -m benchmarks.decode --shape llama-3.1-8b --batch 1,8,32,128,256 --adapters 0,1,8,32 --rank 16
    python -m benchmarks.decode --shape llama-3.1-70b --tensor-parallel-size 2 --batch 1,8,32 --adapters 0,1,8 --slots 8

Weights are random and need no download. Prompts of random tokens, greedy, end of text ignored, no prefix cache,
adapters dealt round robin, the best of two runs after a warm-up. Milliseconds a step = wall time / tokens generated for
each request, prefill included. Before anything is timed, a mixed batch must agree with its rows run one by one, and
adapters must change the answers; else no figure is printed. `--profile` says where the time goes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import finish
from benchmarks.step_profile import profile_decode, profile_prefill, show
from benchmarks.workload import (
    SHAPES,
    Timing,
    answer_all,
    check_rows,
    deal,
    make_prompts,
    numbers,
    time_batch,
    write_adapter,
    write_model,
)
from engine import Engine, EngineConfig
from engine.setup import freeze_startup_objects

PREFILL = (8, 2048)
"""Prompts and tokens of each in the prefill rows."""
QUICK_PREFILL = (8, 128)
NUM_LOADS = 5
"""Adapters whose loading is timed; the medians are reported."""
WARM_UP_LEN = 32
"""Tokens of the warm-up at most; it sets up what the timed runs use, and is no figure."""

GOALS: dict[tuple[int, int], tuple[float, float]] = {
    (1, 0): (4.9, 1.0), (1, 1): (5.4, 0.91),
    (8, 0): (5.1, 1.0), (8, 1): (5.8, 0.88), (8, 8): (6.2, 0.82),
    (32, 0): (5.8, 1.0), (32, 1): (6.5, 0.89), (32, 8): (6.9, 0.84), (32, 32): (7.3, 0.80),
    (128, 0): (10.2, 1.0), (128, 1): (12.0, 0.85), (128, 8): (12.5, 0.82), (128, 32): (13.5, 0.76),
    (256, 0): (17.0, 1.0), (256, 1): (20.0, 0.85), (256, 8): (20.5, 0.83), (256, 32): (22.0, 0.77),
}  # fmt: skip
"""(batch, adapters) -> milliseconds a step and share of the base model's speed to reach: on one NVIDIA H200, for the
shape of Llama-3.1-8B and rank 16, with the default lengths."""
PREFILL_GOALS = {0: 0.39, 1: 0.45, 8: 0.45, 32: 0.45}
"""Adapters -> seconds for `PREFILL`; same set-up."""
OTHER_GOALS = {"start_seconds": 60.0, "load_from_disk_ms": 40.0, "load_from_cpu_ms": 5.0}
"""Same set-up; an adapter of 84 MB whose file is in the page cache."""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 128, 256])
    parser.add_argument(
        "--adapters", type=numbers, default=[0, 1, 8, 32], help="rows with more than requests are left out"
    )
    parser.add_argument("--rank", type=numbers, default=[16], help="ranks, dealt to the adapters in turn")
    parser.add_argument("--slots", type=int, default=32, help="rows of the LoRA buffers, at least the adapters")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=None, help="256 up to batch 32, 128 above")
    parser.add_argument("--repeat", type=int, default=2, help="timed runs of each row; the best counts")
    parser.add_argument("--enforce-eager", action="store_true", help="no compilation and no CUDA graphs")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that the model is spread over")
    parser.add_argument("--fully-sharded-loras", action="store_true", help="cut both halves of adapters")
    parser.add_argument("--skip-prefill", action="store_true")
    parser.add_argument("--skip-loads", action="store_true", help="no timing of loads and first tokens")
    parser.add_argument(
        "--quick", action="store_true", help="short answers and prompts, one run: a smoke test, no figures"
    )
    parser.add_argument(
        "--profile", nargs="?", const="32:32", default="", metavar="BATCH:ADAPTERS,…",
        help="after the table, profile these steps (32:32 alone); prefill:8 is the prefill with 8 adapters",
    )  # fmt: skip
    options = parser.parse_args(words)
    if options.quick:
        options.output_len, options.repeat = options.output_len or 8, 1
    return options


class Bench:
    """An engine with its adapters, and the rows measured on it.

    Args:
        options: the command line.
        root: an empty folder.
    """

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options = options
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.prefill = QUICK_PREFILL if options.quick else PREFILL
        num_adapters = max(options.adapters)
        # One adapter more than are timed, since the first one ever also sets things up.
        num_written = max(num_adapters, 0 if options.skip_loads else NUM_LOADS + 1) if num_adapters else 0
        self.names = [f"adapter-{number}" for number in range(num_written)]
        model = write_model(options.shape, root / "model")
        started = time.perf_counter()
        self.engine = Engine(
            EngineConfig(
                model=str(model), load_format="dummy", dtype="bfloat16" if self.device == "cuda" else "float32",
                max_model_len=max(PREFILL[1], options.input_len + (options.output_len or 256)) + 64,
                max_num_seqs=max(*options.batch, PREFILL[0]), max_num_batched_tokens=8192,
                max_loras=max(options.slots, num_adapters), max_cpu_loras=max(64, options.slots, num_written),
                tensor_parallel_size=options.tensor_parallel_size, fully_sharded_loras=options.fully_sharded_loras,
                max_lora_rank=max(options.rank), enable_prefix_caching=False, enforce_eager=options.enforce_eager,
                adapter_dir=str(root / "catalogue"),
            )
        )  # fmt: skip
        self.start_seconds = time.perf_counter() - started
        freeze_startup_objects()  # As `app.py` does.
        self.folders = [
            write_adapter(options.shape, options.rank[number % len(options.rank)], number, root / name, self.device)
            for number, name in enumerate(self.names)
        ]

    @property
    def has_goals(self) -> bool:
        """Whether the set-up is the one that the goals are for."""
        options = self.options
        is_default = (
            options.input_len == 128 and options.slots == 32 and options.output_len is None and not options.quick
        )
        return (
            options.shape == "llama-3.1-8b"
            and options.rank == [16]
            and is_default
            and options.tensor_parallel_size == 1
        )

    def memory(self) -> dict[str, float]:
        """Gigabytes on the first GPU, where the model is spread over several."""
        if self.options.tensor_parallel_size == 1:
            return {}
        base = self.engine.base
        return {
            "weights_gb": round(base.num_bytes / 1e9, 2),
            "lora_rows_gb": round(self.engine.lora_bytes / 1e9, 3),
            "kv_kb_per_token": round(base.kv_shape.bytes_per_token / 1e3, 1),
        }

    def load(self) -> dict[str, float]:
        """Load all adapters; the figures are medians in milliseconds over the first ones, empty with `--skip-loads`."""
        if not self.names:
            return {} if self.options.skip_loads else {"first_token_base_ms": self.first_token_ms(None)}
        figures = {}
        num_timed = 0 if self.options.skip_loads else NUM_LOADS + 1
        if num_timed:
            self.first_token_ms(None)
            figures = self._time_loads(num_timed)
        with ThreadPoolExecutor(4) as threads:
            rest = zip(self.names[num_timed:], self.folders[num_timed:], strict=True)
            list(threads.map(lambda item: self.engine.adapters.load(item[0], str(item[1])), rest))
        return figures

    def _time_loads(self, count: int) -> dict[str, float]:
        """Until usable: from the call to a first token, less what a first token takes once the adapter is there."""
        rows = []
        for name, folder in zip(self.names[:count], self.folders[:count], strict=True):
            started = time.perf_counter()
            self.engine.adapters.load(name, str(folder))
            call_ms = (time.perf_counter() - started) * 1000
            # The adapter is in CPU memory and in no row of the LoRA buffers yet.
            cold_ms = self.first_token_ms(name, repeat=1)
            warm_ms = self.first_token_ms(name)
            rows.append((call_ms + cold_ms - warm_ms, cold_ms - warm_ms, call_ms, warm_ms))
        medians = [round(statistics.median(column), 2) for column in zip(*rows[1:], strict=True)]
        keys = ("load_from_disk_ms", "load_from_cpu_ms", "load_call_ms", "first_token_adapter_ms")
        return {**dict(zip(keys, medians, strict=True)), "first_token_base_ms": self.first_token_ms(None)}

    def first_token_ms(self, name: str | None, repeat: int = 5) -> float:
        """Median time of one request's first token on the idle engine."""
        prompts = make_prompts(1, self.options.input_len, self.engine.base.vocab_size)
        return round(
            statistics.median(time_batch(self.engine, prompts, [name], 1).total * 1000 for _ in range(repeat)), 2
        )

    def check(self) -> None:
        """A mixed batch agrees with its rows alone, and adapters answer unlike the base model; else refuse."""
        prompts = make_prompts(8, 33, self.engine.base.vocab_size)
        some = self.names[:3]
        names = [None, *some, None, *some][: len(prompts)]
        prompts = prompts[: len(names)]
        check_rows(self.engine, prompts, names, answer_all(self.engine, prompts, names, 4))

    def measure(self, prompts: list[list[int]], names: list[str | None], output_len: int) -> Timing:
        """The best of the timed runs after a warm-up."""
        time_batch(self.engine, prompts, names, min(output_len, WARM_UP_LEN))
        runs = [time_batch(self.engine, prompts, names, output_len) for _ in range(self.options.repeat)]
        return min(runs, key=lambda run: run.total)

    def decode_rows(self) -> list[dict[str, Any]]:
        """One row for each batch size and number of adapters."""
        rows = []
        for batch in self.options.batch:
            output_len = self.options.output_len or (256 if batch <= 32 else 128)
            prompts = make_prompts(batch, self.options.input_len, self.engine.base.vocab_size)
            base = None
            for count in self.options.adapters:
                if count > batch:
                    continue
                timing = self.measure(prompts, deal(self.names, count, batch), output_len)
                ms = timing.total * 1000 / output_len
                base = ms if count == 0 else base
                row: dict[str, Any] = {
                    "batch": batch,
                    "adapters": count,
                    "output_len": output_len,
                    "ms_per_step": round(ms, 3),
                    "vs_base": None if base is None else round(base / ms, 3),
                    "prefill_ms": round(timing.first_token * 1000, 2),
                    "decode_ms": round(timing.step * 1000, 3),
                }
                if self.has_goals and (batch, count) in GOALS:
                    goal, share = GOALS[batch, count]
                    row |= {"goal_ms": goal, "goal_vs_base": share, "is_met": ms <= goal}
                rows.append(row)
                print_row(row)
        return rows

    def prefill_rows(self) -> list[dict[str, Any]]:
        """One row for each number of adapters; no more than one a prompt can be active."""
        rows: list[dict[str, Any]] = []
        prompts = make_prompts(*self.prefill, self.engine.base.vocab_size)
        base = None
        for count in [] if self.options.skip_prefill else self.options.adapters:
            active = min(count, len(prompts))
            seconds = self.measure(prompts, deal(self.names, active, len(prompts)), 1).total
            base = seconds if count == 0 else base
            vs_base = None if base is None else round(base / seconds, 3)
            row = {"adapters": count, "active": active, "seconds": round(seconds, 4), "vs_base": vs_base}
            if self.has_goals and count in PREFILL_GOALS:
                row |= {"goal_s": PREFILL_GOALS[count], "is_met": seconds <= PREFILL_GOALS[count]}
            rows.append(row)
            print_row({"prefill": f"{len(prompts)}x{len(prompts[0])}", **row})
        return rows

    def profiles(self, decode: list[dict[str, Any]]) -> dict[str, Any]:
        """The steps that `--profile` names; beside them what the same step took in the table, without a profiler."""
        found = {}
        for word in filter(None, self.options.profile.split(",")):
            size, _, count = word.partition(":")
            if size == "prefill":
                prompts = make_prompts(*self.prefill, self.engine.base.vocab_size)
                found[word] = profile_prefill(self.engine, prompts, deal(self.names, min(int(count), 8), len(prompts)))
            else:
                batch = min(int(size), self.engine.config.max_num_seqs)
                adapters = min(int(count), batch, len(self.names))
                prompts = make_prompts(batch, self.options.input_len, self.engine.base.vocab_size)
                num_steps = 4 if self.options.quick else 32
                profile = profile_decode(self.engine, prompts, deal(self.names, adapters, batch), num_steps)
                plain = [row["decode_ms"] for row in decode if (row["batch"], row["adapters"]) == (batch, adapters)]
                if plain and "busy_ms" in profile:
                    profile["unprofiled_ms"] = plain[0]
                    profile["unprofiled_idle_share"] = round(1 - profile["busy_ms"] / plain[0], 3)
                found[word] = profile
            show(word, found[word])
        return found


def print_row(row: dict[str, Any]) -> None:
    """One line for a person; the goal only where there is one."""
    words = {True: "MET", False: "missed"}
    shown = {name: words[value] if isinstance(value, bool) else value for name, value in row.items()}
    print("  ".join(f"{name}={value}" for name, value in shown.items()), flush=True)


def main() -> None:
    """Load, check, measure, print."""
    options = parse()
    if options.quick:
        print("QUICK RUN: prompts and answers are cut, so these are not the workload's figures")
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(options, Path(root))
        engine = bench.engine
        if bench.has_goals:
            print("goals are for one NVIDIA H200, the shape of Llama-3.1-8B and rank 16")
        other = {"start_seconds": round(bench.start_seconds, 1), **bench.memory(), **bench.load()}
        bench.check()
        for name, value in other.items():
            goal = {"goal": OTHER_GOALS[name], "is_met": value <= OTHER_GOALS[name]} if name in OTHER_GOALS else {}
            print_row({name: value, **(goal if bench.has_goals else {})})
        decode = bench.decode_rows()
        figures = {**other, "decode": decode, "prefill": bench.prefill_rows(), "profile": bench.profiles(decode)}
        engine.close()
    setup = {
        **vars(options),
        "dtype": str(engine.base.dtype),
        "graphs": bench.device == "cuda" and not options.enforce_eager,
    }
    finish(setup, figures)


if __name__ == "__main__":
    main()
