"""Where a step's time goes: kernels by GPU time and the GPU's idle share, for one kind of step of a running engine.

On a CPU it lists operators instead. Used by `benchmarks/decode --profile`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.workload import time_batch
from engine import Engine, SamplingParams
from engine.request import TokenPrompt

NUM_KERNELS = 25
GAP_US = 20.0
"""A pause of the GPU that is longer than this lies between steps, not between two kernels of a graph."""


def profile_decode(
    engine: Engine, prompts: Sequence[list[int]], names: Sequence[str | None], num_steps: int
) -> dict[str, Any]:
    """Profile decode steps in the middle of a batch's answers; see `_report` for what is returned."""
    sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    time_batch(engine, prompts, names, 4)
    with _profiler():  # The first start of the profiler takes seconds; the steps below shall not pass meanwhile.
        pass
    answers = [
        engine.start_sync(TokenPrompt(prompt), sampling, lora=name)[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    readers = [iter(answer) for answer in answers]
    for answer, reader in zip(answers, readers, strict=True):
        while answer.num_output_tokens == 0:
            next(reader)

    def steps() -> int:
        first = answers[0].num_output_tokens
        while answers[0].num_output_tokens < first + num_steps and answers[0].finish_reason is None:
            next(readers[0])
        return answers[0].num_output_tokens - first

    try:
        return _run(steps)
    finally:
        for answer, reader in zip(answers, readers, strict=True):
            answer.abort()
            for _ in reader:
                pass


def profile_prefill(engine: Engine, prompts: Sequence[list[int]], names: Sequence[str | None]) -> dict[str, Any]:
    """Profile the computation of all prompts as one step; see `_report`."""
    time_batch(engine, prompts, names, 1)
    with _profiler():
        pass

    def prefill() -> int:
        time_batch(engine, prompts, names, 1)
        return 1

    return _run(prefill)


def _profiler() -> profile:
    if torch.cuda.is_available():
        return profile(activities=[ProfilerActivity.CUDA])
    # The engine's thread is not the one that profiles.
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=config)


def _run(action: Callable[[], int]) -> dict[str, Any]:
    with _profiler() as profiler:
        started = time.perf_counter()
        num_steps = action()
        seconds = time.perf_counter() - started
    return _report(profiler, num_steps, seconds)


def _report(profiler: profile, num_steps: int, seconds: float) -> dict[str, Any]:
    """Figures a step, in milliseconds: `wall` while profiled, `busy` on the GPU, and the operators that cost most.

    `idle_share` is the part of the time between the first and the last kernel in which none ran, `between_share` the
    part of it in pauses longer than `GAP_US`. The profiler slows the host, so both are upper bounds.
    """
    spans: list[tuple[float, float]] = []
    totals: dict[str, tuple[float, int]] = {}
    wanted = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
    for event in profiler.events():
        if event.device_type != wanted:
            continue
        start, end = event.time_range.start, event.time_range.end
        spans.append((start, end))
        used = end - start if wanted == DeviceType.CUDA else event.self_cpu_time_total
        total, count = totals.get(event.name, (0.0, 0))
        totals[event.name] = (total + used, count + 1)
    largest = sorted(totals.items(), key=lambda item: -item[1][0])[:NUM_KERNELS]
    figures: dict[str, Any] = {
        "steps": num_steps,
        "wall_ms": round(seconds * 1000 / num_steps, 3),
        "top": [
            {"name": name[:90], "ms": round(total / 1000 / num_steps, 4), "calls": round(count / num_steps, 1)}
            for name, (total, count) in largest
        ],
    }
    if wanted == DeviceType.CUDA and spans:
        figures |= _idle(spans, num_steps)
    return figures


def _idle(spans: list[tuple[float, float]], num_steps: int) -> dict[str, float]:
    """Busy time and pauses of intervals in microseconds, which may overlap."""
    spans = sorted(spans)
    first, reached = spans[0]
    busy, between = reached - first, 0.0
    for start, end in spans[1:]:
        if start - reached > GAP_US:
            between += start - reached
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = reached - first
    return {
        "busy_ms": round(busy / 1000 / num_steps, 3),
        "idle_share": round(1 - busy / whole, 3),
        "between_share": round(between / whole, 3),
    }


def show(title: str, figures: dict[str, Any]) -> None:
    """Print a profile for a person."""
    rest = " ".join(f"{name}={value}" for name, value in figures.items() if name != "top")
    print(f"profile of {title}: {rest}")
    for row in figures["top"]:
        print(f"  {row['ms']:9.4f} ms {row['calls']:7.1f} calls  {row['name']}")
