"""The way in: reads a request, finds which adapter it names, passes it to a replica, and to another where that one is lost.

An ASGI application behind Ray Serve's proxy. Owns what a client sees of a lost replica; knows nothing of engines. Deployed by
`deploy/ray_serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response

from api.auth import OPEN_PATHS, Policy
from api.body import INLINE_BYTES
from api.errors import envelope, error_response
from api.settings import ServerSettings
from api.stream import frame
from api.tenants import Role
from deploy.replicas.call import LINE_BEAT_SECONDS, LOST_HEADER, PAGE_COOKIE, REPLICA_HEADER, Call, is_page_line
from deploy.replicas.metrics import merge_metrics
from deploy.replicas.peek import FormPeek, ModelNames, json_adapter
from engine.errors import AppError

log = logging.getLogger("switchboard.ingress")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Bodies up to this size travel with the call, larger ones through Ray's object store, in pieces of this size.
PART_BYTES = 1 << 20
# How long a request waits for a replica to begin with it where there is none, or none has room.
START_SECONDS = 60.0
HEALTH_SECONDS = 5.0
NAMES_SECONDS = 5.0
# Only these are answered the same however often they are asked.
_REPEATABLE = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/audio/transcriptions", "/tokenize", "/detokenize"}
)
_API_PATHS = ("/v1", "/health", "/metrics", "/version", "/docs", "/openapi.json", "/tokenize", "/detokenize")
_LOST = (RayActorError, WorkerCrashedError, DeploymentUnavailableError, BackPressureError)


class ReplicaLost(AppError):
    """The replica that was to answer has ended, and the request could not be given to another."""

    status = 503
    error_type = "server_error"
    code = "replica_lost"
    retry_after = 1


class Ingress:
    """Passes requests on.

    Args:
        replicas: a handle on the replicas' deployment.
        settings: the server's, for credentials: a stranger's body is not looked at, though Ray Serve's proxy has received it.
        max_upload_mb: largest body that a replica takes, in MiB.
    """

    def __init__(self, replicas: DeploymentHandle, settings: ServerSettings, max_upload_mb: int) -> None:
        self._replicas = replicas
        self._policy = Policy(settings)
        self._root_path = settings.root_path
        self._max_bytes = max_upload_mb << 20
        self._names = ModelNames()
        self._names_at = float("-inf")

    def __serve_build_asgi_app__(self) -> Callable[[Message, Receive, Send], Awaitable[None]]:
        """Ray Serve's way to ask for the ASGI application."""

        async def application(
            scope: Message, receive: Receive, send: Send
        ) -> None:  # No method: uvicorn wants a function.
            await self._answer(scope, receive, send)

        return application

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        if scope["type"] != "http":
            return
        call = await self._read(scope, receive)
        if call is None:
            return
        if self._path(call) == "/metrics" and scope["method"] == "GET" and self._sees_all(scope):
            await (await self._metrics())(dict(scope), receive, send)
            return
        reply = _Reply(scope, send, page_cookie=call.prefer if self._is_page(call) else "")
        passing = asyncio.ensure_future(self._pass_on(call, reply))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (passing, leaving):
                task.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)

    async def _pass_on(self, call: Call, reply: _Reply) -> None:
        """Have a replica answer, and another where that one is lost before anything of its answer was sent."""
        try:
            await self._pass_tries(call, reply)
            if call.line and reply.is_open:
                await self._keep_page(call, reply)
        finally:
            if call.line and reply.replica:
                self._of_page("leave_page", call, reply)

    async def _pass_tries(self, call: Call, reply: _Reply) -> None:
        path = self._path(call)
        can_repeat = path in _REPEATABLE or call.scope["method"] in ("GET", "HEAD")
        for is_last in (False, True):
            try:
                async for messages in self._messages(call):
                    for message in messages:
                        await reply.take(message)
                await reply.end()
                return
            except _Lost as lost:
                log.warning("event=replica_lost replica=%s path=%s begun=%s", lost.replica, path, reply.has_begun)
                if reply.has_begun:
                    await reply.cut_off()
                    return
                if is_last or not can_repeat:
                    await reply.refuse(_refusal(can_repeat, has_begun=bool(lost.replica)))
                    return
                call = replace(call, avoid=(lost.replica,), prefer=None)
                reply.begin_again(lost.replica)

    async def _messages(self, call: Call) -> AsyncIterator[list[Message]]:
        """The messages of a replica's answer. Raises `_Lost` where the replica ended before the answer did."""
        path = self._path(call)
        handle = self._replicas.options(method_name="handle", stream=True, multiplexed_model_id=call.adapter or "")
        stream = handle.remote(call)
        replica, is_done = "", False
        limit: float | None = HEALTH_SECONDS if path in OPEN_PATHS else START_SECONDS
        try:
            while True:
                try:
                    messages = await asyncio.wait_for(stream.__anext__(), limit)
                except StopAsyncIteration:
                    is_done = True
                    return
                except (*_LOST, asyncio.TimeoutError, TimeoutError) as error:
                    raise _Lost(replica) from error
                if limit is not None:
                    replica, limit = messages[0]["replica"], None
                yield messages
        finally:
            if not is_done:
                stream.cancel()

    async def _keep_page(self, call: Call, reply: _Reply) -> None:
        """Hold a page's line open until the browser closes it; its replica hears that it is."""
        while True:
            await asyncio.sleep(LINE_BEAT_SECONDS)
            await reply.send_more(b"data: ALIVE\n\n")
            self._of_page("keep_page", call, reply)

    def _of_page(self, method: str, call: Call, reply: _Reply) -> None:
        self._replicas.options(method_name=method).remote(replace(call, prefer=reply.replica, parts=[]))

    async def _read(self, scope: Message, receive: Receive) -> Call | None:
        """The request, with its body where its sender may send one; None where the client left before its end."""
        headers = Headers(scope=scope)
        plain = {key: scope[key] for key in _SCOPE_KEYS if key in scope}
        cookies = cookie_parser(headers.get("cookie", ""))
        call = Call(plain)
        if self._is_page(call):
            line = uuid.uuid4().hex if is_page_line(scope["method"], self._path(call)) else ""
            call = replace(call, prefer=cookies.get(PAGE_COOKIE), line=line)
        length = headers.get("content-length", "0")
        is_stranger = self._policy.caller_of(headers.get("authorization")).role is Role.NOBODY
        if is_stranger or (length.isdecimal() and int(length) > self._max_bytes):
            return call  # The replica refuses it by its head.
        content_type = headers.get("content-type", "")
        form = FormPeek(content_type)
        kept, parts, num_read = bytearray(), call.parts, 0
        is_json = "json" in content_type.partition(";")[0]
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            num_read += len(piece)
            kept += piece
            form.feed(piece)
            if len(kept) > PART_BYTES and not is_json:
                parts.append(ray.put(bytes(kept)))
                kept.clear()
            if not message.get("more_body") or num_read > self._max_bytes:
                break
        body, adapter = bytes(kept), None
        if self._path(call) in _REPEATABLE:
            names = await self._model_names()
            if is_json:
                is_small = len(body) <= INLINE_BYTES
                adapter = json_adapter(body, names) if is_small else await asyncio.to_thread(json_adapter, body, names)
            elif form.is_form:
                adapter = form.adapter(names)
        pieces = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)] or [b""]
        parts += pieces if len(pieces) == 1 else [ray.put(piece) for piece in pieces]
        return replace(call, adapter=adapter)

    def _sees_all(self, scope: Message) -> bool:
        caller = self._policy.caller_of(Headers(scope=scope).get("authorization"))
        return caller.role is not Role.NOBODY and caller.sees_all

    async def _metrics(self) -> Response:
        """The metrics of all replicas."""
        try:
            texts = await self._replicas.broadcast("metrics").results_async(
                timeout_s=HEALTH_SECONDS, return_exceptions=True
            )
        except (RayError, *_LOST, asyncio.TimeoutError, TimeoutError):
            return error_response(_refusal(can_repeat=True))
        merged = merge_metrics(text for text in texts if isinstance(text, tuple))
        return Response(merged, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _path(self, call: Call) -> str:
        path: str = call.scope["path"]
        return path.removeprefix(self._root_path)

    def _is_page(self, call: Call) -> bool:
        """Whether a path is the web app's, which must come to the replica that has the page's state."""
        path = self._path(call)
        return not any(path == each or path.startswith(f"{each}/") for each in _API_PATHS)

    async def _model_names(self) -> ModelNames:
        """What names mean, asked of a replica every few seconds; the last answer where none comes."""
        now = asyncio.get_running_loop().time()
        if now - self._names_at > NAMES_SECONDS:
            self._names_at = now
            with contextlib.suppress(RayError, *_LOST, asyncio.TimeoutError, TimeoutError):
                answer = self._replicas.options(method_name="names").remote()
                self._names = ModelNames(*await asyncio.wait_for(answer, HEALTH_SECONDS))
        return self._names


class _Lost(Exception):
    def __init__(self, replica: str) -> None:
        super().__init__(replica)
        self.replica = replica


class _Reply:
    """An answer on its way to the client; its head is held back until there is something behind it."""

    def __init__(self, scope: Message, send: Send, *, page_cookie: str | None) -> None:
        """`page_cookie` is what the client's cookie says, None where it has none, and empty where it needs none."""
        self._scope = scope
        self._send = send
        self._page_cookie = page_cookie
        self._head: Message | None = None
        self._is_events = False
        self._lost: list[str] = []
        self.has_begun = False
        self.has_ended = False
        self.replica = ""

    async def take(self, message: Message) -> None:
        """The next message from a replica."""
        if message["type"] == "replica.id":
            self.replica = message["replica"]
        elif message["type"] == "http.response.start":
            self._head = message
        elif message.get("body") or not message.get("more_body"):
            await self._begin()
            self.has_ended = not message.get("more_body")
            await self._send(message)

    async def _begin(self) -> None:
        if self.has_begun:
            return
        assert self._head is not None, "an answer has a head"
        # Ray Serve's proxy adds an id of its own; two would be read as one.
        headers = [pair for pair in self._head["headers"] if pair[0].lower() != b"x-request-id"]
        self._is_events = (b"content-type", b"text/event-stream") in [(key, value[:17]) for key, value in headers]
        headers.append((REPLICA_HEADER.lower().encode(), self.replica.encode()))
        headers += [(LOST_HEADER.lower().encode(), replica.encode()) for replica in self._lost]
        if self._page_cookie is None or self._page_cookie not in ("", self.replica):
            headers.append((b"set-cookie", f"{PAGE_COOKIE}={self.replica}; Path=/; HttpOnly; SameSite=Lax".encode()))
        self.has_begun = True
        await self._send({**self._head, "headers": headers})

    def begin_again(self, lost: str) -> None:
        """Drop what came from a replica that is lost; nothing of it has been sent."""
        assert not self.has_begun
        self._head, self.replica = None, ""
        self._lost.append(lost or "none")

    @property
    def is_open(self) -> bool:
        """Whether the head is sent and more of the body may come."""
        return self.has_begun and not self.has_ended

    async def send_more(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        """The replica has no more to say; an answer whose body has not ended stays open."""
        if not self.has_begun and self._head is not None:
            await self._begin()

    async def refuse(self, error: AppError) -> None:
        """Answer with an error; nothing has been sent yet."""
        await error_response(error)(dict(self._scope), _no_receive, self._send)

    async def cut_off(self) -> None:
        """End an answer whose replica is lost: with an error event, or, where it is none of events, broken off."""
        if self.has_ended:
            return
        lost = ReplicaLost("The replica that wrote this answer was lost; there is no more of it than this.")
        if not self._is_events:
            raise lost
        await self._send({"type": "http.response.body", "body": frame(envelope(lost)), "more_body": False})


def _refusal(can_repeat: bool, has_begun: bool = True) -> ReplicaLost:
    if can_repeat or not has_begun:
        return ReplicaLost("No replica could answer this; try again in a moment.")
    return ReplicaLost(
        "The replica was lost while it made this change; look at what is there (GET /v1/adapters), then try again."
    )


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _no_receive() -> Message:
    return {"type": "http.disconnect"}


_SCOPE_KEYS = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers", "client",
    "server",
)  # fmt: skip
