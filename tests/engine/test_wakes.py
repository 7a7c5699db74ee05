"""Readers are woken by one call a step: at once where they are few, else when the device has its next step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.loop import EngineLoop
from engine.request import TokenPrompt
from engine.runner import Runner
from engine.wakes import _MIN_HELD, Wakes
from tests.oracles import random_ids
from tests.pace import held_before


def futures(loop: asyncio.AbstractEventLoop, number: int) -> list[asyncio.Future[None]]:
    return [loop.create_future() for _ in range(number)]


@pytest.mark.asyncio
async def test_what_is_held_goes_out_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, wakes, calls = asyncio.get_running_loop(), Wakes(), []
    call = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (calls.append(args), call(*args)))
    waiting = futures(loop, 12)
    wakes.hold()
    for future in waiting:
        wakes.add(future, lambda: None)
    wakes.send_few()
    assert not calls
    wakes.send()
    await asyncio.gather(*waiting)
    assert len(calls) == 1


@pytest.mark.asyncio
async def test_a_few_are_not_kept_waiting_and_nobody_is_after_sending() -> None:
    loop, wakes = asyncio.get_running_loop(), Wakes()
    few, late = futures(loop, 2), futures(loop, 1)
    wakes.hold()
    for future in few:
        wakes.add(future, lambda: None)
    wakes.send_few()
    wakes.add(late[0], lambda: None)
    await asyncio.wait_for(asyncio.gather(*few, *late), 5)


def test_where_the_loop_is_closed_the_answer_hears_of_it() -> None:
    loop, wakes, closed = asyncio.new_event_loop(), Wakes(), []
    waiting = futures(loop, 10)
    loop.close()
    wakes.hold()
    for number, future in enumerate(waiting):
        wakes.add(future, lambda number=number: closed.append(number))  # type: ignore[misc]
    wakes.send()
    assert closed == list(range(10))


@pytest.fixture
def engine(llama_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(
            model=str(llama_dir), device="cpu", dtype="float32", max_num_seqs=16, async_scheduling=True,
            adapter_dir=str(tmp_path), enable_prefix_caching=False,
        )
    )  # fmt: skip
    yield engine
    engine.close(0)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_many_readers_are_woken_once_the_next_step_is_launched(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    """Where launching takes no time; where it takes long, before it."""
    events: list[str] = []
    launch, send, settle = EngineLoop._launch, Wakes.send, EngineLoop._settle

    def noted_send(wakes: Wakes) -> None:
        if wakes._num_due >= _MIN_HELD and threading.current_thread().name == "engine":
            events.append("wakes")
        send(wakes)

    monkeypatch.setattr(Runner, "is_recorded", lambda runner, plan: is_recorded)
    monkeypatch.setattr(EngineLoop, "_launch", lambda loop, plan: (events.append("launch"), launch(loop, plan))[1])
    monkeypatch.setattr(EngineLoop, "_settle", lambda loop: (settle(loop), events.append("tokens"))[0])
    monkeypatch.setattr(Wakes, "send", noted_send)

    async def read_all() -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        with held_before(engine, 12):
            started = [engine.start_sync(TokenPrompt(random_ids(8, row)), sampling)[0] for row in range(12)]

        async def count(answer: object) -> int:
            return sum([len(delta.token_ids) async for delta in answer])  # type: ignore[attr-defined]

        return list(await asyncio.gather(*map(count, started)))

    assert asyncio.run(read_all()) == [20] * 12
    last_launch = len(events) - events[::-1].index("launch")
    before = {events[place - 1] for place in range(1, last_launch) if events[place] == "wakes"}
    assert before == {"launch" if is_recorded else "tokens"}, events
