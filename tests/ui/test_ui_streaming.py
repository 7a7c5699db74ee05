"""Streams end when they should, whoever ends them, and leave nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from engine.answer import Answer
from engine.errors import MediaError
from engine.request import Delta, Receipt
from engine.wakes import Wakes
from ui.streaming import Stops, answer_events, batches

pytestmark = pytest.mark.asyncio


class Source:
    """Numbers, and whether the one who reads them closed the source."""

    def __init__(self, count: int, *, error: Exception | None = None, hangs: bool = False) -> None:
        self.count, self.error, self.hangs = count, error, hangs
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            for number in range(self.count):
                yield number
            if self.hangs:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


def noted_answer(aborted: list[str]) -> Answer:
    answer = Answer("request-1", Receipt(None, None, "base"), [1, 2, 3])
    answer.bind(lambda _: aborted.append(answer.request_id), Wakes())
    return answer


async def test_every_event_arrives_once_and_in_order() -> None:
    source = Source(1000)
    seen = [number async for batch in batches(aiter(source), asyncio.Event(), pause_s=0) for number in batch]
    assert seen == list(range(1000)) and source.is_closed


async def test_an_error_comes_after_the_events_before_it() -> None:
    lists = batches(aiter(Source(3, error=MediaError("no"))), asyncio.Event(), pause_s=0)
    assert await anext(lists) == [0, 1, 2]
    with pytest.raises(MediaError):
        await anext(lists)


async def test_silence_is_a_beat_and_stop_ends_it() -> None:
    source, stop = Source(1, hangs=True), asyncio.Event()
    beats = 0
    async for batch in batches(aiter(source), stop, beat_s=0.01, pause_s=0):
        beats += not batch
        if beats == 3:
            stop.set()
    assert beats == 3 and source.is_closed


async def test_an_answer_that_was_read_to_its_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    answer = noted_answer([])

    async def start() -> list[Answer]:
        return [answer]

    answer.put(Delta(receipt=Receipt("pirate", "sha256:1", "explicit")))
    answer.put(Delta(text="arr", token_ids=(7,), finish_reason="stop"))
    with caplog.at_level("INFO", "switchboard.api"):
        assert len([event async for event in answer_events(start)]) == 3
    [line] = [record.getMessage() for record in caplog.records if "event=answered" in record.getMessage()]
    assert "route=web_app request=request-1 adapter=pirate reason=explicit prompt_tokens=3" in line
    assert "output_tokens=1" in line


async def test_leaving_early_closes_the_source() -> None:
    source = Source(1, hangs=True)
    async with aclosing(batches(aiter(source), asyncio.Event(), beat_s=0.01, pause_s=0)) as lists:
        assert await anext(lists) == [0]
        assert not source.is_closed
    assert source.is_closed


async def test_an_answer_that_is_left_is_aborted_and_one_that_ended_is_not() -> None:
    for ends in (False, True):
        aborted: list[str] = []
        answer = noted_answer(aborted)
        answer.put(Delta(text="a"))
        if ends:
            answer.put(Delta(finish_reason="stop"))

        async def start(answer: Answer = answer) -> list[Answer]:
            return [answer]

        async with aclosing(answer_events(start)) as events:
            assert (await anext(events))[1] is answer
            async for _, event in events:
                if not ends or (isinstance(event, Delta) and event.finish_reason):
                    break
        assert aborted == ([] if ends else ["request-1"])


async def test_an_answer_that_is_accepted_after_its_reader_left_is_aborted() -> None:
    aborted: list[str] = []
    may_start = asyncio.Event()

    async def start() -> list[Answer]:
        await may_start.wait()
        return [noted_answer(aborted)]

    stop = asyncio.Event()
    stop.set()
    assert [batch async for batch in batches(answer_events(start), stop)] == []
    assert aborted == []
    may_start.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert aborted == ["request-1"]


async def test_a_session_has_one_answer_at_a_time() -> None:
    stops = Stops()
    flag = stops.begin("tab")
    assert flag is not None and stops.begin("tab") is None and stops.begin("other tab") is not None
    stops.request("tab")
    stops.request("nobody")
    assert flag.is_set()
    stops.end("tab")
    again = stops.begin("tab")
    assert again is not None and not again.is_set()
