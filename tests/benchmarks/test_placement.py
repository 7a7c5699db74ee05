"""The simulated fleet: queues as theory says, tiers as the engine has them, and a check that finds faults."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable

import pytest

from benchmarks import placement
from benchmarks.fleet import Arrival, Fleet, Shape
from benchmarks.policies import all_policies, at_random, holders_then_least, residency_first

FREE = Shape(streams=4, rows=4, cpu_loras=8, disk_s=0.0, row_s=0.0)
SLOW = Shape(streams=2, rows=2, cpu_loras=2, disk_s=1.0, row_s=0.25)


def first(fleet: Fleet, adapter: int) -> int:
    return 0


def erlang_wait_s(num_servers: int, rate: float) -> float:
    """Mean wait in a queue M/M/c with a mean service of a second (Erlang's C formula)."""
    terms = [rate**k / math.factorial(k) for k in range(num_servers)]
    last = rate**num_servers / math.factorial(num_servers) / (1 - rate / num_servers)
    return last / (sum(terms) + last) / (num_servers - rate)


def test_without_loads_a_replica_is_the_queue_of_theory() -> None:
    rng = random.Random(1)
    at, trace = 0.0, []
    for _ in range(20_000):
        at += rng.expovariate(2.4)
        trace.append(Arrival(at, 0, rng.expovariate(1.0)))
    served = Fleet(1, FREE, 0).run(trace, first)
    waits = [one.began_at - arrival.at for arrival, one in zip(trace, served, strict=True)]
    assert statistics.fmean(waits) == pytest.approx(erlang_wait_s(4, 2.4), rel=0.1)


def test_an_adapter_is_read_once_for_all_who_wait_and_copied_again_from_memory() -> None:
    trace = [
        Arrival(0.0, 7, 1.0),  # read until 1, copied until 1.25
        Arrival(0.5, 7, 1.0),  # waits for the same read and copy
        Arrival(3.0, 8, 0.1),
        Arrival(3.0, 9, 0.1),  # the second read begins when the first has ended
        Arrival(6.0, 7, 0.1),  # put out of memory, which holds two
    ]
    served = Fleet(1, SLOW, 0).run(trace, first)
    assert [one.began_at for one in served] == [1.25, 1.25, 4.25, 5.25, 7.25]
    assert [one.tier for one in served] == ["disk"] * 5


def test_a_row_in_use_is_not_taken_and_what_is_in_memory_is_only_copied() -> None:
    shape = Shape(streams=4, rows=1, cpu_loras=4, disk_s=1.0, row_s=0.25)
    trace = [Arrival(0.0, 1, 5.0), Arrival(0.0, 2, 1.0), Arrival(2.0, 1, 1.0), Arrival(10.0, 1, 1.0)]
    served = Fleet(1, shape, 0).run(trace, first)
    # The second has its weights at 2 and the row at 6.25; the third passes it, since its adapter has the row.
    assert [one.began_at for one in served] == [1.25, 6.5, 2.0, 10.25]
    assert [one.tier for one in served] == ["disk", "disk", "row", "memory"]


def test_holders_come_first_and_a_busy_holder_is_relieved() -> None:
    trace = [Arrival(number / 10, 3, 100.0) for number in range(4)]
    stuck = [one.replica for one in Fleet(9, SLOW, 0).run(trace, residency_first)]
    spread = [one.replica for one in Fleet(9, SLOW, 0).run(trace, holders_then_least)]
    assert len(set(stuck)) == 1
    assert spread[0] == spread[1] != spread[2] == spread[3]


def test_hashing_keeps_to_one_replica_until_a_bound_is_reached() -> None:
    trace = [Arrival(number / 100, 3, 100.0) for number in range(20)]
    policies = all_policies(5)
    assert len({one.replica for one in Fleet(5, FREE, 0).run(trace, policies["consistent hashing"])}) == 1
    chosen = [one.replica for one in Fleet(5, FREE, 0).run(trace, policies["bounded hashing"])]
    assert max(chosen.count(number) for number in range(5)) == 5, "1.25 times the mean of 4"
    assert len(set(chosen)) > 1


def test_a_holder_keeps_its_requests_where_all_are_as_busy() -> None:
    policies = all_policies(8)
    # Every replica is full of an adapter or two; then all adapters are asked for again.
    trace = [Arrival(number / 100, number % 8, 100.0) for number in range(16)]
    trace += [Arrival(1 + number / 100, number % 8, 1.0) for number in range(32)]

    def num_holders(name: str) -> int:
        served = Fleet(8, Shape(2, 2, 8, 0.001, 0.0), 0).run(trace, policies[name])
        return len({(arrival.adapter, one.replica) for arrival, one in zip(trace, served, strict=True)})

    everywhere = num_holders("holders, then least")
    assert all(num_holders(f"holders to a bound, then {way}") < everywhere / 2 for way in ("least", "ring"))


def disagreement(make: Callable[[int], object]) -> str | None:
    options = placement.parse(["--quick", "--seconds", "5"])
    small = argparse.Namespace(**{**vars(options), "replicas": 5, "seconds": 5.0})
    return placement.disagreement(placement.make_trace(placement.SCENARIOS[2], small), SLOW, make, 0)


def test_the_check_passes_a_policy_and_finds_one_that_cannot_be_repeated() -> None:
    rng = random.Random(0)
    assert disagreement(lambda count: at_random) is None
    reason = disagreement(lambda count: lambda fleet, adapter: rng.randrange(count))
    assert reason is not None and "second run" in reason


def test_the_check_finds_a_request_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = placement.Fleet.run

    def forget(self: Fleet, trace: list[Arrival], choose: Callable[[Fleet, int], int]) -> object:
        replica = self.replicas[0]
        start = replica.start
        monkeypatch.setattr(replica, "start", lambda now: start(now)[:1])
        return real(self, trace, choose)

    monkeypatch.setattr(placement.Fleet, "run", forget)
    assert disagreement(lambda count: at_random) is not None


def test_the_benchmark_measures_loads_and_prints_each_policy_in_each_scenario(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "benchmark --quick --streams 4 --utilisation 0.5"
    monkeypatch.setattr(sys, "argv", words.split())
    placement.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["loads"]["are_measured"] and figures["loads"]["disk_ms"] > 0 < figures["loads"]["row_ms"]
    names = {(row["scenario"], row["policy"]) for row in figures["rows"]}
    assert len(names) == len(figures["rows"]) == len(placement.SCENARIOS) * len(all_policies(1))
    for row in figures["rows"]:
        assert row["row_pct"] + row["memory_pct"] + row["disk_pct"] == pytest.approx(100, abs=0.2)
