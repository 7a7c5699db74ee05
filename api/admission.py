"""Lets prompts into the engine: how many may wait, and how long a request may take.

One for a server, whoever asks. Knows nothing of credentials or routes. Used by `service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from engine.errors import Overloaded, RequestTimeout

if TYPE_CHECKING:
    from api.settings import ServerSettings
    from engine.answer import Answer
    from engine.engine import Engine
    from engine.intake import HeldRoute
    from engine.request import Prompt, SamplingParams

T = TypeVar("T")


class Admission:
    """The way in, with its two bounds: `--max-queued-requests` and `--request-timeout`."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._max_queued = settings.max_queued_requests
        self._timeout_s = settings.request_timeout or None
        self._num_starting = 0  # answers whose prompts are still being prepared; touched on the event loop alone

    @property
    def num_waiting(self) -> int:
        """Answers that have been asked for and have not begun."""
        return self._engine.num_waiting + self._num_starting

    @property
    def is_full(self) -> bool:
        """Whether the next request would be refused."""
        return self.num_waiting >= self._max_queued

    def check_room(self) -> None:
        """Raise `Overloaded` where too many wait already."""
        if self.is_full:
            raise Overloaded(f"{self.num_waiting} requests are waiting already; try again in a moment.")

    async def start(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        model: str | None,
        lora: str | None,
        n: int,
        request_id: str | None,
        held: HeldRoute | None = None,
        deadline: float | None = None,
        is_let_in: bool = False,
    ) -> list[Answer]:
        """Start `n` answers; each ends with `RequestTimeout` where it is not done by the `deadline`.

        Args:
            prompt, sampling, model, lora, n, request_id, held: as `Engine.start` takes them.
            deadline: of the request that these answers are a part of; where it is None they are all of it.
            is_let_in: they belong to a request of which another part was let in; the queue may be full by now.

        Raises:
            Overloaded: too many wait already.
            RequestTimeout: the answers could not even be started in time.
        """
        deadline = self.deadline() if deadline is None else deadline
        if asyncio.get_running_loop().time() >= deadline:
            raise self._too_slow()
        if not is_let_in:
            self.check_room()
        self._num_starting += n  # before anything is awaited: who comes in the same moment finds the place taken
        try:
            # May wait for a source of adapters: a client who leaves meanwhile leaves nothing behind.
            if held is None:
                await self.in_time(self._engine.find_adapters(model, lora), deadline)
        except BaseException:
            self._has_started(n)
            raise
        answers = await self._start(
            self._engine.start(
                prompt,
                sampling,
                model=model,
                lora=lora,
                request_id=request_id,
                n=n,
                held=None if held is None else held.fork(),
            ),
            n,
            deadline,
        )
        if deadline < math.inf:
            loop = asyncio.get_running_loop()
            for answer in answers:
                timer = loop.call_at(deadline, answer.expire, self._too_slow())
                answer.on_end(partial(_cancel, loop, timer.cancel))
        return answers

    def deadline(self) -> float:
        """When a request that comes now must have ended, on the event loop's clock in seconds."""
        return math.inf if self._timeout_s is None else asyncio.get_running_loop().time() + self._timeout_s

    async def in_time(self, work: Awaitable[T], deadline: float) -> T:
        """Await `work`; where it is not done by the deadline, cancel it and raise `RequestTimeout`."""
        left = None if deadline == math.inf else max(0.0, deadline - asyncio.get_running_loop().time())
        try:
            return await asyncio.wait_for(work, left)
        except asyncio.TimeoutError:
            raise self._too_slow() from None

    async def _start(self, work: Coroutine[Any, Any, list[Answer]], n: int, deadline: float) -> list[Answer]:
        """Await what starts `n` answers, until the deadline; who waits no longer leaves none of them behind."""
        starting = asyncio.ensure_future(work)
        starting.add_done_callback(lambda _: self._has_started(n))
        try:
            return await self.in_time(asyncio.shield(starting), deadline)
        except (asyncio.CancelledError, RequestTimeout):
            # Its worker thread cannot be interrupted: let it end, then free what nobody waits for.
            starting.add_done_callback(_abort_unclaimed)
            raise

    def _has_started(self, n: int) -> None:
        self._num_starting -= n

    def _too_slow(self) -> RequestTimeout:
        return RequestTimeout(
            f"The answer took longer than {self._timeout_s:g} seconds; ask for less, or start the server with a larger "
            "--request-timeout."
        )


def _cancel(loop: asyncio.AbstractEventLoop, cancel: Callable[[], None], _answer: Answer) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and its timers with it
        loop.call_soon_threadsafe(cancel)


def _abort_unclaimed(starting: asyncio.Future[list[Answer]]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        for answer in starting.result():
            answer.abort()
