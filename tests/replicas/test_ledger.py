"""The ledger alone: order, turns, leases, and how it comes back."""

from __future__ import annotations

import asyncio

import pytest

from adapters.name_state import NameState
from deploy.replicas.ledger import Change, Ledger, News


async def join(ledger: Ledger, *replicas: str, seen: int = 0) -> str:
    news = [await ledger.sync(replica, "", seen, {}) for replica in replicas]
    return news[0].epoch


async def change(ledger: Ledger, replica: str, name: str, generation: str | None) -> int:
    assert await ledger.take_turn(name, replica, 1.0)
    epoch, base = await epoch_of(ledger), await latest_of(ledger, name)
    recorded = await ledger.end_turn(name, replica, epoch, NameState(name, generation), base)
    assert recorded is not None and recorded.state == NameState(name, generation)
    return recorded.seq


async def epoch_of(ledger: Ledger) -> str:
    return (await ledger.sync("observer", "", 0, {}, wait_s=0.0)).epoch


async def latest_of(ledger: Ledger, name: str) -> int:
    news = await ledger.sync("observer", "", 0, {}, wait_s=0.0)
    await ledger.leave("observer")
    return max((each.seq for each in news.changes if each.state.name == name), default=0)


@pytest.mark.asyncio
async def test_a_replica_hears_the_latest_change_of_each_name_in_order() -> None:
    ledger = Ledger(grace_seconds=0.0)
    epoch = await join(ledger, "a", "b")
    for name, generation in (("x", "1"), ("y", "1"), ("x", "2")):
        await change(ledger, "a", name, generation)
    news = await ledger.sync("b", epoch, 0, {})
    assert news == News(epoch, 3, [Change(2, NameState("y", "1")), Change(3, NameState("x", "2"))])
    assert (await ledger.sync("b", epoch, 2, {})).changes == [Change(3, NameState("x", "2"))]


@pytest.mark.asyncio
async def test_who_waits_for_news_hears_them_at_once() -> None:
    ledger = Ledger(grace_seconds=0.0)
    epoch = await join(ledger, "a", "b")
    waiting = asyncio.ensure_future(ledger.sync("b", epoch, 0, {}, wait_s=60.0))
    await asyncio.sleep(0)
    await change(ledger, "a", "x", "1")
    assert (await asyncio.wait_for(waiting, 120)).head == 1
    assert (await ledger.sync("b", epoch, 1, {}, wait_s=0.0)).changes == []


@pytest.mark.asyncio
async def test_changes_of_a_name_are_made_one_after_another_and_of_others_meanwhile() -> None:
    ledger = Ledger(grace_seconds=0.0)
    epoch = await join(ledger, "a", "b")
    assert await ledger.take_turn("x", "a", 1.0)
    assert not await ledger.take_turn("x", "b", 0.01)
    assert await ledger.take_turn("y", "b", 0.01)
    waiting = asyncio.ensure_future(ledger.take_turn("x", "b", 60.0))
    assert await ledger.end_turn("x", "a", epoch, None, 0) is None, "a change that failed is none"
    assert await asyncio.wait_for(waiting, 120)


@pytest.mark.asyncio
async def test_the_turn_of_a_replica_that_is_gone_is_free() -> None:
    now = [0.0]
    ledger = Ledger(lease_seconds=10.0, grace_seconds=0.0, clock=lambda: now[0])
    epoch = await join(ledger, "a", "b")
    assert await ledger.take_turn("x", "a", 0.0)
    now[0] = 9.0
    await join(ledger, "b")
    assert not await ledger.take_turn("x", "b", 0.0)
    now[0] = 11.0
    assert await ledger.take_turn("x", "b", 0.0)
    # What the lost one says too late takes nobody's turn away.
    assert await ledger.end_turn("x", "a", epoch, None, 0) is None
    assert await ledger.end_turn("x", "a", epoch, NameState("x", "late"), 0) is None, "and records nothing"
    assert not await ledger.take_turn("x", "c", 0.0)
    made = await ledger.end_turn("x", "b", epoch, NameState("x", "1"), 0)
    assert made == Change(1, NameState("x", "1"))
    assert await ledger.end_turn("x", "a", epoch, NameState("x", "late"), 0) == made, "nor after the other's change"
    assert (await ledger.sync("c", epoch, 0, {}, wait_s=0.0)).changes == [made]


