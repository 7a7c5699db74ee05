"""An adapter's way to the GPU: milliseconds to load, swap and unload one, and what running requests feel of it.

    python -m benchmarks.adapters --shape llama-3.1-8b --rank 16

Random weights and adapters, files in the page cache. "Until usable" is the time to load plus the first token's, less the
first token's of an adapter that has its row. Gaps are between tokens of one stream, over all streams, while nothing else
happens and while adapters are copied, loaded and asked for. Before anything is timed, mixed batches must agree with their
rows alone, and a replaced adapter must answer as its new content does; else no figure is printed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.report import finish, refuse
from benchmarks.workload import (
    OTHER_SHARE,
    SHAPES,
    answer_all,
    check_rows,
    difference,
    make_prompts,
    shared,
    time_batch,
    write_adapter,
    write_model,
)
from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.request import TokenPrompt
from engine.setup import freeze_startup_objects

NUM_ADAPTERS = 8
NUM_ROWS = 4
NUM_STREAMED = 2
"""Adapters that the streams use; the other rows are there for the adapters that come and go."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-lora-rank", type=int, default=None, help="room in the rows; the adapters' rank if unset")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=300, help="tokens of each stream")
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    return parser.parse_args()


def first_token_ms(engine: Engine, name: str, prompt: list[int]) -> float:
    """From the call to the first token."""
    return time_batch(engine, [prompt], [name], 1).first_token * 1000


def timed_ms(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    action()
    return (time.perf_counter() - started) * 1000


def check_replaced(engine: Engine, folders: list[Path], prompts: list[list[int]]) -> None:
    """After `load_inplace` a name answers as its new content does, and no longer as its old."""
    names: list[str | None] = ["replaced"] * len(prompts)
    found = []
    for folder in folders[:2]:
        engine.adapters.load("replaced", str(folder), load_inplace=True)
        engine.adapters.load("judge", str(folder), load_inplace=True)
        judges = ["judge"] * len(prompts)
        found.append((answer_all(engine, prompts, names, 1), answer_all(engine, prompts, judges, 1)))
    engine.adapters.unload("replaced")
    engine.adapters.unload("judge")
    is_exact = engine.base.dtype == torch.float32
    for replaced, judge in found:
        if any(difference(one, other, is_exact=is_exact) for one, other in zip(replaced, judge, strict=True)):
            refuse("a replaced adapter does not answer as its new content does")
    (before, _), (after, _) = found
    if any(shared(old[0], new[0]) > OTHER_SHARE for old, new in zip(before, after, strict=True)):
        refuse("replacing an adapter changes nothing")


def time_loads(engine: Engine, folders: list[Path], prompt: list[int], repeat: int) -> dict[str, float]:
    """Medians over `repeat` rounds, with nothing else running."""
    times: dict[str, list[float]] = {"load": [], "first_from_disk": [], "first_from_cpu": [], "swap": [], "unload": []}
    warm = []
    for number in range(repeat):
        folder, other = folders[number % len(folders)], folders[(number + 1) % len(folders)]
        times["load"].append(timed_ms(lambda folder=folder: engine.adapters.load("cold", str(folder))))
        times["first_from_disk"].append(first_token_ms(engine, "cold", prompt))
        warm += [first_token_ms(engine, "cold", prompt) for _ in range(3)]
        for row in range(NUM_ROWS):  # Others take every row; the adapter stays in CPU memory.
            engine.adapters.load(f"other-{row}", str(folders[(number + 2 + row) % len(folders)]), load_inplace=True)
            first_token_ms(engine, f"other-{row}", prompt)
        times["first_from_cpu"].append(first_token_ms(engine, "cold", prompt))
        times["swap"].append(timed_ms(lambda other=other: engine.adapters.load("cold", str(other), load_inplace=True)))
        times["unload"].append(timed_ms(lambda: engine.adapters.unload("cold")))
    for row in range(NUM_ROWS):
        engine.adapters.unload(f"other-{row}")
    medians = {name: statistics.median(values) for name, values in times.items()}
    first = statistics.median(warm)
    return {
        "load_ms": round(medians["load"], 2),
        "disk_until_usable_ms": round(medians["load"] + medians["first_from_disk"] - first, 2),
        "cpu_until_usable_ms": round(medians["first_from_cpu"] - first, 2),
        "swap_ms": round(medians["swap"], 2),
        "unload_ms": round(medians["unload"], 2),
        "warm_first_token_ms": round(first, 2),
    }


class Disturbance:
    """A thread that does something again and again while requests stream."""

    def __init__(self, action: Callable[[int], object], pause_s: float) -> None:
        self.num_done = 0
        self._action = action
        self._pause_s = pause_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Disturbance:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._pause_s):
            self._action(self.num_done)
            self.num_done += 1


