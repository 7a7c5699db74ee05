"""From the engine's events to HTTP: several answers merged into one stream, collected for clients that do not stream.

Owns the order of events, server-sent-event framing, usage, and what happens when the client leaves: its answers are
aborted. Knows nothing of any route's JSON. Called by `chat`, `completions` and `transcriptions`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import orjson
from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import envelope, unexpected
from engine.answer import Answer
from engine.errors import AppError
from engine.request import Delta, FinishReason, Receipt, TokenLogprob

log = logging.getLogger("switchboard.api")

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Event:
    """One event of one of a request's answers; `choice` is the answer's place among them."""

    choice: int
    delta: Delta


@dataclass
class Collected:
    """A finished answer: what its events add up to."""

    receipt: Receipt
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Collection[TokenLogprob | None] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """Take the next event in."""
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs  # one event has them all
        self.receipt = delta.receipt or self.receipt
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.stop_reason is not None else self.stop_reason


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: each prompt counts once, however many answers it got."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, answers: Sequence[Answer], num_choices: int) -> Usage:
        """Usage of answers in order, `num_choices` for each prompt."""
        prompts = [answers[start : start + num_choices] for start in range(0, len(answers), num_choices)]
        return cls(
            prompt_tokens=sum(len(group[0].prompt_token_ids) for group in prompts),
            completion_tokens=sum(answer.num_output_tokens for answer in answers),
            cached_tokens=sum(group[0].receipt.cached_tokens for group in prompts),
        )

    def to_dict(self) -> dict[str, Any]:
        """The `usage` object of completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


async def whole_answer(
    build: Callable[[], Mapping[str, Any]], headers: Mapping[str, str], *, is_long: bool
) -> Response:
    """The JSON object that `build` makes, as a response.

    What `is_long` is made on another thread, since every stream waits for the event loop.
    """

    def render() -> bytes:
        return orjson.dumps(build())

    body = await asyncio.to_thread(render) if is_long else render()
    return Response(body, headers=dict(headers), media_type="application/json")


def rendered(part: Mapping[str, Any]) -> orjson.Fragment:
    """A part of an answer as JSON already: a fraction of its objects' memory, and done where it is made."""
    return orjson.Fragment(orjson.dumps(part))


async def merge(answers: Sequence[Answer]) -> AsyncGenerator[Event, None]:
    """The events of all answers as they come; the first answer that fails ends the rest. Tokens that came while the
    reader was busy are one event, so that a slow reader costs less and nobody waits for company.

    Whatever ends this generator, every answer has then ended or been aborted.
    """
    loop = asyncio.get_running_loop()
    open_choices = list(range(len(answers)))
    try:
        while open_choices:
            waiter: asyncio.Future[None] = loop.create_future()
            has_come = False
            for choice in list(open_choices):
                delta = answers[choice].poll_all(waiter)
                if delta is None:
                    continue
                has_come = True
                if delta.finish_reason is not None:
                    open_choices.remove(choice)
                yield Event(choice, delta)
            if not has_come:
                await waiter
    finally:
        abort_all(answers)


def abort_all(answers: Sequence[Answer]) -> None:
    """Free what the answers hold; those that have ended are not touched."""
    for answer in answers:
        answer.abort()


async def collect(answers: Sequence[Answer]) -> list[Collected]:
    """Read every answer to its end; raises the `AppError` of the first that fails."""
    collected = [Collected(answer.receipt) for answer in answers]
    async with aclosing(merge(answers)) as events:
        async for event in events:
            collected[event.choice].add(event.delta)
    return collected


class ClientLeft(Exception):
    """The client closed the connection before its answer was ready."""


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it and raise `ClientLeft` as soon as the client closes the connection."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_DIRECT_SEND = "switchboard.direct_send"


class DirectSend:
    """Middleware that events pass by: what the framework wraps `send` in between here and a route sees no more than the
    start of an answer, and costs as much for each token as making its event."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_DIRECT_SEND] = send
        await self._app(scope, receive, send)


class EventStream(Response):
    """Server-sent events made from JSON objects; a fault becomes an error event, a client that leaves an abort."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[Mapping[str, Any], None], answers: Sequence[Answer], headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_all(send, scope.get(_DIRECT_SEND, send)))
        watcher = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            abort_all(self._answers)
            for each in (sender, watcher):
                each.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)

    async def _send_all(self, send: Send, send_event: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:
            is_last = False
            while not is_last:
                body, is_last = await _next_frame(chunks)
                await send_event({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _next_frame(chunks: AsyncGenerator[Mapping[str, Any], None]) -> tuple[bytes, bool]:
    """The next event, and whether it is the last: the mark of the end, or what went wrong."""
    try:
        return frame(await anext(chunks)), False
    except StopAsyncIteration:
        return DONE, True
    except AppError as error:
        return frame(envelope(error)), True
    except Exception as error:  # noqa: BLE001 - the status is sent already, so the fault goes into the stream
        return frame(envelope(unexpected(error, "stream"))), True


def frame(chunk: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def answer_headers(request_id: str, receipt: Receipt) -> dict[str, str]:
    """The headers of every completion.

    `X-LoRA-Name` is the adapter's name, or `none` for the base model. Headers are ASCII: other letters, and `%`, are
    percent-encoded as UTF-8 (RFC 3986), which `urllib.parse.unquote` undoes.
    """
    return {
        "X-Request-Id": request_id,
        "X-LoRA-Name": ascii_header(receipt.name or "none"),
        "X-LoRA-Reason": ascii_header(receipt.reason),
    }


def ascii_header(text: str) -> str:
    """`text` with everything but printable ASCII, and `%` itself, percent-encoded."""
    return quote(text, safe=_PRINTABLE).strip() or "%20" * len(text)


_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def log_answers(answers: Sequence[Answer], route: str, usage: Usage) -> None:
    """One line for a request that was answered."""
    first = answers[0]
    log.info(
        "event=answered route=%s request=%s adapter=%s reason=%s prompt_tokens=%d cached_tokens=%d output_tokens=%d",
        route,
        first.request_id,
        first.receipt.name or "none",
        first.receipt.reason,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
    )
