"""The service layer as the browser app calls it, without HTTP."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from api.errors import RuntimeUpdatingOff
from api.service import Service
from api.settings import ServerSettings
from api.transcript import TranscriptSegment, TranscriptStart
from engine import Engine
from engine.request import AudioPart, Message, SamplingParams, TextPart, TextPrompt
from tests.oracles import tone

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def service(tiny_engine: Engine) -> Service:
    return Service(tiny_engine, ServerSettings().resolve())


@pytest.mark.asyncio
async def test_chat_completion_and_transcription_give_answers_with_receipts(service: Service) -> None:
    clip = AudioPart((tone(0.4), 16_000))
    chat = await service.start_chat([Message("user", [TextPart("hi"), clip])], GREEDY, n=2)
    named = await service.start_completion(TextPrompt("hi"), GREEDY, lora="style")
    answers = [*chat, *named]
    reasons = ["default:audio", "default:audio", "explicit"]
    assert [answer.receipt.reason for answer in answers] == reasons
    for answer in answers:
        assert [delta.finish_reason async for delta in answer][-1] in ("stop", "length")
    events = [event async for event in service.transcribe(clip, GREEDY, lora="none")]
    assert isinstance(events[0], TranscriptStart) and events[0].receipt.reason == "opt-out"
    assert isinstance(events[-1], TranscriptSegment)


@pytest.mark.asyncio
async def test_an_answer_that_starts_after_its_caller_has_gone_is_aborted(
    service: Service, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on, is_aborted = threading.Event(), threading.Event(), threading.Event()
    begin = tiny_engine._starter.begin

    def begin_late(*args: Any, **kwargs: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(120)
        [answer] = begin(*args, **kwargs)
        abort = answer.abort
        answer.abort = lambda: (abort(), is_aborted.set())  # type: ignore[assignment, method-assign, func-returns-value]
        return [answer]

    monkeypatch.setattr(tiny_engine._starter, "begin", begin_late)
    starting = asyncio.create_task(service.start_chat([Message("user", "hi")], GREEDY))
    assert await asyncio.to_thread(has_begun.wait, 120)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    may_go_on.set()
    assert await asyncio.to_thread(is_aborted.wait, 120)


@pytest.mark.asyncio
async def test_changes_are_refused_where_they_are_switched_off(tiny_engine: Engine) -> None:
    service = Service(tiny_engine, ServerSettings(allow_runtime_lora_updating=False).resolve())
    for change in (
        service.load_adapter("x", "/nowhere"),
        service.unload_adapter("style"),
        service.delete_adapter("style"),
        service.pin_adapter("style", True),
        service.roll_back_adapter("style", "sha256:x"),
        service.set_default_for("style", ["audio"]),
        service.install_upload("x", {}),
    ):
        with pytest.raises(RuntimeUpdatingOff):
            await change
    assert "style" in {info.name for info in await service.list_adapters()}


def test_who_may_change_adapters_follows_the_one_policy(tiny_engine: Engine) -> None:
    assert Service(tiny_engine, ServerSettings().resolve()).is_admin(None)
    guarded = Service(tiny_engine, ServerSettings(api_key="key", admin_key="root").resolve())
    assert [guarded.is_admin(each) for each in (None, "Bearer key", "Bearer root")] == [False, False, True]


@pytest.mark.asyncio
async def test_slow_loads_hold_up_neither_lists_nor_unloads(
    service: Service, tiny_engine: Engine, speech_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.load_adapter("mine", str(speech_adapters["style"]))
    may_go_on = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(tiny_engine.adapters, "load", lambda *_args, **_kwargs: may_go_on.wait(120))
        loads = [asyncio.create_task(service.load_adapter(f"slow-{number % 20}", "/x")) for number in range(40)]
        try:
            await asyncio.sleep(0)
            await asyncio.wait_for(service.unload_adapter("mine"), 120)
            assert "mine" not in {info.name for info in await asyncio.wait_for(service.list_adapters(), 120)}
            assert not any(load.done() for load in loads)
        finally:
            may_go_on.set()
        await asyncio.gather(*loads)
