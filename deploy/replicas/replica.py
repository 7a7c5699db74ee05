"""One replica: the same engine, API and web app as `app.py`, called through Ray instead of a socket.

Owns the engine of its process, and turns a `Call` into a request of the ASGI application and its answer into messages.
Deployed by `deploy/ray_serve`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from ray import serve
from ray.serve.handle import DeploymentHandle

from adapters.name_state import NameState
from api.cli import CommandLine
from deploy.replicas.call import LINE_BEAT_SECONDS, Call
from deploy.replicas.exchange import Exchange, Pages
from deploy.replicas.ledger import POLL_SECONDS, Change, News
from deploy.replicas.sharing import LedgerUnreachable, SharedCatalogue, SharedService, router

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
        self._pages = Pages(4 * LINE_BEAT_SECONDS)
        self._hold = serve.multiplexed(_note, max_num_models_per_replica=command.engine.max_cpu_loras)

    async def handle(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """Answer a request: first `replica.id`, then the ASGI messages of the answer, as they come."""
        yield [{"type": "replica.id", "replica": self.replica}]
        if call.adapter is not None:
            await self._hold_adapter(call.adapter)
        exchange = Exchange(self._app, call)
        self._tasks.add(exchange.task)
        exchange.task.add_done_callback(self._tasks.discard)
        status, is_kept = 0, False
        try:
            while messages := await exchange.next_messages():
                status = next((each["status"] for each in messages if "status" in each), status)
                is_kept = bool(call.line) and status == 200 and _is_open(messages)
                if is_kept:
                    # The ingress keeps the page's line open: it is no work, and must hold up no replica that is to end.
                    self._pages.keep(call.line, exchange)
                yield messages
                if is_kept:
                    return
        finally:
            if not is_kept:
                exchange.leave()

    async def keep_page(self, call: Call) -> None:
        """The page whose line `call` opened is still there."""
        self._pages.renew(call.line)

    async def leave_page(self, call: Call) -> None:
        """The browser has closed the page whose line `call` opened."""
        self._pages.leave(call.line)

    async def metrics(self) -> tuple[str, str]:
        """This replica's id, and its metrics in Prometheus' text form."""
        text: bytes = await asyncio.to_thread(self._app.state.service.metrics.render)
        return self.replica, text.decode()

    async def names(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """The base model's names, and modality -> adapter that answers it by itself."""
        return self._engine.model_names, self._engine.default_mm_loras

    async def check_health(self) -> None:
        """Called by Ray Serve every few seconds; a replica whose engine has died is replaced."""
        self._pages.leave_silent()
        if not self._engine.stats().is_running:
            raise RuntimeError("the engine's thread has ended")

    async def __del__(self) -> None:
        """Called by Ray Serve once the answers under way have ended."""
        self._pages.leave_all()
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


def _is_open(messages: Sequence[Message]) -> bool:
    """Whether some of a body has come, and not its end."""
    bodies = [message for message in messages if message["type"] == "http.response.body"]
    return bool(bodies) and bool(bodies[-1].get("more_body"))


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
