"""A server under mixed work for a while: nothing fails that should not, memory stays flat, and every sequence is accounted for.

    python -m tests.soak --minutes 30

Runs the embedded model in a process of its own. Clients chat, stream, send audio, ask for JSON, load and unload adapters at
random, leave in the middle of answers, and send requests that are wrong. `make soak` runs half an hour; a test fifteen seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.server import ROOT, Server, running_server

NUM_CLIENTS = 12
SAMPLE_SECONDS = 0.5
# Memory may grow by so much from the second fifth of the time to the last one; allocators are never quite still.
MAX_GROWTH = 1.10
CLIPS = ("train-time.wav", "phone-call.wav", "shopping-list.wav")


class Soak:
    """The clients and what they saw.

    Attributes:
        statuses: answers by kind of request and status.
        faults: what should not have happened.
        memory: resident bytes of the server over time.
    """

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._client = httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=None))
        self._audio = [base64.b64encode((ROOT / "assets" / "audio" / clip).read_bytes()).decode() for clip in CLIPS]
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.faults: list[str] = []
        self.memory: list[float] = []

    async def run(self, seconds: float) -> None:
        """Work, then wait until the server is idle and check that it holds nothing."""
        models = (await self._client.get("/v1/models")).json()["data"]
        self._names = [card["id"] for card in models]
        until = time.monotonic() + seconds
        await asyncio.gather(self._watch(until), *(self._work(until, number) for number in range(NUM_CLIENTS)))
        for _ in range(100):
            values = await self.metrics()
            if values["switchboard_requests_running"] == values["switchboard_requests_waiting"] == 0:
                break
            await asyncio.sleep(0.2)
        for name in (
            "switchboard_requests_running",
            "switchboard_requests_waiting",
            'switchboard_kv_blocks{state="used"}',
        ):
            if values[name]:
                self.faults.append(f"{name} is {values[name]} on the idle server")
        fifth = len(self.memory) // 5
        if fifth:
            before, after = (
                sorted(part)[len(part) // 2] for part in (self.memory[fifth : 2 * fifth], self.memory[-fifth:])
            )
            if after > before * MAX_GROWTH:
                self.faults.append(f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")
        await self._client.aclose()

    async def metrics(self) -> dict[str, float]:
        """The server's metrics by name and labels."""
        text = (await self._client.get("/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^([a-z]\S*) (\S+)$", text, re.MULTILINE)}

    async def _watch(self, until: float) -> None:
        while time.monotonic() < until:
            self.memory.append((await self.metrics())["process_resident_memory_bytes"])
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _work(self, until: float, number: int) -> None:
        kinds: list[Callable[[int], Awaitable[None]]] = [
            self._chat, self._chat, self._stream, self._audio_chat, self._leave, self._json, self._bad, self._change,
        ]  # fmt: skip
        while time.monotonic() < until:
            await self._random.choice(kinds)(number)

    def _body(self, **fields: Any) -> dict[str, Any]:
        words = " ".join(self._random.choice("tell me about one two three ships".split()) for _ in range(8))
        return {
            "model": self._random.choice(self._names), "messages": [{"role": "user", "content": words}],
            "max_tokens": self._random.randint(1, 40), "temperature": self._random.choice([0, 1.0]), **fields,
        }  # fmt: skip

    def _note(self, kind: str, status: int, text: str, expected: set[int]) -> None:
        self.statuses[kind, status] += 1
        if status not in expected:
            self.faults.append(f"{kind}: {status} {text[:300]}")

    async def _post(self, kind: str, body: dict[str, Any], expected: set[int]) -> None:
        answer = await self._client.post("/v1/chat/completions", json=body)
        self._note(kind, answer.status_code, answer.text, expected)

    async def _chat(self, _: int) -> None:
        await self._post("chat", self._body(n=self._random.choice([1, 1, 3])), {200})

    async def _json(self, _: int) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        await self._post("json", self._body(response_format=wanted), {200})

    async def _audio_chat(self, _: int) -> None:
        clip = {"type": "input_audio", "input_audio": {"data": self._random.choice(self._audio), "format": "wav"}}
        content = [{"type": "text", "text": "What is said?"}, clip]
        await self._post("audio", self._body(messages=[{"role": "user", "content": content}]), {200})

    async def _stream(self, _: int) -> None:
        async with self._client.stream("POST", "/v1/chat/completions", json=self._body(stream=True)) as answer:
            text = (await answer.aread()).decode()
        self._note("stream", answer.status_code, text, {200})
        if not text.endswith("data: [DONE]\n\n"):
            self.faults.append(f"stream: ends with {text[-300:]!r}")

    async def _leave(self, _: int) -> None:
        body = self._body(stream=self._random.choice([True, False]), max_tokens=200, ignore_eos=True)
        try:
            await asyncio.wait_for(
                self._client.post("/v1/chat/completions", json=body), self._random.uniform(0.005, 0.3)
            )
        except asyncio.TimeoutError:
            self.statuses["leave", 0] += 1

    async def _bad(self, _: int) -> None:
        fields = self._random.choice(
            [{"temperature": "hot"}, {"model": "nobody"}, {"messages": []}, {"max_tokens": 10**9}, {"lora": "ghost"}]
        )
        await self._post("bad", self._body(**fields), {400, 404})

    async def _change(self, number: int) -> None:
        """Load an adapter under a name of this client's own, ask it, unload it; now and then one that is not there."""
        name, source = f"own-{number}", self._random.choice(["sql", "pirate", "missing"])
        path = str(ROOT / "assets" / "adapters" / source)
        loaded = await self._client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        self._note("load", loaded.status_code, loaded.text, {404} if source == "missing" else {200})
        if loaded.status_code == 200:
            await self._post("own", self._body(model=name), {200})
            unloaded = await self._client.post("/v1/unload_lora_adapter", json={"lora_name": name})
            self._note("unload", unloaded.status_code, unloaded.text, {200})


def soak(seconds: float, seed: int = 0) -> Soak:
    """Run it; the server is ended in order."""
    with tempfile.TemporaryDirectory() as place:
        words = ["--adapter-dir", place, "--max-num-seqs", "8", "--drain-seconds", "2"]
        with running_server(words) as server:

            async def work() -> Soak:
                made = Soak(server, seed)
                await made.run(seconds)
                return made

            result = asyncio.run(work())
        if server.process.returncode != 0:
            result.faults.append(f"the server ended with {server.process.returncode}")
        result.faults += [line.strip() for line in server.log if "Traceback" in line or "event=fault" in line]
    return result


def main() -> None:
    """Run and print; exit code 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args()
    result = soak(options.minutes * 60)
    counts = {f"{kind} {status or 'left'}": count for (kind, status), count in sorted(result.statuses.items())}
    memory = [round(value / 2**20) for value in result.memory[:: max(1, len(result.memory) // 20)]]
    sys.stdout.write(json.dumps({"counts": counts, "memory_mib": memory, "faults": result.faults[:50]}) + "\n")
    sys.exit(1 if result.faults else 0)


if __name__ == "__main__":
    main()
