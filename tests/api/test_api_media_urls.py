"""Media by address: from allowed hosts and public addresses alone, whatever redirects say, and within bounds."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from api.media_urls import MediaUrls, is_public_address
from engine.errors import AppError
from tests.api.conftest import Serve

PARAM = "messages[0].content[0].audio_url.url"


class Host:
    """A web server on this machine: `/a.wav` is a file, `/to/URL` a redirect, `/loop` one to itself; notes what is asked."""

    def __init__(self, wav: bytes) -> None:
        asked = self.asked = list[tuple[str, str | None]]()
        self.may_answer = threading.Event()
        may_answer = self.may_answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.path, self.headers["host"]))
                if self.path == "/slow":
                    may_answer.wait(120)
                place = "/loop" if self.path == "/loop" else self.path.removeprefix("/to/")
                is_moved = self.path.startswith(("/to/", "/loop"))
                self.send_response(302 if is_moved else 200 if self.path == "/a.wav" else 404)
                if is_moved:
                    self.send_header("location", place)
                self.end_headers()
                if self.path == "/a.wav":
                    self.wfile.write(wav)

            def log_message(self, *_args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def host(wav: bytes) -> Iterator[Host]:
    made = Host(wav)
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.may_answer.set()
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def is_public_or_here(address: str) -> bool:
    return address == "127.0.0.1" or is_public_address(address)


@pytest.mark.parametrize(
    ("address", "is_public"),
    [
        ("93.184.215.14", True), ("2606:4700::1111", True), ("64:ff9b::5db8:d70e", True),
        ("127.0.0.1", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False), ("100.64.0.1", False),
        ("169.254.169.254", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False),
        ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fd00::1", False), ("ff02::1", False),
        ("::ffff:10.0.0.1", False), ("64:ff9b::a9fe:a9fe", False), ("2002:7f00:1::", False),
    ],
)  # fmt: skip
def test_only_addresses_of_the_public_internet_may_be_asked(address: str, is_public: bool) -> None:
    assert is_public_address(address) is is_public


def test_an_allowed_address_is_heard_like_a_data_url_and_others_are_refused(
    serve_with: Serve, base_model: str, host: Host, wav: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(http: httpx.Client, url: str) -> httpx.Response:
        parts = [{"type": "audio_url", "audio_url": {"url": url}}]
        body = {
            "model": base_model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 4,
            "temperature": 0,
        }
        return http.post("/v1/chat/completions", json=body)

    with serve_with() as url, httpx.Client(base_url=url, timeout=60) as http:
        expected = ask(http, f"data:;base64,{base64.b64encode(wav).decode()}").json()
        refused = ask(http, f"{host.url}/a.wav")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, PARAM)
        assert "--allowed-media-domains" in refused.json()["error"]["message"]
    with serve_with(allowed_media_domains=["127.0.0.1"]) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert ask(http, f"{host.url}/a.wav").json()["error"]["param"] == PARAM
        assert host.asked == []  # allowed by its name, but not on the public internet
    monkeypatch.setattr("api.service.MediaUrls", partial(MediaUrls, is_public=is_public_or_here))
    with serve_with(allowed_media_domains=["127.0.0.1"]) as url, httpx.Client(base_url=url, timeout=60) as http:
        for path in ("/a.wav", "/to//a.wav"):
            answer = ask(http, host.url + path).json()
            assert answer["choices"] == expected["choices"] and answer["lora"]["reason"] == "default:audio"
        gone = ask(http, f"{host.url}/gone").json()["error"]
        assert (gone["param"], gone["code"]) == (PARAM, "invalid_media")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/gone", "answered 404"), ("/loop", "redirected more than 3"), ("/slow", "took longer"), ("/a.wav", "larger than"),
        ("/to/http://169.254.169.254/a.wav", "no public address"), ("/to/http://localhost/a.wav", "no public address"),
        ("/to/http://[::1]/", "no public address"), ("/to/http://[bad/", "could not be fetched"),
        ("/to/file:///etc/passwd", "http or https"), ("/to/http://me:pw@93.184.215.14/", "without a user name"),
    ],
)  # fmt: skip
async def test_whatever_leads_elsewhere_or_breaks_a_bound_is_a_clients_fault(
    host: Host, wav: bytes, path: str, said: str
) -> None:
    seen: list[str] = []

    def only_here(address: str) -> bool:
        seen.append(address)
        return address == "127.0.0.1" and len(seen) == 1

    urls = MediaUrls(["*"], is_public=is_public_or_here if path == "/loop" else only_here, max_seconds=0.5)
    with pytest.raises(AppError, match=said) as fault:
        await urls.fetch(host.url + path, "url", max_bytes=len(wav) - 1)
    assert (fault.value.status, fault.value.param) == (400, "url")
    assert len(host.asked) == (4 if path == "/loop" else 1)


@pytest.mark.asyncio
async def test_a_name_is_asked_by_that_name_at_the_address_that_was_looked_at(host: Host, wav: bytes) -> None:
    url = host.url.replace("127.0.0.1", "LOCALHOST")
    urls = MediaUrls(["localhost"], is_public=lambda address: True)
    assert await urls.fetch(f"{url}/a.wav", "url", max_bytes=len(wav)) == wav
    assert host.asked == [("/a.wav", url.removeprefix("http://").lower())]
    for other in ("http://other.example/", "ftp://localhost/", "localhost/a.wav", "http://localhost.example/"):
        with pytest.raises(AppError):
            urls.check(other, "url")


def test_nothing_is_fetched_for_messages_that_are_wrong(
    serve_with: Serve, base_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_args: Any, **_named: Any) -> bytes:
        raise AssertionError("fetched")

    monkeypatch.setattr(MediaUrls, "fetch", never)
    parts = [{"type": "audio_url", "audio_url": {"url": "http://a.example/a.wav"}}, {"type": "wish"}]
    with serve_with(allowed_media_domains=["*"]) as url, httpx.Client(base_url=url, timeout=60) as http:
        body = {"model": base_model, "messages": [{"role": "user", "content": parts}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.json()["error"]["param"] == "messages[0].content[1].type"
