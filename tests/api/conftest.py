"""A live server on the tiny engine, and clients of it: the `openai` package and plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import io
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
import soundfile
import uvicorn

from api.app import create_app
from api.protocol import BoundedProtocol
from api.settings import ServerSettings
from engine import Engine
from tests.oracles import tone

Serve = Callable[..., "contextlib.AbstractContextManager[str]"]


@contextlib.contextmanager
def serve(engine: Engine, settings: ServerSettings) -> Iterator[str]:
    """Serve the API on a free port; yields its address."""
    app = create_app(engine, settings.resolve())
    server = uvicorn.Server(uvicorn.Config(app, http=BoundedProtocol, log_config=None, ws="none"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    is_ready = threading.Event()
    startup = server.startup

    async def tell(sockets: list[socket.socket] | None = None) -> None:
        await startup(sockets)
        is_ready.set()

    server.startup = tell  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    assert is_ready.wait(120)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def serve_with(tiny_engine: Engine) -> Serve:
    """A server with settings of the test's own."""
    return lambda **settings: serve(tiny_engine, ServerSettings(**settings))


@pytest.fixture(scope="session")
def base_url(tiny_engine: Engine) -> Iterator[str]:
    """A server with default settings, shared by tests that leave it as they found it."""
    with serve(tiny_engine, ServerSettings()) as url:
        yield url


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=60) as client:
        yield client


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def base_model(tiny_engine: Engine) -> str:
    return tiny_engine.model_names[0]


@pytest.fixture(scope="session")
def wav() -> bytes:
    """Half a second of a tone, as a WAV file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(0.5), 16_000, format="WAV")
    return buffer.getvalue()


@pytest.fixture(scope="session")
def audio_message(wav: bytes) -> dict[str, Any]:
    """A user's turn with a question and a recording."""
    data = base64.b64encode(wav).decode()
    audio = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"role": "user", "content": [{"type": "text", "text": "What is said?"}, audio]}


@pytest.fixture(scope="session")
def adapter_folder(speech_adapters: dict[str, Path]) -> Path:
    """Files of an adapter that tests may load under names of their own."""
    return speech_adapters["style"]


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package, without a price list from the network; the event loop that it leaves open is closed."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield importlib.import_module("litellm")
    finally:
        asyncio.set_event_loop(None)
        loop.close()
