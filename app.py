"""Starts Switchboard: settings, engine, HTTP interface and browser app put together, and ended in order.

`python app.py [MODEL] [flags]`. The only place that knows all parts. Exit codes: 0 after Ctrl-C or SIGTERM, 1 where the
start fails, 2 where a flag or an environment variable is wrong; a failure is one line on stderr.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from api.cli import CommandLine, parse_command_line
from api.settings import ConfigFault, ServerSettings
from engine.config import EngineConfig
from engine.errors import AppError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from engine import Engine

log = logging.getLogger("switchboard")

# How much longer than the drain the server waits for sockets, so that cut-off answers reach their readers.
GRACE_SECONDS = 3
MIB = 2**20


def main(words: Sequence[str] | None = None) -> int:
    """Run until told to stop; the exit code."""
    # SIGTERM during the start ends it like Ctrl-C; the server installs its own handler later.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(parse_command_line(sys.argv[1:] if words is None else words, os.environ))
    except AppError as error:
        sys.stderr.write(f"app.py: error: {error.message}\n")
        return 2 if _is_config_fault(error) else 1
    except KeyboardInterrupt:
        return 0


def _is_config_fault(error: AppError) -> bool:
    """Whether a setting is to blame: found by the command line, or by the engine, which names the setting."""
    names = {row.name for table in (EngineConfig, ServerSettings) for row in fields(table)}
    return isinstance(error, ConfigFault) or error.param in names


def _run(command: CommandLine) -> int:
    settings = command.server
    set_up_logging(settings.log_level)
    for warning in command.warnings:
        log.warning("event=flag_ignored reason=%r", warning)
    _warn_if_open(settings)
    with _bind(settings.host, settings.port) as listener:
        log.info("event=starting model=%s url=%s", command.engine.model, _url(settings, listener))
        # Imported late: wrong flags are told before PyTorch is loaded.
        from api.app import answer_unknown_paths, create_app
        from engine import Engine
        from engine.setup import freeze_startup_objects
        from ui.app import end_sessions, mount_ui

        engine = Engine(command.engine)
        stopper = _Stopper(engine, settings.drain_seconds)
        try:
            app = create_app(engine, settings)
            mount_ui(app, app.state.service, settings)
            answer_unknown_paths(app)
            log_adapters(engine)
            freeze_startup_objects()
            url = _url(settings, listener)

            def stop() -> None:
                log.info("event=stopping drain_seconds=%g", settings.drain_seconds)
                end_sessions(app)
                stopper.start(server.end)

            server = _make_server(app, settings, on_ready=lambda: log.info("event=ready url=%s", url), on_stop=stop)
            server.run(sockets=[listener])
        finally:
            stopper.finish()
    log.info("event=stopped")
    return 0


class _Server(Protocol):
    """What `_run` needs of the server."""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What a signal does."""

    def end(self) -> None:
        """Stop listening."""


class _Stopper:
    """Closes the engine beside the server, so that answers under way drain or end while sockets are still open."""

    def __init__(self, engine: Engine, drain_seconds: float) -> None:
        self._engine = engine
        self._drain_seconds = drain_seconds
        self._on_closed: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._close, name="stopper")

    def start(self, on_closed: Callable[[], None] = lambda: None) -> None:
        """Begin to close the engine, once; `on_closed` is called when it is closed."""
        if self._thread.ident is None:
            self._on_closed = on_closed
            self._thread.start()

    def _close(self) -> None:
        try:
            self._engine.close(self._drain_seconds)
        finally:
            self._on_closed()

    def finish(self) -> None:
        """Close the engine and wait until it is closed."""
        self.start()
        self._thread.join()


def _make_server(
    app: FastAPI, settings: ServerSettings, *, on_ready: Callable[[], None], on_stop: Callable[[], None]
) -> _Server:
    import uvicorn

    from api.protocol import BoundedProtocol

    class Server(uvicorn.Server):
        """Tells when it is ready. A signal calls `on_stop` and is not raised again, so that the exit code is 0; the server
        goes on to answer, be it that it is stopping, until `end`. A second signal ends it at once."""

        stopping_since: float | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_ready()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.stopping_since is not None:
                self.should_exit = self.force_exit = True
                return
            self.stopping_since = time.monotonic()
            on_stop()

        def end(self) -> None:
            """Stop listening; what is left of the drain, and a little more, is for readers that are slow."""
            left = settings.drain_seconds - (time.monotonic() - (self.stopping_since or -math.inf))
            self.config.timeout_graceful_shutdown = math.ceil(max(0.0, left)) + GRACE_SECONDS
            self.should_exit = True

    return Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            # The browser app streams over plain HTTP; nothing here speaks WebSocket.
            ws="none",
        )
    )


def _bind(host: str, port: int) -> socket.socket:
    """A socket at the address, taken before the model is loaded, so that a port in use is told at once."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # IPv4 first: "localhost" then means what most clients try first.
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise AppError(
            f"cannot listen on {host} port {port} ({reason.lower()}); choose another with --port."
        ) from error
    return listener


def _url(settings: ServerSettings, listener: socket.socket) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{listener.getsockname()[1]}"


def set_up_logging(level: str) -> None:
    """Events on stderr, one line each; other libraries speak from warnings on."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s level=%(levelname)s %(message)s", stream=sys.stderr)
    for name in ("uvicorn", "uvicorn.error", "httpx", "PIL", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def _warn_if_open(settings: ServerSettings) -> None:
    if not settings.is_loopback and not settings.has_credentials:
        log.warning(
            "event=open_server host=%s reason='other machines may reach it, and with --insecure nobody needs a credential'",
            settings.host,
        )


def log_adapters(engine: Engine) -> None:
    """One line for each adapter, then what all of them cost beside the base model."""
    adapters = engine.adapters.list()
    for info in adapters:
        if info.state == "failed":
            log.warning("event=adapter_failed name=%s reason=%r", info.name, info.error)
            continue
        log.info(
            "event=adapter name=%s source=%s rank=%d alpha=%g scale=%g modules=%s num_modules=%d size_mb=%.2f default_for=%s",
            info.name,
            info.source,
            info.rank,
            info.alpha,
            info.scale,
            ",".join(info.target_modules),
            info.num_modules,
            info.num_bytes / MIB,
            ",".join(info.default_for) or "none",
        )
    log.info(
        "event=memory model=%s base_mb=%.2f adapters_mb=%.2f lora_rows_mb=%.2f lora_overhead_mb=%.2f max_loras=%d "
        "max_lora_rank=%d",
        engine.model_names[0],
        engine.base.num_bytes / MIB,
        sum(info.num_bytes for info in adapters) / MIB,
        engine.lora_bytes / MIB,
        (engine.lora_bytes + sum(info.num_bytes for info in adapters)) / MIB,
        engine.config.max_loras,
        engine.config.max_lora_rank,
    )


if __name__ == "__main__":
    sys.exit(main())
