"""How events of the engine reach a browser: batches at a rate a page can draw, an end at Stop, and nothing left running.

Owns the stop flags of sessions and two async generators. Knows nothing of chat or of Gradio's components. The tabs that
stream answers call it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from api.stream import Usage, log_answers
from engine.answer import Answer
from engine.request import Delta

T = TypeVar("T")

BEAT_S = 0.5
# Gradio copies the state of every component in the browser at each update: more often, and a phone falls behind.
PAUSE_S = 0.1


class Stops:
    """One stop flag for each session that has an answer running."""

    def __init__(self) -> None:
        self._flags: dict[str, asyncio.Event] = {}

    def begin(self, session: str) -> asyncio.Event | None:
        """The flag of a new answer; None while the session already has one running."""
        if session in self._flags:
            return None
        return self._flags.setdefault(session, asyncio.Event())

    def request(self, session: str) -> None:
        """Ask the session's answer to end; nothing happens where none is running."""
        if session in self._flags:
            self._flags[session].set()

    def end(self, session: str) -> None:
        """The session's answer is over."""
        self._flags.pop(session, None)

    def is_busy(self, session: str) -> bool:
        """Whether the session has an answer running."""
        return session in self._flags


async def answer_events(
    start: Callable[[], Awaitable[Sequence[Answer]]],
) -> AsyncGenerator[tuple[float, Answer | Delta], None]:
    """The answer itself once the engine has accepted it, then its deltas, each with its time (`time.monotonic`, seconds).

    Closing the iterator aborts the answer, also one that the engine is still about to accept.
    """
    starting = asyncio.ensure_future(start())
    try:
        answer = (await asyncio.shield(starting))[0]
    except asyncio.CancelledError:
        starting.add_done_callback(_abort_all)
        raise
    try:
        yield time.monotonic(), answer
        async for delta in answer:
            yield time.monotonic(), delta
        log_answers([answer], "web_app", Usage.of([answer], 1))
    finally:
        answer.abort()


def _abort_all(starting: asyncio.Future[Sequence[Answer]]) -> None:
    """Abort answers that were accepted after nobody wanted them any more."""
    if not starting.cancelled() and starting.exception() is None:
        for answer in starting.result():
            answer.abort()


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What several iterators yield, as it comes, with the place of each; the first fault of one ends all."""
    arrived: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def pump(place: int, source: AsyncGenerator[T, None]) -> None:
        async with aclosing(source):
            async for item in source:
                arrived.put_nowait((place, item))

    pumps = [asyncio.ensure_future(pump(place, source)) for place, source in enumerate(sources)]
    ending = asyncio.gather(*pumps)
    ending.add_done_callback(lambda _: arrived.put_nowait(None))
    try:
        while (item := await arrived.get()) is not None:
            yield item
        await ending
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(ending, *pumps, return_exceptions=True)


async def batches(
    events: AsyncIterator[T], stop: asyncio.Event, *, beat_s: float = BEAT_S, pause_s: float = PAUSE_S
) -> AsyncGenerator[list[T], None]:
    """Events in lists, at most one list per `pause_s`; an empty list after `beat_s` of silence.

    Ends when `events` ends (raising what it raised) or when `stop` is set; either way `events` is closed. The empty lists
    matter: a closed tab is noticed only where a generator yields.
    """
    arrived: asyncio.Queue[T | None] = asyncio.Queue()

    async def pump() -> None:
        try:
            async for event in events:
                arrived.put_nowait(event)
        finally:
            arrived.put_nowait(None)

    pumping = asyncio.ensure_future(pump())
    stopping = asyncio.ensure_future(stop.wait())
    getting = asyncio.ensure_future(arrived.get())
    try:
        while True:
            await asyncio.wait({getting, stopping}, timeout=beat_s, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return
            if not getting.done():
                yield []
                continue
            batch = [getting.result()]
            while not arrived.empty():
                batch.append(arrived.get_nowait())
            if wanted := [event for event in batch if event is not None]:
                yield wanted
            if None in batch:
                await pumping
                return
            getting = asyncio.ensure_future(arrived.get())
            await asyncio.sleep(pause_s)
    finally:
        for task in (getting, stopping, pumping):
            task.cancel()
        await asyncio.gather(getting, stopping, pumping, return_exceptions=True)
