"""What a client sees of lost replicas, with replicas that are scripts: no cluster is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError

from api.settings import ServerSettings
from deploy.replicas.call import Call
from deploy.replicas.ingress import Ingress

HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
PLAIN = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
LAST = {"type": "http.response.body", "body": b"{}", "more_body": False}


def some(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}


class Replicas:
    """A handle whose calls play one script each: messages, and then the end or the loss of the replica."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.models: list[str] = []
        self.cancelled = 0
        self.left: list[str] = []

    def options(self, *, method_name: str, multiplexed_model_id: str = "", stream: bool = False) -> Replicas:
        self.method = method_name
        if method_name == "handle":
            self.models.append(multiplexed_model_id)
        return self

    def remote(self, *args: Any) -> Any:
        if self.method == "names":
            return _names()
        if self.method == "leave_page":
            return self.left.append(args[0].line)
        self.calls += args
        return Stream(self, self.scripts.pop(0), f"r{len(self.calls)}")


async def _names() -> tuple[list[str], Mapping[str, str]]:
    return ["base"], {"audio": "speech"}


class Stream:
    def __init__(self, replicas: Replicas, script: Sequence[Any], name: str) -> None:
        self._replicas = replicas
        self._items = self._play(script, name)

    def __anext__(self) -> Any:
        return self._items.__anext__()

    def cancel(self) -> None:
        self._replicas.cancelled += 1

    async def _play(self, script: Sequence[Any], name: str) -> AsyncIterator[list[Any]]:
        yield [{"type": "replica.id", "replica": name}]
        for item in script:
            if item == "forever":
                await asyncio.Event().wait()
            if isinstance(item, Exception):
                raise item
            yield [item]


async def ask(replicas: Replicas, path: str = "/v1/chat/completions", **kwargs: Any) -> httpx.Response:
    app = Ingress(replicas, ServerSettings(**kwargs.pop("settings", {})), max_upload_mb=1).__serve_build_asgi_app__()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://h") as client:
        return await client.post(path, **({"json": {"model": "sql"}} | kwargs))


@pytest.mark.asyncio
async def test_an_answer_passes_with_the_replicas_name() -> None:
    replicas = Replicas([PLAIN, LAST])
    response = await ask(replicas)
    assert (response.status_code, response.json(), response.headers["x-replica"]) == (200, {}, "r1")
    assert replicas.models == ["sql"] and replicas.calls[0].adapter == "sql"
    assert b"".join(replicas.calls[0].parts) == b'{"model":"sql"}'


@pytest.mark.asyncio
@pytest.mark.parametrize("before", [[], [HEAD]])
async def test_a_request_whose_replica_is_lost_before_it_answers_goes_to_another(before: list[Any]) -> None:
    replicas = Replicas([*before, ActorDiedError()], [PLAIN, LAST])
    response = await ask(replicas)
    assert (response.status_code, response.headers["x-replica"], response.headers["x-replica-lost"]) == (
        200,
        "r2",
        "r1",
    )
    assert replicas.calls[1].avoid == ("r1",)


@pytest.mark.asyncio
async def test_two_losses_are_a_503_that_says_when_to_come_back() -> None:
    response = await ask(Replicas([ActorDiedError()], [ActorDiedError()]))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "replica_lost"


@pytest.mark.asyncio
async def test_a_change_is_never_made_twice() -> None:
    replicas = Replicas([ActorDiedError()])
    response = await ask(replicas, "/v1/load_lora_adapter")
    assert response.status_code == 503 and "GET /v1/adapters" in response.json()["error"]["message"]
    assert len(replicas.calls) == 1


@pytest.mark.asyncio
async def test_a_stream_that_has_begun_ends_with_an_error_event() -> None:
    replicas = Replicas([HEAD, some(b"data: 1\n\n"), ActorDiedError()])
    response = await ask(replicas)
    events = response.text.strip().split("\n\n")
    assert response.status_code == 200 and events[0] == "data: 1"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(replicas.calls) == 1


@pytest.mark.asyncio
async def test_a_strangers_body_is_not_read() -> None:
    replicas = Replicas([PLAIN, LAST])
    await ask(replicas, settings={"api_key": "secret"})
    assert replicas.calls[0].parts == [] and replicas.models == [""]
    replicas = Replicas([PLAIN, LAST])
    await ask(replicas, settings={"api_key": "secret"}, headers={"Authorization": "Bearer secret"})
    assert replicas.models == ["sql"]


@pytest.mark.asyncio
async def test_a_body_that_is_too_large_is_not_read() -> None:
    replicas = Replicas([PLAIN, LAST])
    await ask(replicas, json=None, content=b"x" * (1 << 21), headers={"Content-Type": "application/json"})
    assert replicas.calls[0].parts == []


@pytest.mark.asyncio
async def test_a_client_that_leaves_cancels_its_answer() -> None:
    replicas = Replicas([HEAD, some(b"data: 1\n\n"), "forever"])
    app = Ingress(replicas, ServerSettings(), max_upload_mb=1).__serve_build_asgi_app__()
    has_begun = asyncio.Event()
    incoming = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        has_begun.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
    }
    await asyncio.wait_for(app(scope, receive, send), 30)
    assert replicas.cancelled == 1


@pytest.mark.asyncio
async def test_a_pages_line_that_is_refused_is_left_and_other_paths_open_none() -> None:
    refused = Replicas([{**PLAIN, "status": 401}, LAST])
    await ask(refused, "/gradio_api/heartbeat/page")
    assert refused.left == [] and refused.calls[0].line == "", "a POST"
    app = Ingress(refused, ServerSettings(), max_upload_mb=1).__serve_build_asgi_app__()
    refused.scripts = [[{**PLAIN, "status": 401}, LAST]] * 2
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://h") as client:
        for _ in range(2):
            assert (await client.get("/gradio_api/heartbeat/page")).status_code == 401
    first, second = (call.line for call in refused.calls[1:])
    assert refused.left == [first, second] and first != second
