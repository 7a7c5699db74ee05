"""One request of a replica, and open pages, without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deploy.replicas.call import Call, is_page_line
from deploy.replicas.exchange import MAX_MESSAGES, Exchange, Pages


def piece(index: int, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"%d" % index, "more_body": more}


async def drain() -> None:
    for _ in range(1000):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_an_answer_is_never_far_ahead_of_its_reader() -> None:
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        for index in range(100):
            await send(piece(index))
            sent += 1

    exchange = Exchange(app, Call({}))
    await drain()
    assert sent == MAX_MESSAGES
    read = []
    while messages := await exchange.next_messages():
        read += messages
    assert [message["body"] for message in read] == [b"%d" % index for index in range(100)]
    assert await exchange.next_messages() == []


@pytest.mark.asyncio
async def test_an_application_whose_reader_has_left_ends() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for index in range(100):
            await send(piece(index))

    exchange = Exchange(app, Call({}))
    await drain()
    exchange.leave()
    await asyncio.wait_for(exchange.task, 120)


@pytest.mark.asyncio
async def test_an_applications_failure_is_the_readers() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(piece(0))
        raise RuntimeError("broken")

    exchange = Exchange(app, Call({}))
    assert await exchange.next_messages() == [piece(0)]
    with pytest.raises(RuntimeError, match="broken"):
        await exchange.next_messages()


@pytest.mark.asyncio
async def test_pages_that_nobody_renews_are_left() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"

    now = [0.0]
    pages = Pages(60.0, clock=lambda: now[0])
    lines = {line: Exchange(app, Call({})) for line in ("kept", "silent", "closed")}
    for line, exchange in lines.items():
        pages.keep(line, exchange)
    await drain()
    pages.leave("closed")
    pages.leave("unknown")
    now[0] = 50.0
    pages.renew("kept")
    now[0] = 70.0
    pages.leave_silent()
    await drain()
    assert {line for line, exchange in lines.items() if exchange.task.done()} == {"silent", "closed"}
    pages.leave_all()
    await asyncio.wait_for(lines["kept"].task, 120)


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/gradio_api/heartbeat/page", True),
        ("POST", "/gradio_api/heartbeat/page", False),
        ("GET", "/v1/gradio_api/heartbeat/page", False),
        ("GET", "/gradio_api/heartbeat/page/more", False),
    ],
)
def test_only_a_pages_own_path_opens_a_line(method: str, path: str, expected: bool) -> None:
    assert is_page_line(method, path) is expected
