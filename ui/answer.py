"""One answer from sending to its end: asks the service, keeps the reply's record up to date, says when to draw again.

Knows nothing of Gradio. Every tab that shows an answer runs it through `run_reply`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from api.transcript import TranscriptDelta, TranscriptEvent, TranscriptStart
from engine.answer import Answer
from engine.errors import AppError
from engine.request import Delta
from ui.receipt import Reply
from ui.samples import Samples
from ui.streaming import answer_events, batches
from ui.transcript import Transcript

if TYPE_CHECKING:
    from api.service import Service


async def run_reply(
    service: Service,
    reply: Reply,
    start: Callable[[], Awaitable[Sequence[Answer]]],
    *,
    stop: asyncio.Event,
    samples: Samples,
) -> AsyncGenerator[bool, None]:
    """Fill `reply` until it is final; yields True where it has changed and False where a wait goes on.

    `start` asks the service; an `AppError` of it is the answer's. Setting `stop`, or closing the iterator, frees the
    sequence in the engine. `samples` hears of the first token.
    """
    sent_at = time.monotonic()
    try:
        async with aclosing(batches(answer_events(start), stop)) as lists:
            async for events in lists:
                for at, event in events:
                    _apply(reply, event, at - sent_at)
                yield bool(events) or _note_wait(service, reply, time.monotonic() - sent_at)
        if not reply.is_final:
            reply.phase = "stopped" if stop.is_set() else "done"
        if reply.first_token_s is not None:
            samples.note_first_token(reply.first_token_s)
    except AppError as error:
        reply.phase, reply.error = "failed", error.message
    yield True


async def run_transcript(
    events: AsyncGenerator[TranscriptEvent, None], transcript: Transcript, *, stop: asyncio.Event, samples: Samples
) -> AsyncGenerator[bool, None]:
    """Fill `transcript` from the service's events until it is final; yields and ends as `run_reply` does."""
    reply, begun_at = transcript.reply, time.monotonic()
    try:
        async with aclosing(batches(events, stop)) as lists:
            async for arrived in lists:
                for event in arrived:
                    _enter(transcript, event, time.monotonic() - begun_at)
                yield bool(arrived)
        reply.phase = "stopped" if stop.is_set() and not transcript.is_whole else "done"
        if reply.first_token_s is not None:
            samples.note_first_token(reply.first_token_s)
    except AppError as error:
        reply.phase, reply.error = "failed", error.message
    yield True


def _enter(transcript: Transcript, event: TranscriptEvent, elapsed_s: float) -> None:
    """Enter one event, `elapsed_s` seconds after the start, into the record."""
    reply = transcript.reply
    if isinstance(event, TranscriptStart):
        reply.receipt, reply.phase = event.receipt, "reading"
        transcript.duration_s, transcript.num_segments = event.duration, event.total
        return
    reply.phase = "answering"
    if isinstance(event, TranscriptDelta):
        reply.text += event.text
        transcript.partial += event.text
        if reply.first_token_s is None:
            reply.first_token_s = elapsed_s
        return
    transcript.segments.append(event)
    transcript.partial = ""
    reply.num_answer_tokens += len(event.token_ids)
    reply.num_prompt_tokens += event.num_prompt_tokens
    reply.generation_s = elapsed_s - (reply.first_token_s or 0.0)


def _apply(reply: Reply, event: Answer | Delta, elapsed_s: float) -> None:
    """Enter one event, `elapsed_s` seconds after sending, into the record."""
    if not isinstance(event, Delta):
        reply.receipt, reply.request_id, reply.phase = event.receipt, event.request_id, "queued"
        reply.num_prompt_tokens = len(event.prompt_token_ids)
        return
    if event.receipt is not None:
        reply.receipt, reply.phase = event.receipt, "reading"
    if event.token_ids:
        reply.phase = "answering"
        if reply.first_token_s is None:
            reply.first_token_s = elapsed_s
        reply.num_answer_tokens += len(event.token_ids)
        reply.generation_s = elapsed_s - reply.first_token_s
    reply.text += event.text
    if event.finish_reason is not None:
        reply.finish_reason = event.finish_reason
        reply.phase = "stopped" if event.finish_reason == "abort" else "done"


def _note_wait(service: Service, reply: Reply, elapsed_s: float) -> bool:
    """After a silence: what the answer waits for, as far as that can be told; True where the display must change for it."""
    if reply.receipt is None:
        reply.waited_s = elapsed_s
        reply.phase = "loading" if service.is_on_disk(reply.expected) else "preparing"
        return True
    if reply.phase != "queued":
        return False
    # To a visitor with some adapters, how many others wait is not told.
    num_waiting = service.engine.num_waiting if service.caller.sees_all else 0
    has_changed = num_waiting != reply.num_waiting
    reply.num_waiting = num_waiting
    return has_changed