def time_gaps(
    engine: Engine, prompts: list[list[int]], output_len: int, action: Callable[[int], object], pause_s: float
) -> dict[str, float]:
    """Milliseconds between a stream's tokens: median, 99 of 100, longest; and how often `action` was done meanwhile."""
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    answers = [
        engine.start_sync(TokenPrompt(prompt), sampling, lora=f"stream-{row % NUM_STREAMED}")[0]
        for row, prompt in enumerate(prompts)
    ]
    readers = [_Reader(answer) for answer in answers]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.has_begun.wait()
    with Disturbance(action, pause_s) as disturbance:
        for reader in readers:
            reader.join()
    gaps = sorted(gap for reader in readers for gap in reader.gaps_ms())
    return {
        "median_ms": round(statistics.median(gaps), 2),
        "p99_ms": round(gaps[len(gaps) * 99 // 100], 2),
        "longest_ms": round(gaps[-1], 2),
        "times": disturbance.num_done,
    }


class _Reader(threading.Thread):
    """Reads a stream and notes when each token came."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self._answer = answer
        self._came: list[float] = []

    def run(self) -> None:
        for delta in self._answer:
            if delta.token_ids:
                self._came.append(time.perf_counter())
                if len(self._came) == 8:  # Every stream has had its prompt computed by then.
                    self.has_begun.set()
        self.has_begun.set()

    def gaps_ms(self) -> list[float]:
        came = self._came[8:]
        return [(after - before) * 1000 for before, after in itertools.pairwise(came)]


def all_gaps(engine: Engine, folders: list[Path], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Gaps under each kind of disturbance."""
    prompts = make_prompts(options.streams, 128, engine.base.vocab_size)
    short = prompts[0][:16]
    for row in range(NUM_STREAMED):
        engine.adapters.load(f"stream-{row}", str(folders[row]))
    cold = [f"cold-{number}" for number in range(len(folders) - NUM_STREAMED)]
    for number, name in enumerate(cold):
        engine.adapters.load(name, str(folders[NUM_STREAMED + number]))

    def replace(number: int) -> None:
        engine.adapters.load("swapped", str(folders[NUM_STREAMED + number % len(cold)]), load_inplace=True)
        engine.prefetch("swapped")

    kinds: dict[str, tuple[Callable[[int], object], float]] = {
        "quiet": (lambda number: None, 0.05),
        "copies": (lambda number: engine.prefetch(cold[number % len(cold)]), 0.02),
        "loads_and_copies": (replace, 0.02),
        "warm_requests": (lambda number: time_batch(engine, [short], [cold[0]], 1), 0.02),
        "cold_requests": (lambda number: time_batch(engine, [short], [cold[number % len(cold)]], 1), 0.02),
    }
    time_gaps(engine, prompts, 20, lambda number: None, 1.0)
    found = {}
    for kind, (action, pause_s) in kinds.items():
        found[kind] = time_gaps(engine, prompts, options.output_len, action, pause_s)
        print(kind, found[kind], flush=True)
    return found


def main() -> None:
    """Write, check, measure, print."""
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as root:
        engine = Engine(
            EngineConfig(
                model=str(write_model(options.shape, Path(root) / "model")),
                load_format="dummy",
                dtype="bfloat16" if device == "cuda" else "float32",
                max_model_len=128 + options.output_len,
                max_num_seqs=options.streams + 4,
                max_loras=NUM_ROWS,
                max_cpu_loras=2 * NUM_ADAPTERS,
                max_lora_rank=options.max_lora_rank or options.rank,
                enable_prefix_caching=False,
                enforce_eager=options.enforce_eager,
                adapter_dir=str(Path(root) / "catalogue"),
            )
        )
        freeze_startup_objects()
        folders = [
            write_adapter(options.shape, options.rank, number, Path(root) / f"adapter-{number}", device)
            for number in range(NUM_ADAPTERS)
        ]
        prompts = make_prompts(4, 33, engine.base.vocab_size)
        names = [f"checked-{number}" for number in range(3)]
        for name, folder in zip(names, folders, strict=False):
            engine.adapters.load(name, str(folder))
        mixed = [None, *names]
        check_rows(engine, prompts, mixed, answer_all(engine, prompts, mixed, 4))
        for name in names:
            engine.adapters.unload(name)
        check_replaced(engine, folders, prompts)
        loads = time_loads(engine, folders, prompts[0], options.repeat)
        print(loads, flush=True)
        megabytes = sum(file.stat().st_size for file in folders[0].glob("*.safetensors")) / 1e6
        gaps = all_gaps(engine, folders, options)
        engine.close()
    setup = {**vars(options), "dtype": str(engine.base.dtype), "graphs": device == "cuda" and not options.enforce_eager}
    finish(setup, {"adapter_megabytes": round(megabytes, 3), **loads, "gaps": gaps})


if __name__ == "__main__":
    main()