@pytest.mark.asyncio
async def test_a_turn_whose_answer_was_lost_can_be_taken_again() -> None:
    ledger = Ledger(grace_seconds=0.0)
    await join(ledger, "a", "b")
    assert await ledger.take_turn("x", "a", 0.0)
    assert await ledger.take_turn("x", "a", 0.0)
    assert not await ledger.take_turn("x", "b", 0.0)


@pytest.mark.asyncio
async def test_a_new_ledger_changes_nothing_before_all_can_have_told_it_what_they_know() -> None:
    now = [0.0]
    ledger = Ledger(lease_seconds=10.0, grace_seconds=10.0, clock=lambda: now[0])
    epoch = await join(ledger, "a")
    state = NameState("x", "1")
    now[0] = 9.0
    assert not await ledger.take_turn("x", "a", 0.0)
    assert await ledger.end_turn("x", "a", epoch, state, 0) is None
    now[0] = 10.0
    assert await ledger.take_turn("x", "a", 0.0)
    assert await ledger.end_turn("x", "a", "another", state, 0) is None, "it was made upon what another ledger knew"
    assert await ledger.end_turn("x", "a", epoch, state, 0) == Change(1, state)


@pytest.mark.asyncio
async def test_calls_that_overtake_each_other_take_nothing_back() -> None:
    ledger = Ledger(grace_seconds=0.0)
    epoch = await join(ledger, "a")
    seq = await change(ledger, "a", "x", "1")
    await ledger.sync("a", epoch, seq, {}, wait_s=0.0)
    await ledger.sync("a", epoch, 0, {}, wait_s=0.0)
    assert await ledger.settled(seq, 0.0) == (1, 1)


@pytest.mark.asyncio
async def test_it_says_who_has_a_change_and_why_others_do_not() -> None:
    ledger = Ledger(grace_seconds=0.0)
    epoch = await join(ledger, "a", "b", "c")
    seq = await change(ledger, "a", "x", "1")
    assert await ledger.settled(seq, 0.0) == (0, 3)
    await ledger.sync("a", epoch, seq, {}, wait_s=0.0)
    await ledger.sync("b", epoch, seq, {"x": (seq, "no such folder")}, wait_s=0.0)
    assert await ledger.settled(seq, 0.0) == (1, 3)
    status = await ledger.status()
    assert status["adapters"] == [
        {"name": "x", "generation": "1", "have": 1, "of": 3, "failures": {"b": "no such folder"}}
    ]
    assert [row["is_current"] for row in status["replicas"]] == [True, True, False]
    waiting = asyncio.ensure_future(ledger.settled(seq, 60.0))
    await ledger.sync("c", epoch, seq, {}, wait_s=0.0)
    assert await asyncio.wait_for(waiting, 120) == (2, 3)
    await ledger.leave("b")
    assert await ledger.settled(seq, 0.0) == (2, 2)


@pytest.mark.asyncio
async def test_a_new_ledger_takes_the_latest_of_what_replicas_bring() -> None:
    ledger = Ledger(grace_seconds=0.0)
    epoch = await join(ledger, "a", seen=7)
    old, new = Change(3, NameState("x", "1")), Change(7, NameState("x", "2"))
    await ledger.sync("a", epoch, 7, {}, [new, Change(5, NameState("y", "1"))], wait_s=0.0)
    news = await ledger.sync("b", epoch, 3, {}, [old], wait_s=0.0)
    assert [each.seq for each in news.changes] == [5, 7] and news.head == 7
    assert await change(ledger, "b", "z", "1") == 8
