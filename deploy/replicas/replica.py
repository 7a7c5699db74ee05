"""One replica: the same engine, API and web app as `app.py`, called through Ray instead of a socket.

Owns the engine of its process, and turns a `Call` into a request of the ASGI application and its answer into messages.
Deployed by `deploy/ray_serve`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from ray import serve
from ray.serve.handle import DeploymentHandle

from adapters.name_state import NameState
from api.cli import CommandLine
from deploy.replicas.call import HEARTBEAT, REPLICAS_HEADER, Call
from deploy.replicas.ledger import POLL_SECONDS, Change, News
from deploy.replicas.sharing import SETTLED, LedgerUnreachable, SharedCatalogue, SharedService, router

log = logging.getLogger("switchboard.replicas")

T = TypeVar("T")
Message = MutableMapping[str, Any]
# Beyond what the ledger itself waits.
LEDGER_SECONDS = 15.0
# How long a request for an unknown name waits for what other replicas have changed.
NEWS_SECONDS = 1.0


class Replica:
    """An engine and its application.

    Args:
        command: `app.py`'s settings.
        ledger: a handle on the ledger's deployment.
    """

    async def __init__(self, command: CommandLine, ledger: DeploymentHandle) -> None:  # type: ignore[misc] # Ray Serve's
        from api.app import answer_unknown_paths, create_app
        from app import log_adapters, set_up_logging
        from engine import Engine
        from engine.setup import freeze_startup_objects
        from ui.app import mount_ui

        set_up_logging(command.server.log_level)
        self.replica: str = serve.get_replica_context().replica_id.unique_id
        self._engine = await asyncio.to_thread(Engine, command.engine)
        self._drain_seconds = command.server.drain_seconds
        self._catalogue = SharedCatalogue(RayLedger(ledger), self._engine.adapters, self.replica)
        # Before the first request, so that a replica never serves less than the others.
        await self._catalogue.join()
        service = SharedService(self._engine, command.server, self._catalogue)
        self._app = create_app(self._engine, command.server, service=service, routers=[router])
        mount_ui(self._app, service, command.server)
        answer_unknown_paths(self._app)
        log_adapters(self._engine)
        freeze_startup_objects()
        self._stack = AsyncExitStack()
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        self._tasks = {asyncio.ensure_future(self._catalogue.follow())}
        self._pages: dict[str, _Exchange] = {}
        self._hold = serve.multiplexed(_note, max_num_models_per_replica=command.engine.max_cpu_loras)

    async def handle(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """Answer a request: first `replica.id`, then the ASGI messages of the answer, as they come."""
        yield [{"type": "replica.id", "replica": self.replica}]
        if call.adapter is not None:
            await self._hold_adapter(call.adapter)
        exchange = _Exchange(self._app, call)
        self._tasks.add(exchange.task)
        exchange.task.add_done_callback(self._tasks.discard)
        if HEARTBEAT in call.scope["path"]:
            # The ingress keeps the page's line open: it is no work, and must hold up no replica that is to end.
            self._pages[call.scope["path"]] = exchange
            while messages := await exchange.next_messages():
                yield messages
                if any(message["type"] == "http.response.body" for message in messages):
                    return
            return
        try:
            while messages := await exchange.next_messages():
                yield messages
        finally:
            exchange.leave()

    async def leave_page(self, call: Call) -> None:
        """The browser has closed the page whose heartbeat `call` was."""
        exchange = self._pages.pop(call.scope["path"], None)
        if exchange is not None:
            exchange.leave()

    async def metrics(self) -> tuple[str, str]:
        """This replica's id, and its metrics in Prometheus' text form."""
        text: bytes = await asyncio.to_thread(self._app.state.service.metrics.render)
        return self.replica, text.decode()

    async def names(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """The base model's names, and modality -> adapter that answers it by itself."""
        return self._engine.model_names, self._engine.default_mm_loras

    async def check_health(self) -> None:
        """Called by Ray Serve; a replica whose engine has died is replaced."""
        if not self._engine.stats().is_running:
            raise RuntimeError("the engine's thread has ended")

    async def __del__(self) -> None:
        """Called by Ray Serve once the answers under way have ended."""
        for exchange in self._pages.values():
            exchange.leave()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._catalogue.leave()
        await self._stack.aclose()
        await asyncio.to_thread(self._engine.close, self._drain_seconds)

    async def _hold_adapter(self, name: str) -> None:
        """Tell the routers that this replica holds an adapter, if there is one of that name."""
        if not self._engine.adapters.contains(name):
            # Just loaded by another replica, perhaps; never a 404 for that.
            await self._catalogue.catch_up_soon(NEWS_SECONDS)
        if self._engine.adapters.contains(name):
            await self._hold(name)


