"""One error envelope for every fault of every route, and limits that hold before anything is read."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from api.settings import ServerSettings
from api.stream import ascii_header
from engine import Engine
from tests.api.conftest import Serve, serve

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def envelope(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    for secret in ("Traceback", "site-packages", 'File "'):
        assert secret not in answer.text
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nowhere", 404),
        ("POST", "/v1/models/x/y", 405),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/v1/adapters/style", 405),
        ("POST", "/health", 405),
        ("GET", "/tokenize", 405),
        ("POST", "/v1", 404),
    ],
)
def test_wrong_paths_and_methods_are_answered_in_the_envelope(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = http.request(method, path)
    error = envelope(answer)
    assert answer.status_code == status
    assert path in error["message"] or status == 404
    if status == 405:
        assert method not in answer.headers["allow"]


@pytest.mark.parametrize(
    "path", ["/health", "/health/ready", "/version", "/metrics", "/v1/models", "/v1/models/nobody"]
)
def test_head_is_get_without_the_body(http: httpx.Client, path: str) -> None:
    whole, head = http.get(path), http.head(path)
    assert head.status_code == whole.status_code and head.content == b"" and whole.content
    assert head.headers["content-type"] == whole.headers["content-type"]
    refused = http.delete(path)
    assert refused.status_code == 405 and {"GET", "HEAD"} <= set(refused.headers["allow"].split(", "))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/load_lora_adapter", "/tokenize"])
@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"{", "application/json"),
        (b"", "application/json"),
        (b"[1]", "application/json"),
        (b"{}", "text/plain"),
        (b"{}", "application/x-www-form-urlencoded"),
    ],
)
def test_a_body_that_is_no_json_object_is_a_clients_fault(
    http: httpx.Client, path: str, content: bytes, content_type: str
) -> None:
    answer = http.post(path, content=content, headers={"content-type": content_type})
    assert answer.status_code == 400
    assert envelope(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/adapters"])
def test_a_broken_form_is_a_clients_fault(http: httpx.Client, path: str) -> None:
    for content_type in ("multipart/form-data", "multipart/form-data; boundary=x"):
        answer = http.post(path, content=b"--x\r\nbroken", headers={"content-type": content_type})
        assert answer.status_code == 400
        envelope(answer)


def test_the_openai_package_raises_its_own_errors_with_our_sentence(client: openai.OpenAI, base_model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.chat.completions.create(model=base_model, temperature=-1, messages=CHAT["messages"])
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="nobody") as unknown:
        client.chat.completions.create(model="nobody", messages=CHAT["messages"])
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


def test_a_body_over_the_limit_is_refused_declared_or_not(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    monkeypatch.setattr(tiny_engine, "config", dataclasses.replace(tiny_engine.config, max_upload_mb=1))
    with serve(tiny_engine, ServerSettings()) as url, httpx.Client(base_url=url, timeout=60) as http:
        for content in (b" " * (2 << 20), iter([b" " * (1 << 20)] * 2)):
            answer = http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 413
            assert envelope(answer)["code"] == "request_too_large"
        answer = http.post("/v1/adapters", data={"name": "x"}, files={"file": ("a.zip", b" " * (2 << 20))})
        assert answer.status_code == 413
        assert http.get("/health").status_code == 200


def test_a_refusal_does_not_wait_for_a_body_that_is_held_back(base_url: str) -> None:
    address = urlsplit(base_url)
    assert address.hostname and address.port
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 999999999999\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_full_queue_is_429(serve_with: Serve, base_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_with(max_queued_requests=3) as url, httpx.Client(base_url=url, timeout=60) as http:
        monkeypatch.setattr(Engine, "num_waiting", 3)
        answer = http.post("/v1/chat/completions", json={**CHAT, "model": base_model})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert envelope(answer)["type"] == "rate_limit_error"


def test_a_fault_of_ours_is_500_without_its_cause(
    http: httpx.Client, tiny_engine: Engine, base_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("secret /etc/cause")

    monkeypatch.setattr(tiny_engine._starter, "begin", break_down)
    answer = http.post("/v1/chat/completions", json={**CHAT, "model": base_model})
    assert answer.status_code == 500
    assert envelope(answer)["type"] == "server_error"
    assert 'cause"' not in answer.text and "secret" not in answer.text


def test_an_answer_that_fails_midway_ends_with_an_error_event(
    http: httpx.Client, tiny_engine: Engine, base_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.answer import Answer
    from engine.errors import EngineFault
    from engine.request import Delta, Receipt

    async def broken(*_args: object, **_kwargs: object) -> list[Answer]:
        answer = Answer("id", Receipt(None, None, "base"), [1, 2])
        for event in (Delta(receipt=answer.receipt), Delta("so far"), EngineFault("The engine failed.")):
            answer.put(event)
        return [answer]

    monkeypatch.setattr(tiny_engine, "start", broken)
    whole = http.post("/v1/chat/completions", json={**CHAT, "model": base_model})
    assert whole.status_code == 500
    assert envelope(whole)["code"] == "engine_fault"
    streamed = http.post("/v1/chat/completions", json={**CHAT, "model": base_model, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line]
    assert [next(iter(event)) for event in events] == ["id", "id", "error"]
    assert events[1]["choices"][0]["delta"]["content"] == "so far"
    assert events[2] == whole.json()


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("sql", "sql"),
        ("conflict:audio=a,image=b", "conflict:audio=a,image=b"),
        ("\u8bed\u97f3", "%E8%AF%AD%E9%9F%B3"),
        ("50% off", "50%25 off"),
        ("a\r\nSet-Cookie: x", "a%0D%0ASet-Cookie: x"),
    ],
)
def test_header_values_are_printable_ascii(text: str, header: str) -> None:
    assert ascii_header(text) == header


def test_docs_describe_every_route_and_need_no_other_host(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    paths = {
        "/v1/models", "/v1/models/{model_id}", "/v1/chat/completions", "/v1/completions", "/v1/audio/transcriptions",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters", "/v1/adapters/{name}", "/v1/adapters/{name}/download",
        "/tokenize", "/detokenize", "/health", "/health/ready", "/version", "/metrics",
    }  # fmt: skip
    assert document["paths"].keys() == paths
    references = [part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]]
    assert "ChatRequest" in references
    assert set(references) <= document["components"]["schemas"].keys()
    page = http.get("/docs").text
    assert all(path in page for path in paths)
    assert "http" not in page.replace("http-equiv", "")
    assert http.get("/version").json()["version"].count(".") == 2
