"""What `serve` asks with: requests again and again, and when each of their tokens came.

`python -m benchmarks.load_client` is one of several processes that load a server over HTTP. It reads a job as a line of JSON,
says `ready`, begins at the next line, and prints its times. Nothing but the standard library is imported, and nothing is parsed
before a loop has ended: an HTTP library that reads some thousand events a second would be measured in the server's place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.stream_client import read_answer, request_of

KEPT_SECONDS = 2.0
"""How long a connection may lie idle and be used again; a server ends it at some time (uvicorn after 5 seconds)."""
_EVENT = re.compile(rb"data: (\{.*\})")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process asks.

    Attributes:
        prompts: token ids to draw from.
        names: adapters to draw from, by Zipf's law in this order; `[None]` is the base model.
        zipf: the law's exponent.
        output_lens: the least and the most tokens of an answer, of which each draws its own: else requests that began
            together would end together.
        streams: requests under way in the closed loop.
        rate: requests a second of the open one.
        seconds: of either.
        seed: of all that is drawn.
    """

    prompts: list[list[int]]
    names: list[str | None]
    zipf: float
    output_lens: tuple[int, int]
    streams: int
    rate: float
    seconds: float
    seed: int


@dataclasses.dataclass
class Times:
    """One answer: when it was due, when its tokens came, in seconds on the machine's monotonic clock."""

    due_at: float
    tokens_at: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for."""

    prompt: list[int]
    name: str | None
    output_len: int


Ask = Callable[[Request, Times], Awaitable[None]]


class Load:
    """Asks as a job says."""

    def __init__(self, ask: Ask, job: Job) -> None:
        self._ask = ask
        self._job = job
        self._random = random.Random(job.seed)
        self._weights = [1 / rank**job.zipf for rank in range(1, len(job.names) + 1)]

    async def closed(self) -> list[Times]:
        """A fixed number of requests at any time; what came in the first sixth is left out."""
        await self._closed_for(self._job.seconds / 5)
        return await self._closed_for(self._job.seconds)

    async def open(self) -> list[Times]:
        """Requests at a rate (Poisson), whatever becomes of the earlier ones."""
        started = due = time.perf_counter()
        tasks = []
        while due < started + self._job.seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._one(due)))
            due += self._random.expovariate(self._job.rate)
        return await asyncio.gather(*tasks)

    async def _closed_for(self, seconds: float) -> list[Times]:
        until = time.perf_counter() + seconds
        found: list[Times] = []

        async def lane() -> None:
            while time.perf_counter() < until:
                found.append(await self._one(time.perf_counter()))

        await asyncio.gather(*(lane() for _ in range(self._job.streams)))
        return found

    async def _one(self, due_at: float) -> Times:
        job, times = self._job, Times(due_at)
        (name,) = self._random.choices(job.names, self._weights)
        await self._ask(Request(self._random.choice(job.prompts), name, self._random.randint(*job.output_lens)), times)
        if len(times.tokens_at) < 2:
            raise RuntimeError("an answer came in fewer than two tokens")
        return times


class _Connection(NamedTuple):
    """One that nobody uses, and since when."""

    left_at: float
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpStreams:
    """Completions over HTTP, each on a connection that a request before it has left.

    Args:
        port: on this machine.
        model: the base model's name.
        word_len: characters of each token's text.
    """

    def __init__(self, port: int, model: str, word_len: int) -> None:
        self._port = port
        self._model = model
        self._word_len = word_len
        self._idle: list[_Connection] = []
        self._unread: list[tuple[Request, Times, list[tuple[float, bytes]]]] = []

    async def ask(self, request: Request, times: Times) -> None:
        """Ask, and keep what comes for `read_all`; the two times that `times` gets are of its first and last bytes."""
        body = {
            "model": request.name or self._model, "prompt": request.prompt, "max_tokens": request.output_len,
            "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        reader, writer = await self._connect()
        writer.write(request_of("/v1/completions", body))
        reads = await read_answer(reader)
        self._idle.append(_Connection(reads[-1][0], reader, writer))
        self._unread.append((request, times, reads))
        times.tokens_at += [reads[0][0], reads[-1][0]]

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection that was left last, or a new one."""
        while self._idle:
            left_at, reader, writer = self._idle.pop()
            if time.perf_counter() - left_at < KEPT_SECONDS:
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port)

    def read_all(self) -> None:
        """Put the time of each token into its `Times`. Raises RuntimeError for an answer that is not what was asked for."""
        for request, times, reads in self._unread:
            times.tokens_at, receipt, num_tokens = [], {}, 0
            for came_at, event in _events(reads):
                receipt = event.get("lora", receipt)
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                if event["choices"]:
                    times.tokens_at += [came_at] * (len(event["choices"][0]["text"]) // self._word_len)
            found = num_tokens, len(times.tokens_at), receipt.get("name")
            if found != (request.output_len, request.output_len, request.name):
                raise RuntimeError(f"asked {request.name!r} for {request.output_len} tokens; got {found}")
        self._unread.clear()


def _events(reads: Sequence[tuple[float, bytes]]) -> list[tuple[float, dict[str, Any]]]:
    """An answer's events, each with the time of the read that ended it."""
    text, ends = b"".join(data for _, data in reads), []
    length = 0
    for came_at, data in reads:
        length += len(data)
        ends.append((length, came_at))
    found, place = [], 0
    for event in _EVENT.finditer(text):
        while ends[place][0] < event.end():
            place += 1
        found.append((ends[place][1], json.loads(event[1])))
    return found


def main() -> None:
    """Ask as a job on the standard input says."""
    job = json.loads(sys.stdin.readline())
    streams = HttpStreams(job["port"], job["model"], job["word_len"])
    load = Load(streams.ask, Job(**job["job"]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    started = time.perf_counter()
    found = asyncio.run(load.closed() if job["is_closed"] else load.open())
    streams.read_all()
    if job["is_closed"]:
        started += job["job"]["seconds"] / 5
    json.dump({"started_at": started, "times": [[times.due_at, times.tokens_at] for times in found]}, sys.stdout)


if __name__ == "__main__":
    main()
