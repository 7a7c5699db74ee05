"""Two replicas' catalogues on one ledger, with real adapters and without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import AdapterNotFound
from adapters.manager import AdapterManager
from deploy.replicas import sharing
from deploy.replicas.ledger import LEASE_SECONDS, Ledger
from deploy.replicas.sharing import SETTLED, ChangeSuperseded, LedgerUnreachable, SharedCatalogue
from tests.adapters.world import edit, make_llama, save_peft, surface_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_peft(make_llama(), tmp_path_factory.mktemp("adapter") / "sql")


@pytest.fixture
def managers(tmp_path: Path) -> Iterator[list[AdapterManager]]:
    surface = surface_of(make_llama())
    managers = [AdapterManager(surface, adapter_dir=tmp_path / "own", max_cpu_loras=8) for _ in range(2)]
    yield managers
    for manager in managers:
        manager.check_integrity()
        manager.close()


class Door:
    """A ledger that can be away, and be replaced by one that knows nothing."""

    def __init__(self) -> None:
        self.ledger = Ledger(grace_seconds=0.0)
        self.is_away = False
        # Calls whose answer is lost, and how often each was called.
        self.lost: set[str] = set()
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_away:
                raise LedgerUnreachable("away")
            self.calls[name] += 1
            answer = await getattr(self.ledger, name)(*args, **kwargs)
            if name in self.lost:
                raise LedgerUnreachable("lost")
            return answer

        return call


async def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it has not happened within a minute")


@pytest.mark.asyncio
async def test_a_change_is_over_when_all_have_it(managers: list[AdapterManager], folder: Path) -> None:
    door = Door()
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))
    await second.catch_up()
    following = [asyncio.ensure_future(each.follow()) for each in (first, second)]
    SETTLED.set(settled := [])
    async with first.change("sql"):
        await asyncio.to_thread(managers[0].load, "sql", folder)
    assert settled == [(2, 2)]
    assert managers[1].get("sql").generation == managers[0].get("sql").generation
    async with second.change("sql"):
        await asyncio.to_thread(managers[1].unload, "sql")
    assert settled == [(2, 2)] * 2
    assert not managers[0].contains("sql")
    for task in following:
        task.cancel()


@pytest.mark.asyncio
async def test_a_change_that_fails_is_told_to_nobody(managers: list[AdapterManager]) -> None:
    door = Door()
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))
    with pytest.raises(AdapterNotFound):
        async with first.change("sql"):
            managers[0].unload("sql")
    await second.catch_up()
    assert (await door.status())["changes"] == 0
    assert await door.take_turn("sql", "b", 0.0), "the turn is free again"


@pytest.mark.asyncio
async def test_who_makes_a_change_has_seen_the_ones_before(
    managers: list[AdapterManager], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "SETTLE_SECONDS", 0.0)
    door = Door()
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))
    async with first.change("sql"):
        managers[0].load("sql", folder)
    # The second has not followed yet; in its turn it knows of the name, so that it is not loaded twice.
    async with second.change("sql"):
        assert managers[1].contains("sql")
        managers[1].pin("sql", True)
    await first.catch_up()
    assert managers[0].get("sql").pinned


@pytest.mark.asyncio
async def test_a_change_while_the_ledger_is_started_again_is_not_lost(
    managers: list[AdapterManager], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "RETRY_SECONDS", 0.01)
    door = Door()
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))
    async with first.change("kept"):
        managers[0].load("kept", folder)
    async with first.change("sql"):
        managers[0].load("sql", folder)
        door.is_away, door.ledger = True, Ledger(grace_seconds=0.0)
        asyncio.get_running_loop().call_later(0.1, setattr, door, "is_away", False)
    await second.catch_up()
    await second.catch_up()
    assert set(managers[1].names()) == {"kept", "sql"}
    assert (await door.status())["changes"] == 2


@pytest.mark.asyncio
async def test_a_change_that_ends_at_a_new_ledger_reaches_those_who_have_seen_more(
    managers: list[AdapterManager], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(sharing, "SETTLE_SECONDS", 0.0)
    door = Door()
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))
    for name in ("x", "y"):
        async with first.change(name):
            managers[0].load(name, folder)
    await second.catch_up()
    async with first.change("sql"):
        managers[0].load("sql", folder)
        door.ledger = Ledger(grace_seconds=0.0)  # Nobody has told it anything when the turn ends.
    await second.catch_up()
    assert set(managers[1].names()) == {"x", "y", "sql"}
    assert (await door.status())["changes"] == 3


@pytest.mark.asyncio
async def test_a_change_whose_turn_lapsed_gives_way_to_the_one_made_meanwhile(
    managers: list[AdapterManager], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "SETTLE_SECONDS", 0.0)
    door = Door()
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))
    other = edit(folder, tmp_path / "other", config={"lora_alpha": 5})

    async def change_late() -> None:
        async with first.change("sql"):
            await door.leave("a")  # As when it is silent for longer than its lease.
            async with second.change("sql"):
                managers[1].load("sql", other)
            managers[0].load("sql", folder)

    with pytest.raises(ChangeSuperseded) as caught:
        await change_late()
    assert caught.value.status == 409
    assert managers[0].get("sql").generation == managers[1].get("sql").generation
    assert (await door.status())["changes"] == 1


@pytest.mark.asyncio
async def test_what_a_failed_change_has_done_is_told(
    managers: list[AdapterManager], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "SETTLE_SECONDS", 0.0)
    door = Door()
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))

    async def fail_late() -> None:
        async with first.change("sql"):
            managers[0].load("sql", folder)
            raise RuntimeError("after it was done")

    with pytest.raises(RuntimeError):
        await fail_late()
    await second.catch_up()
    assert managers[1].contains("sql")


@pytest.mark.asyncio
async def test_what_could_not_be_told_is_told_later(
    managers: list[AdapterManager], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(sharing, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(sharing, "POLL_SECONDS", 0.01)
    door = Door()
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))

    async def change_untold() -> None:
        async with first.change("sql"):
            managers[0].load("sql", folder)
            door.is_away = True
            monkeypatch.setattr(sharing, "TURN_SECONDS", 0.05)

    with pytest.raises(LedgerUnreachable):
        await change_untold()
    monkeypatch.setattr(sharing, "TURN_SECONDS", 60.0)
    with pytest.raises(LedgerUnreachable):
        async with first.change("sql"):
            pytest.fail("no change upon one that nobody knows")
    door.is_away = False
    following = [asyncio.ensure_future(each.follow()) for each in (first, second)]
    await wait_until(lambda: managers[1].contains("sql"))
    for task in following:
        task.cancel()
    assert await door.take_turn("sql", "b", 0.0), "the turn is free again"


@pytest.mark.asyncio
async def test_a_turn_whose_answer_is_lost_is_given_back(managers: list[AdapterManager]) -> None:
    door = Door()
    door.lost = {"take_turn"}
    await SharedCatalogue(door, managers[1], "b").catch_up()
    with pytest.raises(LedgerUnreachable):
        async with SharedCatalogue(door, managers[0], "a").change("sql"):
            pytest.fail("no change without a turn")
    assert await door.ledger.take_turn("sql", "b", 0.0)


@pytest.mark.asyncio
async def test_a_replica_that_follows_for_long_still_counts_and_holds_up_no_request(
    managers: list[AdapterManager], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(sharing, "BEAT_SECONDS", 0.01)
    now, may_load = [0.0], threading.Event()
    door = Door()
    door.ledger = Ledger(grace_seconds=0.0, clock=lambda: now[0])
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))
    await second.catch_up()
    following = asyncio.ensure_future(second.follow())
    follow, is_loading = managers[1].follow, threading.Event()
    monkeypatch.setattr(managers[1], "follow", lambda state: (is_loading.set(), may_load.wait(60), follow(state)))
    async with first.change("sql"):
        managers[0].load("sql", folder)
    await wait_until(is_loading.is_set)
    now[0] = LEASE_SECONDS - 1
    beats = door.calls["sync"]
    await wait_until(lambda: door.calls["sync"] >= beats + 2)
    now[0] = LEASE_SECONDS + 1
    assert await door.settled(1, 0.0) == (0, 1), "it lives, and has the old version"
    await asyncio.wait_for(second.catch_up_soon(0.01), 120)
    may_load.set()
    await wait_until(lambda: managers[1].contains("sql"))
    following.cancel()


@pytest.mark.asyncio
async def test_a_new_replica_waits_for_the_ledger(
    managers: list[AdapterManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "RETRY_SECONDS", 0.01)
    door = Door()
    door.is_away = True
    asyncio.get_running_loop().call_later(0.1, setattr, door, "is_away", False)
    await SharedCatalogue(door, managers[0], "a").join()
    assert [row["id"] for row in (await door.status())["replicas"]] == ["a"]
    door.is_away = True
    monkeypatch.setattr(sharing, "JOIN_SECONDS", 0.05)
    with pytest.raises(LedgerUnreachable):
        await SharedCatalogue(door, managers[1], "b").join()


@pytest.mark.asyncio
async def test_a_ledger_that_stays_away_refuses_changes_with_a_time_to_come_back(
    managers: list[AdapterManager],
) -> None:
    door = Door()
    door.is_away = True
    catalogue = SharedCatalogue(door, managers[0], "a")
    with pytest.raises(LedgerUnreachable) as caught:
        async with catalogue.change("sql"):
            pytest.fail("no change without a turn")
    assert (caught.value.status, caught.value.retry_after) == (503, 5)


@pytest.mark.asyncio
async def test_a_change_that_could_not_be_followed_is_reported_and_tried_again(
    managers: list[AdapterManager], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(sharing, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(sharing, "POLL_SECONDS", 0.01)
    door = Door()
    first, second = (SharedCatalogue(door, manager, name) for manager, name in zip(managers, "ab", strict=True))
    source = edit(folder, tmp_path / "sql", config={"lora_alpha": 5})
    async with first.change("sql"):
        managers[0].load("sql", source)
        source.rename(tmp_path / "away")
    await second.catch_up()
    [row] = (await door.status())["adapters"]
    assert (
        (row["have"], row["of"]) == (1, 2)
        and "sql" in row["failures"]["b"]
        and str(tmp_path) not in row["failures"]["b"]
    )
    (tmp_path / "away").rename(source)
    following = asyncio.ensure_future(second.follow())
    await wait_until(lambda: managers[1].contains("sql"))
    following.cancel()
    await second.catch_up()
    [row] = (await door.status())["adapters"]
    assert (row["have"], row["of"], row["failures"]) == (2, 2, {})
