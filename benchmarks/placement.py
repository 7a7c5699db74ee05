"""Which replica should answer: policies compared on a simulated fleet of hundreds of replicas and thousands of adapters.

    python -m benchmarks.placement
    python -m benchmarks.placement --disk-ms 65 --row-ms 12

What an adapter costs to read from disk and to copy into a row is measured first, with this program's own loader on a small
random model, unless flags give it. All policies serve the same requests: Poisson arrivals, adapters by Zipf's law, and in
some scenarios bursts for one adapter that hardly anybody used before. Before figures are printed, every request must have been
served exactly once, all policies must agree on a fleet of one, and a second run must repeat the first.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet import Arrival, Fleet, Served, Shape
from benchmarks.policies import Policy, all_policies
from benchmarks.report import finish, refuse
from benchmarks.workload import write_adapter, write_model
from engine import Engine, EngineConfig

WARM_UP = 0.4
"""Share of the simulated time that figures leave out: all tiers are empty at the start."""
BURST_EVERY_S, BURST_S, BURST_SHARE = 10.0, 3.0, 0.2
"""A burst adds this share of the usual rate, all of it for one adapter."""
MEASURED_RANK = 64
NUM_ROWS = 4


@dataclass(frozen=True)
class Scenario:
    """How requests choose adapters: the exponent of Zipf's law, and whether bursts come."""

    zipf: float
    has_bursts: bool

    @property
    def name(self) -> str:
        return f"zipf {self.zipf:g}{', bursts' if self.has_bursts else ''}"


SCENARIOS = (Scenario(0.0, False), Scenario(1.0, False), Scenario(1.0, True), Scenario(1.5, True))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=200)
    parser.add_argument("--adapters", type=int, default=5000)
    parser.add_argument("--streams", type=int, default=16, help="requests that a replica runs at a time")
    parser.add_argument("--rows", type=int, default=16, help="--max-loras of a replica")
    parser.add_argument("--cpu-loras", type=int, default=64, help="--max-cpu-loras of a replica")
    parser.add_argument("--service-s", type=float, default=1.0, help="mean seconds of an answer, exponentially spread")
    parser.add_argument("--utilisation", type=float, default=0.7, help="requests offered, of those that fit")
    parser.add_argument("--seconds", type=float, default=25.0, help="simulated time")
    parser.add_argument("--disk-ms", type=float, help="to read an adapter from disk; measured if unset")
    parser.add_argument("--row-ms", type=float, help="to copy one from CPU memory into a row; measured if unset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 replicas, 500 adapters, 20 s")
    options = parser.parse_args(words)
    if options.quick:
        options.replicas, options.adapters, options.seconds = 20, 500, 20.0
    return options


def measure_loads(repeat: int = 9) -> tuple[float, float]:
    """Medians, in milliseconds: from disk into CPU memory, and from there into a row of the LoRA buffers."""
    disk, row = [], []
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        engine = Engine(
            EngineConfig(
                model=str(write_model("tiny", root / "model")), load_format="dummy", max_model_len=64, max_num_seqs=2,
                max_loras=NUM_ROWS, max_lora_rank=MEASURED_RANK, adapter_dir=str(root / "catalogue"),
            )
        )  # fmt: skip
        for number in range(repeat):
            folder = write_adapter("tiny", MEASURED_RANK, number, root / f"adapter-{number}", "cpu")
            name = f"adapter-{number}"
            started = time.perf_counter()
            engine.adapters.load(name, str(folder))
            loaded = time.perf_counter()
            is_there = engine.prefetch(name).result()
            copied = time.perf_counter()
            if not is_there or engine.adapters.get(name).state != "gpu":
                refuse(f"the adapter {name} was loaded and is in no row")
            disk.append((loaded - started) * 1000)
            row.append((copied - loaded) * 1000)
        engine.close()
    return statistics.median(disk), statistics.median(row)


