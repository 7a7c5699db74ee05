"""Load: answers that take too long, readers that do not read, and what `/health` and `/health/ready` say meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from api.service import Service
from api.settings import ServerSettings
from api.stream import DirectSend, EventStream, collect, merge
from engine import Engine
from engine.errors import Overloaded
from engine.request import Message, SamplingParams, TextPrompt
from tests.api.conftest import Serve
from tests.api.test_api_chat import eventually
from tests.pace import held_after, held_before

HI = [{"role": "user", "content": "hi"}]
LONG: dict[str, Any] = {"messages": HI, "max_tokens": 450, "ignore_eos": True}


def test_an_answer_that_takes_too_long_ends_with_a_timeout_and_frees_its_place(
    serve_with: Serve, tiny_engine: Engine, base_model: str
) -> None:
    body = {**LONG, "model": base_model}
    with (
        held_after(tiny_engine),
        serve_with(request_timeout=0.1) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        whole = http.post("/v1/chat/completions", json=body)
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "request_timeout")
        assert "--request-timeout" in whole.json()["error"]["message"]
        streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
        *_, last = [line for line in streamed.text.split("\n\n") if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert eventually(lambda: tiny_engine.stats().num_running == 0)
    with serve_with() as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).status_code == 200


@pytest.mark.asyncio
async def test_a_start_that_takes_too_long_is_a_timeout_too(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.errors import RequestTimeout

    async def hang(*_names: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(tiny_engine, "find_adapters", hang)
    service = Service(tiny_engine, ServerSettings(request_timeout=0.05).resolve())
    with pytest.raises(RequestTimeout):
        await service.start_chat([Message("user", "hi")], SamplingParams())
    assert service.readiness() == "ready"


@pytest.mark.asyncio
async def test_requests_that_come_at_once_are_let_in_up_to_the_bound(tiny_engine: Engine) -> None:
    service = Service(tiny_engine, ServerSettings(max_queued_requests=3).resolve())
    with held_before(tiny_engine, 99):
        starting = [service.start_completion(TextPrompt("hi"), SamplingParams(max_tokens=1)) for _ in range(8)]
        outcomes = await asyncio.gather(*starting, return_exceptions=True)
        started = [outcome for outcome in outcomes if isinstance(outcome, list)]
        assert len(started) == 3
        assert all(isinstance(outcome, (list, Overloaded)) for outcome in outcomes)
        assert service.readiness() == "busy"
    for answers in started:
        await collect(answers)
    assert service.readiness() == "ready"


@pytest.mark.asyncio
async def test_requests_that_the_engine_has_not_taken_in_yet_wait_too(tiny_engine: Engine) -> None:
    service = Service(tiny_engine, ServerSettings(max_queued_requests=2).resolve())
    may_go_on = threading.Event()
    try:
        tiny_engine._loop.call(lambda: may_go_on.wait(120))  # as a step that takes long does
        started = [await service.start_completion(TextPrompt("hi"), SamplingParams(max_tokens=1)) for _ in range(2)]
        with pytest.raises(Overloaded):
            await service.start_completion(TextPrompt("hi"), SamplingParams(max_tokens=1))
    finally:
        may_go_on.set()
    for answers in started:
        await collect(answers)
    tiny_engine.check_integrity()


def test_prompts_of_one_request_are_let_in_together(serve_with: Serve, base_model: str) -> None:
    with serve_with(max_queued_requests=2) as url, httpx.Client(base_url=url, timeout=60) as http:
        body = {"model": base_model, "prompt": ["a", "b", "c", "d"], "max_tokens": 1}
        assert len(http.post("/v1/completions", json=body).json()["choices"]) == 4


@pytest.mark.asyncio
async def test_a_reader_that_does_not_read_holds_nothing_of_the_engine(tiny_engine: Engine) -> None:
    service = Service(tiny_engine, ServerSettings().resolve())
    answers = await service.start_chat([Message("user", "hi")], SamplingParams(max_tokens=40, ignore_eos=True))
    may_read, sent = asyncio.Event(), []

    async def send(message: AsgiMessage) -> None:
        await may_read.wait()
        sent.append(message)

    async def receive() -> AsgiMessage:
        await asyncio.Event().wait()
        raise AssertionError

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        async for event in merge(answers):
            yield {"text": event.delta.text}

    reading = asyncio.ensure_future(EventStream(chunks(), answers, {})({"type": "http"}, receive, send))
    other = await service.start_chat([Message("user", "ho")], SamplingParams(max_tokens=40, ignore_eos=True))
    assert len([delta async for delta in other[0]]) > 40
    assert await asyncio.to_thread(eventually, lambda: tiny_engine.stats().num_running == 0)
    assert not sent
    may_read.set()
    await asyncio.wait_for(reading, 120)
    assert b"[DONE]" in b"".join(message.get("body", b"") for message in sent)


@pytest.mark.asyncio
async def test_events_pass_by_what_only_looks_at_the_start_of_an_answer(tiny_engine: Engine) -> None:
    service = Service(tiny_engine, ServerSettings().resolve())
    answers = await service.start_chat([Message("user", "hi")], SamplingParams(max_tokens=3, ignore_eos=True))
    seen, sent = list[str](), list[str]()

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        async for event in merge(answers):
            yield {"text": event.delta.text}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: AsgiMessage) -> None:
            seen.append(message["type"])
            await send(message)

        await EventStream(chunks(), answers, {})(scope, receive, watched)

    async def send(message: AsgiMessage) -> None:
        sent.append(message["type"])

    async def receive() -> AsgiMessage:
        await asyncio.Event().wait()
        raise AssertionError

    await DirectSend(app)({"type": "http"}, receive, send)
    assert seen == ["http.response.start"]
    assert sent[0] == "http.response.start" and set(sent[1:]) == {"http.response.body"} and len(sent) > 2


def test_health_lives_while_answers_drain_and_readiness_does_not(
    serve_with: Serve, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_with(max_queued_requests=3, api_key="key") as url, httpx.Client(base_url=url, timeout=60) as http:

        def states() -> tuple[int, int, str]:
            ready = http.get("/health/ready")
            return http.get("/health").status_code, ready.status_code, ready.json()["status"]

        assert states() == (200, 200, "ready")
        idle = tiny_engine.stats()
        with monkeypatch.context() as patches:
            patches.setattr(Engine, "num_waiting", 3)
            assert states() == (200, 503, "busy")
        for changed, expected in (
            ({"is_alive": False}, (200, 503, "stopping")),
            ({"is_alive": False, "is_running": False}, (503, 503, "stopping")),
        ):
            stats = dataclasses.replace(idle, **changed)  # type: ignore[arg-type]
            monkeypatch.setattr(tiny_engine, "stats", lambda stats=stats: stats)
            assert states() == expected
