"""The web app: a header, its tabs, and its place in the server.

Owns the page's frame and how Gradio is mounted; each tab owns what is in it. Called by `app.py`, after every API route has
been declared, because a mount at `/` hides what comes later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

# Gradio reads these when it is imported; nothing of this page may call home.
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import gradio as gr
import gradio.routes
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ui.adapters import AdaptersTab
from ui.chat import ChatTab
from ui.compare import CompareTab
from ui.page import DIRECT, Page, session_of
from ui.sessions import forget_closed
from ui.status import StatusTab
from ui.text import Texts, texts
from ui.theme import CONTENT_SECURITY_POLICY, LOGO, logo_svg, make_theme, page_head
from ui.transcribe import TranscribeTab

if TYPE_CHECKING:
    from fastapi import FastAPI

    from api.service import Service
    from api.settings import ServerSettings

HEADER_EVERY_S = 5
MAX_EVENTS = 128
LINKS = {"docs": "docs", "openapi": "openapi.json", "metrics": "metrics"}
CACHE_CHECK_S = 600
CACHE_AGE_S = 24 * 3600


class Tab(Protocol):
    """What a file of this folder offers for a tab."""

    def build(self) -> None:
        """Create the components inside the tab that is open."""

    def load(self, blocks: gr.Blocks) -> None:
        """Connect what happens when the page is opened."""

    def watch(self, selected: gr.Tab, others: Sequence[gr.Tab]) -> None:
        """Connect what happens when the tab is opened, and when another one is."""


def build_ui(page: Page) -> gr.Blocks:
    """The page, not yet mounted. A further tab is a class with `build` and `watch`, and a line in `_tabs`."""
    blocks: gr.Blocks = gr.Blocks(
        title=page.text("app.name"), analytics_enabled=False, fill_width=True, delete_cache=(CACHE_CHECK_S, CACHE_AGE_S)
    )
    with blocks:
        header = gr.HTML(
            header_html(page, page.text, sees_all=not page.service.policy.has_tenants),
            elem_id="header",
            padding=False,
            apply_default_css=False,
        )
        tabs = _tabs(page)
        opened = {}
        with gr.Tabs(elem_id="tabs"):
            for key, tab in tabs.items():
                with gr.Tab(page.label(f"tab.{key}"), id=key, elem_id=f"tab-{key}") as opened[key]:
                    tab.build()
        for key, tab in tabs.items():
            tab.load(blocks)
            tab.watch(opened[key], [other for other_key, other in opened.items() if other_key != key])
        timer = gr.Timer(HEADER_EVERY_S)

        def draw_header(request: gr.Request) -> str:
            page.samples.take(page.service.stats())
            return header_html(page, page.words(request), sees_all=page.service_for(request).caller.sees_all)

        gr.on([blocks.load, timer.tick], draw_header, None, header, **DIRECT)

        def leave(request: gr.Request) -> None:
            page.stop_all(session_of(request))
            forget_closed(blocks.state_holder)

        blocks.unload(leave)
    # The engine queues, not Gradio: these only bound how many events may be open at once.
    blocks.max_threads = MAX_EVENTS
    blocks.queue(default_concurrency_limit=16)
    return blocks


def _tabs(page: Page) -> dict[str, Tab]:
    """The tabs in their order, by the ends of their names' keys; the model decides whether it can transcribe."""
    tabs: dict[str, Tab] = {"chat": ChatTab(page)}
    if page.takes_audio:
        tabs["transcribe"] = TranscribeTab(page)
    return tabs | {"compare": CompareTab(page), "adapters": AdaptersTab(page), "status": StatusTab(page)}


def mount_ui(app: FastAPI, service: Service, settings: ServerSettings) -> FastAPI:
    """Serve the web app at `/`. Who may see it is decided by the guard that stands before all of `app`."""
    app.add_middleware(PageHeaders)
    max_bytes = service.engine.config.max_upload_mb * 2**20
    paths = {getattr(route, "path", "") for route in app.routes}
    page = Page(service, texts(), links={key: path for key, path in LINKS.items() if f"/{path}" in paths})
    gr.mount_gradio_app(
        app,
        build_ui(page),
        path="/",
        root_path=settings.root_path or None,
        theme=make_theme(),
        head=page_head(page.text),
        i18n=page.translations(),
        favicon_path=str(LOGO),
        allowed_paths=[str(LOGO.parent / "audio")],
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        show_error=False,
        max_file_size=max_bytes,
    )
    return app


def end_sessions(app: FastAPI) -> None:
    """End every open page's streams, so that the server can stop while tabs are open; call when a stop is asked for."""
    for route in app.routes:
        mounted = getattr(route, "app", None)
        if isinstance(mounted, gradio.routes.App):
            blocks: Any = mounted.get_blocks()
            blocks._queue.close()
            mounted.stop_event.set()


class PageHeaders:
    """Puts the content security policy on every HTML answer: a model's answer must not fetch anything from elsewhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message.setdefault("headers", [])
                if any(key == b"content-type" and value.startswith(b"text/html") for key, value in headers):
                    headers.append((b"content-security-policy", CONTENT_SECURITY_POLICY.encode()))
            await send(message)

        await self._app(scope, receive, send_with_policy if scope["type"] == "http" else send)


def header_html(page: Page, text: Texts, *, sees_all: bool) -> str:
    """Name, what the engine is doing (how busy it is only where the visitor sees all), model, adapters; escaped."""
    service = page.service
    stats = service.stats()
    state = "app.ready" if stats.is_alive else "app.down"
    pills = [f"<span class='pill {'ok' if stats.is_alive else 'bad'}'><i></i>{escape(text(state))}</span>"]
    if sees_all and (stats.num_running or stats.num_waiting):
        load = text("app.running", running=stats.num_running, waiting=stats.num_waiting)
        pills.append(f"<span class='pill wide'>{escape(load)}</span>")
    pills.append(f"<span class='pill wide'>{escape(service.engine.model_names[0])}</span>")
    if not service.policy.has_tenants:
        count = len(service.engine.adapters.names())
        pills.append(f"<span class='pill wide'>{escape(text('app.adapters', count=count))}</span>")
    label = escape(text("app.theme_label"), quote=True)
    return (
        f"<header><span class='logo' aria-hidden='true'>{logo_svg()}</span>"
        f"<div class='brand'><h1>{escape(text('app.name'))}</h1><p>{escape(text('app.subtitle'))}</p></div>"
        f"<div class='pills'>{''.join(pills)}"
        f"<button type='button' class='pill' data-theme-toggle aria-label='{label}'>{escape(text('app.theme'))}</button>"
        "</div></header>"
    )
