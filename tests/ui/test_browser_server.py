"""The page as part of a server: logins, proxies, headers, and an end that open tabs do not hold up."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from api.settings import ServerSettings
from engine import Engine
from tests.ui.live import ChatPage, Live, behind_nginx, serving, stop
from ui.theme import CONTENT_SECURITY_POLICY

EXIT_S = 20.0
NGINX_SITE = Path(__file__).parents[2] / "deploy" / "nginx" / "studio.conf"


@pytest.mark.skipif(
    shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") is None,
    reason="nginx is not installed (Debian: apt-get install nginx-light)",
)
def test_behind_nginx_under_a_path_everything_works(
    embedded: Engine, open_page: Callable[..., Page], tone: Path, tmp_path: Path
) -> None:
    settings = ServerSettings(root_path="/studio").resolve()
    with serving(embedded, settings) as server, behind_nginx(server, NGINX_SITE, tmp_path) as address:
        page = open_page()
        failed: list[str] = []
        page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
        # Without the slash, nginx sends on to the right address.
        chat = ChatPage(page).open(f"{address}/studio")
        assert page.url.startswith(f"{address}/studio/")
        chat.attach(tone)
        assert chat.ask().startswith("speech ")
        page.get_by_role("tab", name="Adapters").click()
        expect(page.locator("#adapters-table")).to_contain_text("speech")
        assert failed == []

        question = {"model": "tiny-speech", "prompt": "once", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/studio/v1/completions", json=question, timeout=60) as answer:
            assert answer.read().rstrip().endswith(b"[DONE]")
        assert httpx.get(f"{address}/v1/models", timeout=60).status_code in (403, 404)  # nginx itself


def test_without_a_login_nothing_of_the_page_is_served(embedded: Engine, open_page: Callable[..., Page]) -> None:
    with serving(embedded, ServerSettings(auth="ana:secret").resolve()) as server:
        request = open_page().request
        for path in ("", "config", "gradio_api/info", "theme.css", "gradio_api/startup-events"):
            assert request.get(server.url + path).status == 401
        with_login = open_page(http_credentials={"username": "ana", "password": "secret"})
        ChatPage(with_login).open(server.url)


def test_the_server_stops_while_tabs_are_open(embedded: Engine, open_page: Callable[..., Page]) -> None:
    with serving(embedded, ServerSettings().resolve()) as server:
        chat = ChatPage(open_page()).open(server.url)
        chat.ask("Hello!")
        before = time.monotonic()
        stop(server)
        assert not server.thread.is_alive()
        assert time.monotonic() - before < EXIT_S


def test_the_page_forbids_what_other_hosts_would_serve(live: Live, open_page: Callable[..., Page]) -> None:
    request = open_page().request
    assert request.get(live.url).headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "content-security-policy" not in request.get(f"{live.url}v1/models").headers


def test_the_page_offers_no_second_api(live: Live, open_page: Callable[..., Page]) -> None:
    described = open_page().request.get(f"{live.url}gradio_api/info").json()
    assert described["named_endpoints"] == {}
    assert described["unnamed_endpoints"] == {}


def test_no_server_path_and_no_credential_is_in_the_page(live: Live, open_page: Callable[..., Page]) -> None:
    config = json.dumps(open_page().request.get(f"{live.url}config").json())
    assert str(Path(live.engine.config.adapter_dir or "")) not in config