async def _note(model_id: str) -> str:
    """Ray Serve's view of an adapter in memory. The engine loads by itself, several adapters at a time, and evicts by the
    same rule; waiting for it here would make loads wait for each other."""
    return model_id


class _Exchange:
    """One request and its answer, run by the application in a task of its own."""

    def __init__(self, app: Callable[..., Coroutine[Any, Any, None]], call: Call) -> None:
        self._parts = list(call.parts)
        self._has_left = asyncio.Event()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._settled: list[tuple[int, int]] = []
        self.task = asyncio.ensure_future(self._run(app, dict(call.scope)))

    def leave(self) -> None:
        """The client has left. What it asked for ends by itself; changes of adapters are finished."""
        self._has_left.set()

    async def next_messages(self) -> list[Message]:
        """What the application has sent since, at least one message; empty at the end. Raises what it raised."""
        first = await self._messages.get()
        if first is None:
            await self.task
            return []
        messages = [first]
        while not self._messages.empty():
            message = self._messages.get_nowait()
            if message is None:
                self._messages.put_nowait(None)
                break
            messages.append(message)
        return messages

    async def _run(self, app: Callable[..., Coroutine[Any, Any, None]], scope: dict[str, Any]) -> None:
        SETTLED.set(self._settled)
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._messages.put_nowait(None)

    async def _receive(self) -> Message:
        if self._parts is not None and not self._has_left.is_set():
            part = self._parts.pop(0) if self._parts else b""
            body: bytes = part if isinstance(part, bytes) else await part
            has_more = bool(self._parts)
            if not has_more:
                self._parts = None  # type: ignore[assignment]
            return {"type": "http.request", "body": body, "more_body": has_more}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._settled:
            have, of = self._settled[-1]
            header = (REPLICAS_HEADER.lower().encode(), f"{have}/{of}".encode())
            message = {**message, "headers": [*message.get("headers", []), header]}
        self._messages.put_nowait(message)


class RayLedger:
    """The ledger behind a handle of Ray Serve: a `LedgerDoor`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def sync(
        self,
        replica: str,
        epoch: str,
        seen: int,
        failed: Mapping[str, tuple[int, str]],
        known: Sequence[Change] = (),
        wait_s: float = POLL_SECONDS,
    ) -> News:
        news: News = await self._call(wait_s, "sync", replica, epoch, seen, dict(failed), list(known), wait_s)
        return news

    async def leave(self, replica: str) -> None:
        await self._call(0.0, "leave", replica)

    async def take_turn(self, name: str, replica: str, wait_s: float) -> bool:
        return bool(await self._call(wait_s, "take_turn", name, replica, wait_s))

    async def end_turn(self, name: str, replica: str, epoch: str, state: NameState | None, base: int) -> Change | None:
        latest: Change | None = await self._call(0.0, "end_turn", name, replica, epoch, state, base)
        return latest

    async def settled(self, seq: int, wait_s: float) -> tuple[int, int]:
        have, of = await self._call(wait_s, "settled", seq, wait_s)
        return have, of

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._call(0.0, "status")
        return status

    async def _call(self, wait_s: float, method: str, *args: Any) -> Any:
        try:
            return await asyncio.wait_for(getattr(self._handle, method).remote(*args), wait_s + LEDGER_SECONDS)
        except Exception as error:
            log.warning("event=ledger_call_failed call=%s kind=%s", method, type(error).__name__)
            raise LedgerUnreachable(
                "The process that orders changes of adapters does not answer; try again."
            ) from error
