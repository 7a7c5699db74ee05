"""What stays of pages that were closed, and that no event waits for another's stream or undoes what it drew."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import gradio as gr
import gradio.routes
import pytest
from gradio.state_holder import StateHolder

from tests.ui.live import Live
from tests.ui.visitors import NUM_AT_ONCE, NUM_MARKS, visit_all
from ui.comparison import Comparison
from ui.sessions import forget_closed
from ui.transcript import Transcription


def mounted(live: Live) -> Any:
    """Gradio's part of the server."""
    return next(route.app for route in live.app.routes if isinstance(getattr(route, "app", None), gradio.routes.App))


@pytest.mark.asyncio
async def test_closed_pages_are_forgotten_oldest_first_and_open_ones_never() -> None:
    with gr.Blocks() as blocks:
        gr.State([])
    holder = StateHolder()
    holder.set_blocks(blocks)
    for session in ("open", "one", "two", "three"):
        holder[session].is_closed = session != "open"
    assert forget_closed(holder, max_closed=2) == 1
    assert list(holder.session_data) == ["open", "two", "three"] == list(holder.time_last_used)
    assert forget_closed(holder, max_closed=2) == 0


@pytest.mark.asyncio
async def test_what_is_kept_of_visitors_who_left_is_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, num_kept, num_visitors = mounted(live).state_holder, 2, 10
    forgotten: list[int] = []
    monkeypatch.setattr("ui.app.forget_closed", lambda held: forgotten.append(forget_closed(held, num_kept)))
    marks, seconds = await visit_all(live.url, num_visitors)
    assert [marks[0]["sessions"], marks[-1]["sessions"], len(marks)] == [0, num_visitors, NUM_MARKS + 1]
    assert len(seconds) == num_visitors
    # The one who left last may be noticed only after the others were looked at.
    for _ in range(1200):
        if len(forgotten) >= num_visitors:
            break
        await asyncio.sleep(0.05)
    assert sum(forgotten) >= num_visitors - num_kept - NUM_AT_ONCE and sum(forgotten) > 0
    assert sum(state.is_closed for state in holder.session_data.values()) <= num_kept + NUM_AT_ONCE


def test_no_event_waits_for_anothers_stream(live: Live) -> None:
    blocks = mounted(live).get_blocks()
    events = list(blocks.fns.values())
    streams = [event for event in events if event.types_generator]
    assert len(events) > 40 and len(streams) >= 7
    assert {event.concurrency_limit for event in streams} == {None}
    assert {event.concurrency_limit for event in events if event.queue} <= {None, "default"}
    assert blocks._queue.default_concurrency_limit >= 16 and blocks.max_threads >= 128


@pytest.mark.parametrize("name", ["TranscribeTab", "CompareTab"])
@pytest.mark.asyncio
async def test_what_is_drawn_beside_a_run_cannot_replace_what_the_run_draws(live: Live, name: str) -> None:
    """Answers of two events may arrive in either order."""
    events = [event.fn for event in mounted(live).get_blocks().fns.values()]
    tab: Any = next(fn.__self__ for fn in events if type(getattr(fn, "__self__", None)).__name__ == name)
    visitor: Any = SimpleNamespace(session_hash="a visitor", headers={}, request=None, username=None)
    chosen, record = ("auto", Transcription()) if name == "TranscribeTab" else ([], Comparison())

    async def drawn() -> list[Any]:
        beside = [(await tab.refresh(chosen, record, visitor))[tab.results]]
        return beside if name == "CompareTab" else [*beside, tab.measure("some words", None, record, visitor)]

    assert all(isinstance(each, str) for each in await drawn())
    assert tab._stops.begin("a visitor") is not None
    assert all(each == gr.skip() for each in await drawn())
    tab._stops.end("a visitor")
    assert all(isinstance(each, str) for each in await drawn())
