"""A live server on the real engine with the embedded model, and a real browser to look at it."""

from __future__ import annotations

import asyncio
import base64
import math
import mimetypes
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
import wave
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, JSHandle, Locator, Page, Playwright, expect

from api.app import create_app
from api.protocol import BoundedProtocol
from api.service import Service
from api.settings import ServerSettings
from engine import Engine, EngineConfig
from engine.config import EMBEDDED_ASSETS, LoRAModule
from tests.media_models import picture
from ui.app import end_sessions, mount_ui

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # An origin that browsers do not trust with a microphone: neither https nor localhost.
    "--host-resolver-rules=MAP plain-http.test 127.0.0.1",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
)
START_S = 120.0
CONTEXT_LEN = 2048
# How long a test waits for what must come: much longer than it takes, since the machine may be busy with other tests.
PATIENCE_MS = 60_000
ANSWER_MS = 120_000


@dataclass
class Live:
    """A running server, in a thread of this process."""

    url: str
    app: FastAPI
    service: Service
    server: uvicorn.Server
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop

    @property
    def engine(self) -> Engine:
        """The engine behind the server."""
        return self.service.engine


def embedded_engine(adapter_dir: Path) -> Engine:
    """The embedded model with its adapters as `make run` starts it, with less memory and a shorter context."""
    adapters = [LoRAModule(name, str(EMBEDDED_ASSETS / "adapters" / name)) for name in ("speech", "sql", "pirate")]
    return Engine(
        EngineConfig(
            lora_modules=adapters,
            default_mm_loras={"audio": "speech"},
            adapter_dir=str(adapter_dir),
            max_model_len=CONTEXT_LEN,
            max_num_seqs=8,
            max_loras=4,
            kv_cache_memory_mb=64,
        )
    )


@contextmanager
def serving(engine: Engine, settings: ServerSettings) -> Iterator[Live]:
    """Serve `engine` on a free port."""
    started: Future[Live] = Future()

    async def serve() -> None:
        # Built where a loop runs: without one, Gradio makes loops that it never closes.
        app = create_app(engine, settings)
        mount_ui(app, app.state.service, settings)
        config = uvicorn.Config(
            app, port=0, http=BoundedProtocol, log_level="error", ws="none", timeout_graceful_shutdown=3
        )
        server = Server(config, lambda: started.set_result(live))
        live = Live("http://127.0.0.1:{port}/", app, app.state.service, server, thread, asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="live-server", daemon=True)
    thread.start()
    live = started.result(START_S)
    port = live.server.servers[0].sockets[0].getsockname()[1]
    live.url = live.url.format(port=port)
    try:
        yield live
    finally:
        stop(live)


