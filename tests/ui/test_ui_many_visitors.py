"""Thirty-two sessions stream at once over the page's own protocol, and none is sent another's words."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engine.request import Message, SamplingParams
from tests.ui.live import Live

NUM_VISITORS = 32
NUM_TOKENS = 24


def submit_call(config: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """The number of the composer's submit event, and its input components in order."""
    by_id = {component["id"]: component for component in config["components"]}
    composer = next(key for key, each in by_id.items() if each["props"].get("elem_id") == "composer")
    call = next(each for each in config["dependencies"] if [composer, "submit"] in map(list, each["targets"]))
    return call["id"], [by_id[key] for key in call["inputs"]]


def value_of(component: dict[str, Any], question: str) -> Any:
    if component["props"].get("elem_id") == "composer":
        return {"text": question, "files": []}
    return component["props"].get("value")


def visit(url: str, question: str, begun: threading.Barrier) -> str:
    """Send a question as a browser does; the raw stream."""
    with httpx.Client(base_url=url, timeout=120) as http:
        number, inputs = submit_call(http.get("config").json())
        session = f"session-{question}"
        body = {"data": [value_of(each, question) for each in inputs], "fn_index": number, "session_hash": session}
        begun.wait(60)
        http.post("gradio_api/queue/join", json=body).raise_for_status()
        lines = []
        with http.stream("GET", "gradio_api/queue/data", params={"session_hash": session}) as stream:
            for line in stream.iter_lines():
                lines.append(line)
                if not line.startswith("data:"):
                    continue
                message = json.loads(line.removeprefix("data:"))["msg"]
                if message in ("process_completed", "close_stream"):
                    break
        return "\n".join(lines)


def test_thirty_two_visitors_stream_at_once_and_none_sees_anothers_words(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = live.service.start_chat
    arrived: list[str] = []
    all_here = asyncio.Event()

    async def start_bounded(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        # None is answered before all have asked: whoever had to wait for another's stream would never come.
        arrived.append(str(messages[-1].content))
        if len(arrived) == NUM_VISITORS:
            all_here.set()
        await asyncio.wait_for(all_here.wait(), 60)
        bounded = dataclasses.replace(sampling, ignore_eos=True, max_tokens=NUM_TOKENS)
        return await start(messages, bounded, **keywords)

    monkeypatch.setattr(live.service, "start_chat", start_bounded)
    questions = [f"visitor-{index:02}-asks" for index in range(NUM_VISITORS)]
    begun = threading.Barrier(NUM_VISITORS)
    with ThreadPoolExecutor(NUM_VISITORS) as pool:
        results = list(pool.map(lambda question: visit(live.url, question, begun), questions))
    for question, stream in zip(questions, results, strict=True):
        assert [other for other in questions if other in stream] == [question]
        assert f"{NUM_TOKENS} tokens" in stream and '"success":true' in stream.replace(" ", "")
    assert sorted(arrived) == questions
