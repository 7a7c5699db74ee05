"""From a recording to what is said in it, segment by segment: the one path for the HTTP route and the browser app.

Owns how many pieces of a recording run at once, the order of events, and that all pieces are answered by one version of
one adapter. Knows nothing of HTTP and of formats. Called by `api/service`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import AppError, Overloaded
from engine.recording import Joint
from engine.request import Delta, Receipt

if TYPE_CHECKING:
    from engine.answer import Answer
    from engine.recording import Recording

_RETRY_SECONDS = 0.1  # a recording under way waits for room in the queue


@dataclass(frozen=True)
class TranscriptStart:
    """First event: how much there is to hear, and who answers.

    Attributes:
        receipt: of the first piece, and of all others but for times and cached tokens.
        duration: of the recording, in seconds.
        total: how many segments there will be; 0 where all is silent.
    """

    receipt: Receipt
    duration: float
    total: int


@dataclass(frozen=True)
class TranscriptDelta:
    """More text of segment `index`; the deltas of a transcript add up to its text."""

    index: int
    text: str


@dataclass(frozen=True)
class TranscriptSegment:
    """A segment is whole; `index + 1` of `total` are.

    Attributes:
        start: when its sound begins, in seconds from the recording's start.
        end: when its sound ends, in seconds.
        text: what is said, as the model wrote it.
        token_ids: the answer's tokens.
        avg_logprob: mean log probability (natural) of the tokens; None where none were asked for.
        quiet_share: share of the time between start and end in which nothing sounds.
        num_prompt_tokens: prompt tokens of the piece.
    """

    index: int
    total: int
    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    avg_logprob: float | None
    quiet_share: float
    num_prompt_tokens: int


TranscriptEvent = TranscriptStart | TranscriptDelta | TranscriptSegment
StartPiece = Callable[[int], Awaitable["Answer"]]


class _Piece:
    """One piece's answer, read by a worker, taken by the consumer when its turn comes."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Delta | AppError | Exception] = asyncio.Queue()
        self.num_prompt_tokens = 0

    async def run(self, start: Callable[[], Awaitable[Answer]]) -> None:
        """Start the answer and pass on its events; whatever fails is an event too."""
        try:
            answer = await start()
            self.num_prompt_tokens = len(answer.prompt_token_ids)
            async with aclosing(answer):
                async for delta in answer:
                    self.events.put_nowait(delta)
        except Exception as error:  # noqa: BLE001 - raised again by `deltas`, where the recording's caller waits
            self.events.put_nowait(error)

    async def deltas(self) -> AsyncIterator[Delta]:
        """The events up to the last; raises what `run` met."""
        while True:
            event = await self.events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if event.finish_reason is not None:
                return


async def transcribe_recording(
    recording: Recording, receipt: Receipt, start_piece: StartPiece, *, num_at_once: int
) -> AsyncGenerator[TranscriptEvent, None]:
    """Events of a recording in order, while later pieces run already, `num_at_once` at a time.

    Whatever ends this generator, every piece has then ended or been aborted. `receipt` is what a silent recording shows.

    Raises:
        AppError: the first fault of a piece, in the recording's order.
    """
    pieces = [_Piece() for _ in recording.pieces]
    indices = iter(range(len(pieces)))

    async def work() -> None:
        for index in indices:
            await pieces[index].run(lambda index=index: _start_when_there_is_room(start_piece, index))  # type: ignore[misc]

    workers = [asyncio.ensure_future(work()) for _ in range(min(num_at_once, len(pieces)))]
    try:
        if not pieces:
            yield TranscriptStart(receipt, recording.seconds, 0)
        joint = Joint()
        for index, piece in enumerate(pieces):
            async with aclosing(_segment_events(recording, index, piece, joint)) as events:
                async for event in events:
                    yield event
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _start_when_there_is_room(start_piece: StartPiece, index: int) -> Answer:
    """A full queue refuses a recording at its start alone."""
    while True:
        try:
            return await start_piece(index)
        except Overloaded:
            if index == 0:
                raise
            await asyncio.sleep(_RETRY_SECONDS)


async def _segment_events(
    recording: Recording, index: int, piece: _Piece, joint: Joint
) -> AsyncGenerator[TranscriptEvent, None]:
    total = len(recording.pieces)
    texts: list[str] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    async for delta in piece.deltas():
        if index == 0 and delta.receipt is not None:
            yield TranscriptStart(delta.receipt, recording.seconds, total)
        token_ids += delta.token_ids
        logprobs += [token.logprob for token in delta.logprobs]
        if delta.text:
            yield TranscriptDelta(index, joint.before(index, delta.text) + delta.text)
            texts.append(delta.text)
    span = recording.pieces[index]
    start, end = recording.times(span)
    yield TranscriptSegment(
        index=index,
        total=total,
        start=start,
        end=end,
        text="".join(texts),
        token_ids=tuple(token_ids),
        avg_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        quiet_share=span.quiet_share,
        num_prompt_tokens=piece.num_prompt_tokens,
    )
