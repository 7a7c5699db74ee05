"""A request that a replica's ASGI application answers, and the pages whose lines are open.

Turns a `Call` into what the application receives, and what it sends into messages for the ingress, bounded. Knows nothing of
Ray. Used by `replica`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, MutableMapping
from typing import Any

from deploy.replicas.call import REPLICAS_HEADER, Call
from deploy.replicas.sharing import SETTLED

Message = MutableMapping[str, Any]
# An application that is so far ahead of its reader waits.
MAX_MESSAGES = 16


class Exchange:
    """One request and its answer, run by the application in a task of its own."""

    def __init__(self, app: Callable[..., Coroutine[Any, Any, None]], call: Call) -> None:
        self._parts: list[Any] | None = list(call.parts)
        self._has_left = asyncio.Event()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(MAX_MESSAGES)
        self._is_over = False
        self._settled: list[tuple[int, int]] = []
        self.task = asyncio.ensure_future(self._run(app, dict(call.scope)))

    def leave(self) -> None:
        """The client has left. What it asked for ends by itself; changes of adapters are finished."""
        self._has_left.set()
        while not self._messages.empty():  # Nobody reads on; the application may write on until it hears.
            self._messages.get_nowait()

    async def next_messages(self) -> list[Message]:
        """What the application has sent since, at least one message; empty at the end. Raises what it raised."""
        first = None if self._is_over else await self._messages.get()
        if first is None:
            self._is_over = True
            await self.task
            return []
        messages = [first]
        while not self._messages.empty():
            message = self._messages.get_nowait()
            if message is None:
                self._is_over = True
                break
            messages.append(message)
        return messages

    async def _run(self, app: Callable[..., Coroutine[Any, Any, None]], scope: dict[str, Any]) -> None:
        SETTLED.set(self._settled)
        try:
            await app(scope, self._receive, self._send)
        except asyncio.CancelledError:
            self.leave()
            raise
        finally:
            await self._put(None)

    async def _receive(self) -> Message:
        if self._parts is not None and not self._has_left.is_set():
            part = self._parts.pop(0) if self._parts else b""
            body: bytes = part if isinstance(part, bytes) else await part
            has_more = bool(self._parts)
            if not has_more:
                self._parts = None
            return {"type": "http.request", "body": body, "more_body": has_more}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._settled:
            have, of = self._settled[-1]
            header = (REPLICAS_HEADER.lower().encode(), f"{have}/{of}".encode())
            message = {**message, "headers": [*message.get("headers", []), header]}
        await self._put(message)

    async def _put(self, message: Message | None) -> None:
        """Wait for a reader who is slow; what is for one who has left is dropped."""
        if not self._messages.full():
            self._messages.put_nowait(message)
            return
        putting = asyncio.ensure_future(self._messages.put(message))
        leaving = asyncio.ensure_future(self._has_left.wait())
        await asyncio.wait({putting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        putting.cancel()
        leaving.cancel()


class Pages:
    """Exchanges of pages whose lines the ingresses hold open.

    Args:
        silent_seconds: a page of which nobody has said for so long that it is there is gone, perhaps with its ingress.
        clock: seconds that never go back.
    """

    def __init__(self, silent_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._silent_seconds = silent_seconds
        self._clock = clock
        # id of the line -> its exchange, and when it was last heard of
        self._pages: dict[str, tuple[Exchange, float]] = {}

    def keep(self, line: str, exchange: Exchange) -> None:
        """A page opens."""
        self._pages[line] = exchange, self._clock()

    def renew(self, line: str) -> None:
        """A page is still there."""
        if line in self._pages:
            self._pages[line] = self._pages[line][0], self._clock()

    def leave(self, line: str) -> None:
        """A page is closed; nothing where it is not known."""
        if line in self._pages:
            self._pages.pop(line)[0].leave()

    def leave_silent(self) -> None:
        """Close the pages that nobody has renewed."""
        oldest = self._clock() - self._silent_seconds
        for line in [line for line, (_, heard_at) in self._pages.items() if heard_at < oldest]:
            self.leave(line)

    def leave_all(self) -> None:
        """The replica ends."""
        for line in list(self._pages):
            self.leave(line)
