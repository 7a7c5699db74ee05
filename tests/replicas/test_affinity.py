"""Which replica a request goes to."""

from __future__ import annotations

import random
from collections import Counter

from deploy.replicas.affinity import ReplicaView, rank_replicas


def test_whoever_holds_the_adapter_is_first() -> None:
    views = [ReplicaView("a"), ReplicaView("b", 3, {"sql"}), ReplicaView("c", 0, {"pirate"})]
    assert rank_replicas(views, adapter="sql", busy_at=4) == ["b", "a", "c"]


def test_a_busy_holder_comes_after_others_that_are_not_busy_but_before_busier_ones() -> None:
    views = [ReplicaView("a", 9), ReplicaView("b", 8, {"sql"}), ReplicaView("c", 3), ReplicaView("d", 8)]
    views += [ReplicaView("e", 0, {"pirate"}), ReplicaView("f", 0, {"pirate", "poet"})]
    assert rank_replicas(views, adapter="sql", busy_at=4) == ["c", "e", "f", "b", "d", "a"]


def test_where_all_are_busy_a_holder_keeps_its_requests_up_to_a_quarter_more_than_the_mean() -> None:
    def first(load: int) -> str:
        views = [ReplicaView("a", 20), ReplicaView("b", load, {"sql"}), ReplicaView("c", 19), ReplicaView("d", 21)]
        return rank_replicas(views, adapter="sql", busy_at=4)[0]

    assert [first(load) for load in (20, 26, 28, 40)] == ["b", "b", "c", "c"]


def test_of_several_holders_the_same_one_is_first_for_as_long_as_it_is_not_busy() -> None:
    holders = [ReplicaView(name, load, {"sql"}) for name, load in (("a", 0), ("b", 1), ("c", 2))]
    firsts = set()
    for _ in range(20):
        random.shuffle(holders)
        firsts.add(rank_replicas(holders, adapter="sql", busy_at=4)[0])
    assert len(firsts) == 1


def test_new_adapters_go_where_the_fewest_are() -> None:
    adapters: dict[str, set[str]] = {name: set() for name in "abc"}
    for index in range(30):
        views = [ReplicaView(name, 0, held) for name, held in adapters.items()]
        adapters[rank_replicas(views, adapter=f"adapter-{index}", busy_at=4)[0]].add(f"adapter-{index}")
    assert Counter(len(held) for held in adapters.values()) == {10: 3}


def test_few_adapters_move_when_a_replica_is_added() -> None:
    def homes(replicas: str) -> list[str]:
        views = [ReplicaView(name) for name in replicas]
        return [rank_replicas(views, adapter=f"adapter-{index}", busy_at=4)[0] for index in range(400)]

    before, after = homes("abc"), homes("abcd")
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"d"} and 60 < len(moved) < 140, "a quarter, and only to the new one"


def test_requests_without_an_adapter_go_to_the_least_load() -> None:
    views = [ReplicaView("a", 5), ReplicaView("b", 1, {"sql"}), ReplicaView("c", 2)]
    assert rank_replicas(views, adapter=None, busy_at=1) == ["b", "c", "a"]


def test_a_page_goes_to_its_replica_however_busy_and_a_lost_replica_comes_last() -> None:
    views = [ReplicaView("a", 5), ReplicaView("b", 99), ReplicaView("c", 2)]
    assert rank_replicas(views, adapter=None, busy_at=1, prefer="b")[0] == "b"
    assert rank_replicas(views, adapter=None, busy_at=1, prefer="gone") == ["c", "a", "b"]
    assert rank_replicas(views, adapter=None, busy_at=1, avoid=["c"]) == ["a", "b", "c"]
