"""Readers are woken by one call a step: at once where they are few, else when the device has its next step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.config import LoRAModule
from engine.errors import AppError
from engine.loop import EngineLoop
from engine.request import TokenPrompt
from engine.runner import LaunchedStep, Runner
from engine.scheduler import Plan
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
    loop, wakes, closed = asyncio.new_event_loop(), Wakes(), list[int]()
    waiting = futures(loop, 10)
    loop.close()
    wakes.hold()
    for number, future in enumerate(waiting):
        wakes.add(future, functools.partial(closed.append, number))
    wakes.send()
    assert closed == list(range(10))


def make_engine(model: Path, root: Path, **settings: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model), device="cpu", dtype="float32", async_scheduling=True, adapter_dir=str(root),
            enable_prefix_caching=False, **settings,
        )
    )  # fmt: skip


@pytest.fixture
def engine(llama_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = make_engine(llama_dir, tmp_path, max_num_seqs=16)
    yield engine
    engine.close(0)


@pytest.fixture
def adapter_engine(llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path) -> Iterator[Engine]:
    """With one place less than the tests have requests, the last of which asks for an adapter."""
    adapters = [LoRAModule("qv", str(llama_adapters["qv"]))]
    engine = make_engine(llama_dir, tmp_path, max_num_seqs=12, lora_modules=adapters)
    yield engine
    engine.close(0)


@pytest.mark.parametrize(("is_recorded", "has_penalties"), [(True, False), (False, False), (True, True)])
def test_many_readers_are_woken_once_the_next_step_is_launched(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_recorded: bool, has_penalties: bool
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
        penalty = 1.1 if has_penalties else 1.0
        sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=penalty)
        with held_before(engine, 12):
            started = [engine.start_sync(TokenPrompt(random_ids(8, row)), sampling)[0] for row in range(12)]

        async def count(answer: Answer) -> int:
            return sum([len(delta.token_ids) async for delta in answer])

        return list(await asyncio.gather(*map(count, started)))

    assert asyncio.run(read_all()) == [20] * 12
    last_launch = len(events) - events[::-1].index("launch")
    before = {events[place - 1] for place in range(1, last_launch) if events[place] == "wakes"}
    assert before == {"launch" if is_recorded and not has_penalties else "tokens"}, events


def test_an_idle_engine_holds_nobody(engine: Engine) -> None:
    """However its last step has ended."""

    async def wait() -> None:
        future, wakes = asyncio.get_running_loop().create_future(), engine._loop._wakes

        def hold() -> None:
            wakes.hold()
            wakes.add(future, lambda: None)

        assert engine._loop.call(hold)
        await asyncio.wait_for(future, 5)

    asyncio.run(wait())


def answers_of(engine: Engine, number: int, **settings: Any) -> list[Answer]:
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return [engine.start_sync(TokenPrompt(random_ids(8, row)), sampling, **settings)[0] for row in range(number)]


async def seconds_late(engine: Engine, **last: Any) -> list[float]:
    """How long after its end each of 12 answers' readers heard of it; none may wait for ever. `last` asks for one more."""
    with held_before(engine, 13 if last else 12):
        answers = answers_of(engine, 12) + (answers_of(engine, 1, **last) if last else [])

    async def read(answer: Answer) -> float:
        with contextlib.suppress(AppError):
            async for _ in answer:
                pass
        assert answer.ended_at is not None
        return time.monotonic() - answer.ended_at

    return list(await asyncio.wait_for(asyncio.gather(*map(read, answers)), 30))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps count as recorded, so that readers may be kept until the next is launched."""
    monkeypatch.setattr(Runner, "is_recorded", lambda runner, plan: True)


@pytest.mark.usefixtures("recorded")
def test_readers_hear_of_the_end_where_the_last_request_cannot_be_started(
    adapter_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no copy")

    assert adapter_engine._slots is not None
    monkeypatch.setattr(adapter_engine._slots._writer, "write", broken)

    assert max(asyncio.run(seconds_late(adapter_engine, lora="qv"))) < 5


@pytest.mark.usefixtures("recorded")
def test_readers_hear_of_the_end_where_no_step_can_be_launched_any_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, launched = Runner.launch, Counter[str]()

    def lost(runner: Runner, plan: Plan) -> LaunchedStep:
        launched["steps"] += 1
        time.sleep(0.02)  # All readers wait by now.
        if launched["steps"] > 3:
            raise RuntimeError("the device is gone")
        return launch(runner, plan)

    monkeypatch.setattr(Runner, "launch", lost)

    assert max(asyncio.run(seconds_late(engine))) < 5


@pytest.mark.usefixtures("recorded")
def test_readers_do_not_wait_while_a_failed_step_is_computed_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, num_due, launched = Runner.launch, list[int](), Counter[str]()

    def failing(runner: Runner, plan: Plan) -> LaunchedStep:
        launched["steps"] += 1
        time.sleep(0.02)
        if launched["steps"] == 3:
            raise RuntimeError("once")
        if launched["steps"] == 4:
            num_due.append(engine._loop._wakes._num_due)
        return launch(runner, plan)

    monkeypatch.setattr(Runner, "launch", failing)

    asyncio.run(seconds_late(engine))
    assert num_due == [0]


@pytest.mark.usefixtures("recorded")
def test_readers_of_the_last_answers_do_not_wait_for_another_requests_adapter(
    adapter_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = adapter_engine._slots
    assert slots is not None
    write, read = slots._writer.write, LaunchedStep.read

    class SlowCopy:
        def is_ready(self) -> bool:
            return False

        def has_failed(self) -> bool:
            return False

        def wait(self) -> None:
            time.sleep(1)

    monkeypatch.setattr(slots._writer, "write", lambda *args: (write(*args), SlowCopy())[1])
    monkeypatch.setattr(LaunchedStep, "read", lambda step: (time.sleep(0.02), read(step))[1])

    assert max(asyncio.run(seconds_late(adapter_engine, lora="qv"))) < 0.8