class Server(uvicorn.Server):
    """Tells when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def stop(live: Live) -> None:
    """What `app.py` does at Ctrl-C."""
    if live.thread.is_alive():
        live.loop.call_soon_threadsafe(end_sessions, live.app)
    live.server.should_exit = True
    live.thread.join(START_S)


NGINX_CONFIG = """\
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        include {folder}/site.conf;
    }}
}}
"""


@contextmanager
def behind_nginx(server: Live, site: Path, folder: Path) -> Iterator[str]:
    """A real nginx in front of `server` with the locations of `site`; yields its address, without a path."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    conf = site.read_text(encoding="utf-8")
    assert "http://127.0.0.1:7860/" in conf
    (folder / "site.conf").write_text(conf.replace("http://127.0.0.1:7860/", server.url), encoding="utf-8")
    (folder / "nginx.conf").write_text(NGINX_CONFIG.format(folder=folder, port=port), encoding="utf-8")
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or "nginx"
    command = [program, "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command) as process:
        try:
            wait_until_listening(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait_until_listening(port: int) -> None:
    """Wait until a program takes connections on a port of this machine."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def wait_for(page: Page, is_so: Callable[[], bool]) -> None:
    """Wait until something is so on the server, while the page lives on."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not is_so():
        assert time.monotonic() < deadline, f"it did not come about in {PATIENCE_MS // 1000} seconds"
        page.wait_for_timeout(50)


def browser_path() -> str | None:
    """An installed Chromium, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def launch(playwright: Playwright, *, recording: Path | None = None) -> Browser:
    """A headless Chromium; `recording` is what its microphone hears."""
    microphone = [f"--use-file-for-fake-audio-capture={recording}"] if recording else []
    return playwright.chromium.launch(executable_path=browser_path(), args=[*BROWSER_FLAGS, *microphone])


def write_tone(path: Path, *, seconds: float = 1.0, hertz: float = 440.0, rate: int = 16000) -> Path:
    """A WAV with a sine; 0 seconds leaves a header alone."""
    samples = (int(9000 * math.sin(2 * math.pi * hertz * i / rate)) for i in range(int(seconds * rate)))
    with wave.open(str(path), "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(rate)
        clip.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return path


DATA_TRANSFER = """(files) => {
  const data = new DataTransfer();
  for (const [name, type, content] of files) {
    data.items.add(new File([Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0))], name, { type }));
  }
  return data;
}"""


PASTE = """(target, clipboardData) => {
  target.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
}"""


def drop_files(target: Locator, files: Mapping[str, bytes], kind: str = "") -> None:
    """Drag files from a folder onto `target` and let go; `kind` is their media type, by name where it is left out."""
    data = _transfer(target.page, files, kind)
    for event in ("dragenter", "dragover", "drop"):
        target.dispatch_event(event, {"dataTransfer": data})


def paste_files(target: Locator, files: Mapping[str, bytes]) -> None:
    """Copy files elsewhere and press Ctrl+V in `target`."""
    target.evaluate(PASTE, _transfer(target.page, files, ""))


def _transfer(page: Page, files: Mapping[str, bytes], kind: str) -> JSHandle:
    kinds = {name: kind or mimetypes.guess_type(name)[0] or "" for name in files}
    coded = [[name, kinds[name], base64.b64encode(content).decode()] for name, content in files.items()]
    return page.evaluate_handle(DATA_TRANSFER, coded)


def write_image(path: Path, *, width: int = 320, height: int = 200) -> Path:
    """A PNG of coarse colours."""
    picture(width, height).save(path, "PNG")
    return path


class ChatPage:
    """The Chat tab as a person works with it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.box = page.locator("#composer textarea")
        self.receipts = page.locator("#chatbot .thought-group .title")
        self.answers = page.locator("#chatbot [data-testid=bot]")
        self.questions = page.locator("#chatbot [data-testid=user]")
        self.hint = page.locator("#composer-hint")
        self.stop_button = page.get_by_role("button", name="Stop", exact=True)

    def open(self, url: str) -> ChatPage:
        """Load the page and wait until it can be used."""
        self.page.goto(url)
        expect(self.box).to_be_visible()
        return self

    def start_over(self) -> ChatPage:
        """Leave nothing of an earlier test in this tab."""
        self.page.get_by_role("tab", name="Chat").click()
        self.wait_until_ready()
        self.page.locator("#new-conversation").click()
        expect(self.questions).to_have_count(0)
        self.box.fill("")
        while self.page.get_by_role("button", name="Remove file").count():
            self.page.get_by_role("button", name="Remove file").first.click()
        expect(self.page.get_by_label("Adapter", exact=True)).to_have_value(re.compile("^Auto"))
        return self

    def submit(self, text: str = "") -> None:
        """Write and press Send."""
        self.box.fill(text)
        self.page.get_by_test_id("submit-button").click()

    def attach(self, *paths: Path) -> None:
        """Choose files, and wait until they are uploaded."""
        with self.page.expect_file_chooser() as chooser:
            self.page.get_by_test_id("upload-button").click()
        chooser.value.set_files([str(path) for path in paths])
        expect(self.page.get_by_role("button", name="Remove file")).to_have_count(len(paths))

    def ask(self, text: str = "") -> str:
        """Send, wait for the end of the answer, and return the new receipt's text."""
        before = self.receipts.count()
        self.submit(text)
        return self.wait_for_receipt(before + 1)

    def wait_for_receipt(self, count: int) -> str:
        """Wait until the conversation has so many receipts and nothing runs; returns the newest one's text."""
        expect(self.receipts).to_have_count(count, timeout=ANSWER_MS)
        self.wait_until_ready()
        return " ".join(self.receipts.last.inner_text().split())

    def wait_until_ready(self) -> None:
        """Wait until Send and New conversation can be pressed again."""
        expect(self.page.locator("#new-conversation")).to_be_enabled(timeout=ANSWER_MS)
        expect(self.page.get_by_test_id("submit-button")).to_be_visible(timeout=ANSWER_MS)

    def choose_adapter(self, label: str) -> None:
        """Pick from the adapter menu, by the beginning of the entry's label."""
        self.page.get_by_label("Adapter", exact=True).click()
        self.page.get_by_role("option").filter(has_text=label).first.click()


def overflow(page: Page) -> int:
    """How many pixels the page is wider than its window."""
    width: Any = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return int(width)
