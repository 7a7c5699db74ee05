"""Visitors who come, ask and leave, one after another: memory stays flat, and nothing of them stays behind.

    python -m tests.ui.visitors --sessions 200

Runs the embedded model in a process of its own. Each visitor does over HTTP what the page does in a browser: loads it, keeps
its heartbeat open, sends a message, reads the stream to its end, draws what follows, and closes the tab. Prints the server's
resident memory at marks as one JSON object; exit code 1 where it grew by more than the bound, or an answer was not its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from typing import Any

import httpx

from benchmarks.server import running_server

WORDS = ("--kv-cache-memory-mb", "64", "--max-model-len", "384", "--max-num-seqs", "8", "--packed-weights-mb", "0")
NUM_AT_ONCE = 8
NUM_MARKS = 10
# From the middle to the end, for each session that came and went: more than an allocator's noise, less than what a page holds.
MAX_KIB_A_SESSION = 32.0


class Page:
    """The page's events by the components that they belong to, as its configuration lists them."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._by_id = {component["id"]: component for component in config["components"]}
        self._calls = config["dependencies"]
        self._prefix = config["api_prefix"].strip("/")
        composer = self._find("composer")
        self.submit = next(call for call in self._calls if [composer, "submit"] in map(list, call["targets"]))
        self.settle = next(call for call in self._calls if call.get("trigger_after") == self.submit["id"])
        self.loads = [call for call in self._calls if any(target[1] == "load" for target in call["targets"])]

    def _find(self, elem_id: str) -> int:
        return next(key for key, each in self._by_id.items() if each["props"].get("elem_id") == elem_id)

    def body(self, call: dict[str, Any], session: str, message: str = "") -> dict[str, Any]:
        """What the browser sends for an event; the composer holds `message`."""
        composer = self._find("composer")
        data = [
            {"text": message, "files": []} if key == composer else self._by_id[key]["props"].get("value")
            for key in call["inputs"]
        ]
        return {"data": data, "fn_index": call["id"], "session_hash": session, "trigger_id": composer}

    def path(self, name: str) -> str:
        """A route of Gradio's."""
        return f"{self._prefix}/{name}"


async def visit(http: httpx.AsyncClient, page: Page) -> float:
    """One visitor, from the first load to the closed tab; seconds from Send to the whole answer.

    Raises `AssertionError` where the answer did not come whole, or with the words of another.
    """
    session = uuid.uuid4().hex[:11]
    async with AsyncExitStack() as tab:
        (await http.get("")).raise_for_status()
        heartbeat = await tab.enter_async_context(http.stream("GET", page.path(f"heartbeat/{session}")))
        assert heartbeat.status_code == 200
        for call in page.loads:
            (await http.post(page.path("run/predict"), json=page.body(call, session))).raise_for_status()
        body = page.body(page.submit, session, f"Tell me about the sea, {session}")
        sent_at = time.monotonic()
        (await http.post(page.path("queue/join"), json=body)).raise_for_status()
        whole = await _read_answer(http, page, session)
        seconds = time.monotonic() - sent_at
        assert set(re.findall("about the sea, ([0-9a-f]{11})", whole)) == {session}, whole[-500:]
        assert '"success":true' in whole.replace(" ", ""), whole[-500:]
        (await http.post(page.path("run/predict"), json=page.body(page.settle, session))).raise_for_status()
    return seconds


async def _read_answer(http: httpx.AsyncClient, page: Page, session: str) -> str:
    lines = []
    async with http.stream("GET", page.path("queue/data"), params={"session_hash": session}) as stream:
        async for line in stream.aiter_lines():
            lines.append(line)
            if line.startswith("data:") and json.loads(line.removeprefix("data:"))["msg"] == "close_stream":
                break
    return "\n".join(lines)


async def resident_mib(http: httpx.AsyncClient) -> float:
    """The server's resident memory."""
    found = re.search(r"^process_resident_memory_bytes (\S+)$", (await http.get("metrics")).text, re.MULTILINE)
    assert found is not None
    return float(found[1]) / 2**20


async def visit_all(
    url: str, num_sessions: int, num_at_once: int = NUM_AT_ONCE
) -> tuple[list[dict[str, float]], list[float]]:
    """All visitors, a few at a time: memory before the first and after each tenth of them; seconds of the answers."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        page = Page((await http.get("config")).json())
        marks = [{"sessions": 0, "rss_mib": round(await resident_mib(http), 1)}]
        seconds: list[float] = []
        for mark in range(1, NUM_MARKS + 1):
            until = num_sessions * mark // NUM_MARKS
            while len(seconds) < until:
                # Where more come at once than are left until the mark, it is passed.
                wave = min(num_at_once, num_sessions - len(seconds))
                seconds += await asyncio.gather(*(visit(http, page) for _ in range(wave)))
            marks.append({"sessions": len(seconds), "rss_mib": round(await resident_mib(http), 1)})
        return marks, seconds


def growth_kib(marks: list[dict[str, float]]) -> float:
    """KiB of memory for each session of the second half."""
    middle, end = marks[len(marks) // 2], marks[-1]
    return (end["rss_mib"] - middle["rss_mib"]) * 1024 / max(1.0, end["sessions"] - middle["sessions"])


def run(num_sessions: int, num_at_once: int) -> dict[str, Any]:
    """Serve, visit, and say how memory went."""
    with tempfile.TemporaryDirectory() as place, running_server([*WORDS, "--adapter-dir", place]) as server:
        marks, seconds = asyncio.run(visit_all(f"{server.url}/", num_sessions, num_at_once))
    growth = growth_kib(marks)
    answer_s = {"p50": round(statistics.median(seconds), 2), "max": round(max(seconds), 2)}
    return {
        "sessions": num_sessions, "at_once": num_at_once, "answer_s": answer_s, "marks": marks, "kib_a_session": round(growth, 1),
        "bound_kib_a_session": MAX_KIB_A_SESSION, "is_flat": growth <= MAX_KIB_A_SESSION,
        "faults": [line.strip() for line in server.log if "Traceback" in line or "event=fault" in line],
    }  # fmt: skip


def main() -> None:
    """Run and print; exit code 1 where memory is not flat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=NUM_AT_ONCE)
    options = parser.parse_args()
    result = run(options.sessions, options.at_once)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.exit(0 if result["is_flat"] and not result["faults"] else 1)


if __name__ == "__main__":
    main()