def make_trace(scenario: Scenario, options: argparse.Namespace) -> list[Arrival]:
    """The requests of a scenario, in order; the same for the same seed."""
    rng = random.Random(options.seed)
    rate = options.utilisation * options.replicas * options.streams / options.service_s
    weights = list(itertools.accumulate(1 / rank**scenario.zipf for rank in range(1, options.adapters + 1)))

    def arrivals(begin: float, end: float, per_s: float, adapter: int | None) -> list[Arrival]:
        found, at = [], begin
        while (at := at + rng.expovariate(per_s)) < end:
            drawn = bisect.bisect(weights, rng.random() * weights[-1]) if adapter is None else adapter
            found.append(Arrival(at, min(drawn, options.adapters - 1), rng.expovariate(1 / options.service_s)))
        return found

    trace = arrivals(0.0, options.seconds, rate, None)
    begin = BURST_EVERY_S / 2
    while scenario.has_bursts and begin < options.seconds:
        cold = rng.randrange(options.adapters // 2, options.adapters)
        trace += arrivals(begin, min(begin + BURST_S, options.seconds), BURST_SHARE * rate, cold)
        begin += BURST_EVERY_S
    return sorted(trace)


def row_of(trace: Sequence[Arrival], served: Sequence[Served], fleet: Fleet, options: argparse.Namespace) -> Any:
    """A policy's figures. A wait is from a request's arrival to its first step: places, rows and loads."""
    timed = [(a, s) for a, s in zip(trace, served, strict=True) if a.at >= options.seconds * WARM_UP]
    if not timed:
        refuse("no request came after the warm-up; raise --seconds or --utilisation")
    waits = sorted((one.began_at - arrival.at) * 1000 for arrival, one in timed)
    tiers = Counter(one.tier for _, one in timed)
    shares = Counter(one.replica for _, one in timed)
    return {
        "wait_ms_mean": round(statistics.fmean(waits), 1),
        "wait_ms_p50": round(waits[len(waits) // 2], 1),
        "wait_ms_p99": round(waits[len(waits) * 99 // 100], 1),
        **{f"{tier}_pct": round(100 * tiers[tier] / len(timed), 1) for tier in ("row", "memory", "disk")},
        "copies": round(fleet.num_copies() / len({arrival.adapter for arrival in trace}), 1),
        "busiest": round(max(shares.values()) * len(fleet.replicas) / len(timed), 2),
    }


def check(shape: Shape, options: argparse.Namespace) -> None:
    """Refuse unless a small fleet serves all of it, repeats itself, and a fleet of one leaves policies no choice."""
    small = argparse.Namespace(**{**vars(options), "replicas": 5, "adapters": 200, "seconds": 15.0})
    trace = make_trace(SCENARIOS[2], small)
    if trace != make_trace(SCENARIOS[2], small):
        refuse("a seed gives other requests the second time")
    for name in all_policies(1):
        reason = disagreement(trace, shape, lambda count, name=name: all_policies(count)[name], options.seed)
        if reason:
            refuse(f"{name}: {reason}")


def disagreement(trace: Sequence[Arrival], shape: Shape, make: Any, seed: int) -> str | None:
    """What a policy's run on five replicas and on one gets wrong, or None; `make(count)` gives the policy."""
    runs = []
    for count in (5, 5, 1):
        try:
            runs.append(Fleet(count, shape, seed).run(trace, make(count)))
        except AssertionError as error:
            return str(error) or "a replica keeps something of requests that have ended"
    if runs[0] != runs[1]:
        return "a second run with the same seed differs"
    if runs[2] != Fleet(1, shape, seed).run(trace, lambda fleet, adapter: 0):
        return "a fleet of one serves otherwise than without a policy"
    for arrival, one in zip(trace, runs[0], strict=True):
        if one.began_at < arrival.at or abs(one.ended_at - one.began_at - arrival.service_s) > 1e-9:
            return "a request begins before it came, or takes another time than its answer does"
    return None


def measure(policy: Policy, trace: Sequence[Arrival], shape: Shape, options: argparse.Namespace) -> Any:
    """One policy on one trace."""
    fleet = Fleet(options.replicas, shape, options.seed)
    return row_of(trace, fleet.run(trace, policy), fleet, options)


def main() -> None:
    """Measure loads, check, simulate, print."""
    options = parse()
    needs_measuring = options.disk_ms is None or options.row_ms is None
    measured = measure_loads(3 if options.quick else 9) if needs_measuring else None
    disk_ms, row_ms = measured or (0.0, 0.0)
    disk_ms = disk_ms if options.disk_ms is None else options.disk_ms
    row_ms = row_ms if options.row_ms is None else options.row_ms
    shape = Shape(options.streams, options.rows, options.cpu_loras, disk_ms / 1000, row_ms / 1000)
    check(shape, options)
    rows = []
    for scenario in SCENARIOS:
        trace = make_trace(scenario, options)
        for name, policy in all_policies(options.replicas).items():
            rows.append({"scenario": scenario.name, "policy": name, **measure(policy, trace, shape, options)})
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    loads = {"disk_ms": round(disk_ms, 3), "row_ms": round(row_ms, 3), "are_measured": needs_measuring}
    finish(vars(options), {"loads": loads, "rows": rows})


if __name__ == "__main__":
    main()
