"""Two replicas' catalogues on one ledger, with real adapters and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import AdapterNotFound
from adapters.manager import AdapterManager
from deploy.replicas import sharing
from deploy.replicas.ledger import Ledger
from deploy.replicas.sharing import SETTLED, LedgerUnreachable, SharedCatalogue
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
        self.ledger = Ledger()
        self.is_away = False

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_away:
                raise LedgerUnreachable("away")
            return await getattr(self.ledger, name)(*args, **kwargs)

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
        door.is_away, door.ledger = True, Ledger()
        asyncio.get_running_loop().call_later(0.1, setattr, door, "is_away", False)
    await second.catch_up()
    await second.catch_up()
    assert set(managers[1].names()) == {"kept", "sql"}
    assert (await door.status())["changes"] == 2


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
