"""The caller's end of a request: an iterator of `Delta`s that works in a coroutine and in a plain thread.

The engine thread puts events in; exactly one consumer takes them out. Closing or abandoning the iterator aborts the
request, so that nobody's blocks are held for a reader who left.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from engine.errors import AppError
from engine.request import Delta, FinishReason, Receipt
from engine.wakes import Wakes

if TYPE_CHECKING:
    from engine.tools.parser import CallParser


class Answer:
    """One answer under way.

    Attributes:
        request_id: as in the log.
        index: which of n answers to the same prompt this is.
        receipt: name, generation, reason and load time from the start; queue time and cached tokens after the first event.
        prompt_token_ids: [P], media placeholders included.
        num_output_tokens: tokens generated so far, the last one included.
        tokenizer: what the answer's tokens belong to; an adapter may bring its own.
        call_parser: reads calls of functions out of this answer's text; None where no tools were given.
        submitted_at, started_at, first_token_at, ended_at: when it was made, first scheduled, got its first token and ended,
            on the monotonic clock in seconds; None while that has not happened.
        error: what it failed with, once it has.
    """

    tokenizer: Any = None
    call_parser: CallParser | None = None

    def __init__(self, request_id: str, receipt: Receipt, prompt_token_ids: list[int], index: int = 0) -> None:
        self.request_id = request_id
        self.index = index
        self.receipt = receipt
        self.prompt_token_ids = prompt_token_ids
        self.num_output_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.error: AppError | None = None
        self._on_end: list[Callable[[Answer], None]] = []
        self._events: deque[Delta | AppError] = deque()
        self._changed = threading.Condition()
        self._waiter: asyncio.Future[None] | None = None
        self._wakes = Wakes()
        self._is_over = False
        self._is_aborted = False
        self._on_abort: Callable[[AppError | None], object] | None = None

    def bind(self, on_abort: Callable[[AppError | None], object], wakes: Wakes) -> None:
        """Set what `abort` and `expire` call, and what wakes the reader; done by the loop at submission."""
        self._on_abort = on_abort
        self._wakes = wakes

    def put(self, event: Delta | AppError) -> None:
        """Deliver an event; called by the engine thread. An error or a finish reason ends the answer."""
        observers: list[Callable[[Answer], None]] = []
        with self._changed:
            now = time.monotonic()
            if isinstance(event, Delta):
                if event.receipt is not None:
                    self.started_at = now
                if event.token_ids and self.first_token_at is None:
                    self.first_token_at = now
                self.num_output_tokens += len(event.token_ids)
                self.receipt = event.receipt or self.receipt
                self.finish_reason = event.finish_reason
            else:
                self.error = event
            if self.error is not None or self.finish_reason is not None:
                self.ended_at = now
                observers, self._on_end = self._on_end, []
            self._events.append(event)
            self._changed.notify()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._wakes.add(waiter, self.abort)
        for observe in observers:
            observe(self)

    def on_end(self, observe: Callable[[Answer], None]) -> None:
        """Call `observe` once when the answer has ended, at once where it has; mostly on the engine thread, so be quick."""
        with self._changed:
            if self.ended_at is None:
                self._on_end.append(observe)
                return
        observe(self)

    @property
    def is_read(self) -> bool:
        """Whether the last event has been taken."""
        return self._is_over

    def expire(self, error: AppError) -> None:
        """End with `error` unless it has ended; what the request holds is free within a step. Thread-safe."""
        if self.ended_at is None and self._on_abort is not None:
            self._on_abort(error)

    def abort(self) -> None:
        """Stop generating; what the request holds is free within a step. Thread-safe, and harmless when it has ended."""
        if not self._is_over and not self._is_aborted and self._on_abort is not None:
            self._is_aborted = True
            self._on_abort(None)

    async def aclose(self) -> None:
        """Abort unless the answer has ended."""
        self.abort()

    def __iter__(self) -> Iterator[Delta]:
        return _Events(self._iterate(), self.abort)

    def _iterate(self) -> Iterator[Delta]:
        try:
            while not self._is_over:
                with self._changed:
                    while not self._events:
                        self._changed.wait()
                    event = self._events.popleft()
                yield self._take(event)
        finally:
            self.abort()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return _AsyncEvents(self)

    def poll(self, waiter: asyncio.Future[None]) -> Delta | None:
        """The next event; where there is none yet, None, and `waiter` is completed when there is.

        Several answers may share a waiter. Raises the error with which the answer ends.
        """
        with self._changed:
            if self._events:
                event = self._events.popleft()
            else:
                self._waiter = waiter
                return None
        return self._take(event)

    def poll_all(self, waiter: asyncio.Future[None]) -> Delta | None:
        """As `poll`, but all tokens that have come make one event: for readers who were slower than the engine."""
        delta = self.poll(waiter)
        if delta is None or delta.receipt is not None or not self._events:
            return delta
        return self._join(delta)

    def _join(self, first: Delta) -> Delta:
        deltas = [first]
        with self._changed:
            while self._events and isinstance(self._events[0], Delta) and self._events[0].receipt is None:
                deltas.append(self._take(self._events.popleft()))
        last = deltas[-1]
        return Delta(
            text="".join([delta.text for delta in deltas]),
            token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
            logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), ()),
        )

    def _take(self, event: Delta | AppError) -> Delta:
        """Pass an event on; marks the end before the consumer sees it, so that leaving then aborts nothing."""
        if isinstance(event, AppError):
            self._is_over = True
            raise event
        self._is_over = event.finish_reason is not None
        return event


class _Events:
    """An iterator that aborts when it is dropped, even before its first event, which a generator would not."""

    def __init__(self, events: Iterator[Delta], abort: Callable[[], None]) -> None:
        self._events = events
        self._abort = abort

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        return next(self._events)

    def close(self) -> None:
        """Abort unless the answer has ended."""
        self._abort()

    def __del__(self) -> None:
        self._abort()


class _AsyncEvents:
    """The same for coroutines."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        answer = self._answer
        while not answer.is_read:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            delta = answer.poll(waiter)
            if delta is not None:
                return delta
            try:
                await waiter
            except BaseException:
                answer.abort()
                raise
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort unless the answer has ended."""
        self._answer.abort()

    def __del__(self) -> None:
        self._answer.abort()
