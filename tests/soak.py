"""A server under mixed work for a while: nothing fails that should not, memory stays flat, and every sequence is accounted for.

    python -m tests.soak --minutes 30

Runs the embedded model in a process of its own. Clients chat, complete, stream, read slowly, send clips and recordings, ask
for JSON, load, upload and unload adapters at random, ask for adapters that others are just taking away, leave in the middle
of answers, and send requests that are wrong. `make soak` runs half an hour; a test fifteen seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import re
import sys
import tempfile
import time
import wave
import zipfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server import ROOT, Server, running_server

NUM_CLIENTS = 12
TIMEOUT_SECONDS = 600  # of one request; a machine that does other work too may be slow
SAMPLE_SECONDS = 0.5
# Memory may grow by so much from the second fifth of the time to the last one; allocators are never quite still.
MAX_GROWTH = 1.10
# Open files at the end beyond those of the start: connections that are kept, and some of libraries.
MAX_MORE_FILES = NUM_CLIENTS + 8
CLIPS = ("train-time.wav", "phone-call.wav", "shopping-list.wav")
FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
CHAT, COMPLETIONS, TRANSCRIPTIONS = "/v1/chat/completions", "/v1/completions", "/v1/audio/transcriptions"
BAD_FIELDS: Sequence[dict[str, Any]] = (
    {"temperature": "hot"}, {"model": "nobody"}, {"messages": []}, {"max_tokens": 10**9}, {"lora": "ghost"},
    {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "wish"}}}},
    {"logit_bias": {"99999999": 1}}, {"stop": [""]}, {"no_such_field": 1},
)  # fmt: skip


class Soak:
    """The clients and what they saw.

    Attributes:
        statuses: answers by kind of request and status; 0 where the client left.
        faults: what should not have happened.
        memory: resident bytes of the server over time.
        num_known: sequences by route of which a client saw the end.
        num_left: sequences by route that a client left, at most; they end too, where they had begun.
        num_ended: sequences by route that the server has ended.
    """

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._random = random.Random(seed)
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_SECONDS, limits=limits)
        self._clips = [(ROOT / "assets" / "audio" / clip).read_bytes() for clip in CLIPS]
        self._recording = join_clips(self._clips)
        self._zip = zip_folder(ROOT / "assets" / "adapters" / "sql")
        self._next_kinds: list[Callable[[int], Awaitable[None]]] = []
        self._num_rounds = 0
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.faults: list[str] = []
        self.memory: list[float] = []
        self.num_known: Counter[str] = Counter()
        self.num_left: Counter[str] = Counter()
        self.num_ended: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Work, then wait until the server is idle and check that it holds nothing."""
        self._names = await self._list()
        before = await self.metrics()
        until = time.monotonic() + seconds
        await asyncio.gather(self._watch(until), *(self._work(until, number) for number in range(NUM_CLIENTS)))
        await self._check_idle(before)
        self._check_memory()
        if (names := await self._list()) != self._names:
            self.faults.append(f"adapters at the start {self._names}, at the end {names}")
        await self._client.aclose()

    async def _list(self) -> list[str]:
        return [card["id"] for card in (await self._client.get("/v1/models")).json()["data"]]

    async def metrics(self) -> dict[str, float]:
        """The server's metrics by name and labels."""
        text = (await self._client.get("/metrics")).text
        return {name: float(value) for name, value in re.findall(r"^([a-z]\S*) (\S+)$", text, re.MULTILINE)}

    async def _check_idle(self, before: dict[str, float]) -> None:
        """Everything has ended, each sequence is counted as ended once, and nothing is held."""
        held = ("switchboard_requests_running", "switchboard_requests_waiting", 'switchboard_kv_blocks{state="used"}')
        for _ in range(300):
            values = await self.metrics()
            if not any(values[name] for name in held):
                break
            await asyncio.sleep(0.2)
        self.faults += [f"{name} is {values[name]} on the idle server" for name in held if values[name]]
        for name, value in values.items():
            if name.startswith("switchboard_requests_total{"):
                [route] = re.findall(r'route="(\w+)"', name)
                self.num_ended[route] += int(value)
        for route, ended in self.num_ended.items():
            known, left = self.num_known[route], self.num_left[route]
            if not known <= ended <= known + left:
                self.faults.append(
                    f"{route}: {ended} sequences ended; clients saw {known} end, and left {left} or fewer"
                )
        more_files = values["process_open_fds"] - before["process_open_fds"]
        if more_files > MAX_MORE_FILES:
            self.faults.append(f"{more_files} more files are open than at the start")

    def _check_memory(self) -> None:
        fifth = len(self.memory) // 5
        if fifth:
            before, after = (
                sorted(part)[len(part) // 2] for part in (self.memory[fifth : 2 * fifth], self.memory[-fifth:])
            )
            if after > before * MAX_GROWTH:
                self.faults.append(f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB")

    async def _watch(self, until: float) -> None:
        while time.monotonic() < until:
            self.memory.append((await self.metrics())["process_resident_memory_bytes"])
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _work(self, until: float, number: int) -> None:
        kinds: list[Callable[[int], Awaitable[None]]] = [
            self._chat, self._chat, self._stream, self._audio_chat, self._complete, self._leave, self._leave_stream,
            self._read_slowly, self._json, self._bad, self._bad_upload, self._change, self._upload, self._ask_others,
            self._transcribe, self._look,
        ]  # fmt: skip
        while time.monotonic() < until or self._num_rounds < 2:
            if not self._next_kinds:  # dealt like cards, so that a short time has all kinds too
                self._next_kinds = self._random.sample(kinds, len(kinds))
                self._num_rounds += 1
            kind = self._next_kinds.pop()
            try:
                await kind(number)
            except httpx.HTTPError as error:
                self.faults.append(f"{kind.__name__}: {error!r}")
                return

    # What clients send

    def _body(self, **fields: Any) -> dict[str, Any]:
        words = " ".join(self._random.choice("tell me about one two three ships".split()) for _ in range(8))
        return {
            "model": self._random.choice(self._names), "messages": [{"role": "user", "content": words}],
            "max_tokens": self._random.randint(1, 40), "temperature": self._random.choice([0, 1.0]), **fields,
        }  # fmt: skip

    def _note(self, kind: str, answer: httpx.Response, expected: set[int]) -> None:
        self.statuses[kind, answer.status_code] += 1
        if answer.status_code not in expected:
            self.faults.append(f"{kind}: {answer.status_code} {answer.text[:300]}")

    def _count(self, route: str, answer: httpx.Response, number: int = 1) -> None:
        if answer.status_code == 200:
            self.num_known[route] += number

    async def _post(self, kind: str, body: dict[str, Any], expected: set[int]) -> None:
        answer = await self._client.post(CHAT, json=body)
        self._note(kind, answer, expected)
        self._count("chat", answer, body.get("n", 1))

    # Kinds of work

    async def _chat(self, _: int) -> None:
        await self._post("chat", self._body(n=self._random.choice([1, 1, 3])), {200})

    async def _json(self, _: int) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        await self._post("json", self._body(response_format=wanted), {200})

    async def _audio_chat(self, _: int) -> None:
        data = base64.b64encode(self._random.choice(self._clips)).decode()
        content = [{"type": "text", "text": "What is said?"}, {"type": "input_audio", "input_audio": {"data": data}}]
        await self._post("audio", self._body(messages=[{"role": "user", "content": content}]), {200})

    async def _complete(self, _: int) -> None:
        prompts = self._random.choice([["one two", "three ships"], ["four"], [[5, 6, 7], [8]]])
        body = {
            "model": self._random.choice(self._names), "prompt": prompts, "max_tokens": self._random.randint(1, 20), "n": 2,
            "frequency_penalty": 0.5, **self._random.choice([{"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}]),
        }  # fmt: skip
        answer = await self._client.post(COMPLETIONS, json=body)
        self._note("complete", answer, {200})
        self._count("completions", answer, 2 * len(prompts))

    async def _stream(self, _: int) -> None:
        answer = await self._client.post(CHAT, json=self._body(stream=True))
        self._note("stream", answer, {200})
        self._count("chat", answer)
        self._check_ending("stream", answer.text)

    def _check_ending(self, kind: str, text: str) -> None:
        if not text.endswith("data: [DONE]\n\n"):
            self.faults.append(f"{kind}: ends with {text[-300:]!r}")

    async def _read_slowly(self, _: int) -> None:
        body, parts = self._body(stream=True, max_tokens=100, ignore_eos=True, logprobs=True, top_logprobs=5), []
        async with self._client.stream("POST", CHAT, json=body) as answer:
            async for part in answer.aiter_bytes(4096):
                parts.append(part)
                await asyncio.sleep(self._random.uniform(0, 0.1))
        self.statuses["slow", answer.status_code] += 1
        self._count("chat", answer)
        self._check_ending("slow", b"".join(parts).decode())

    async def _leave(self, _: int) -> None:
        body = self._body(stream=self._random.choice([True, False]), max_tokens=200, ignore_eos=True)
        try:
            answer = await asyncio.wait_for(self._client.post(CHAT, json=body), self._random.uniform(0.005, 0.3))
            self._count("chat", answer)
        except asyncio.TimeoutError:
            self.statuses["leave", 0] += 1
            self.num_left["chat"] += 1

    async def _leave_stream(self, _: int) -> None:
        """Leave after some pieces, so that the answer is surely under way."""
        async with self._client.stream("POST", CHAT, json=self._body(stream=True, max_tokens=200, n=2)) as answer:
            num_read = self._random.randint(1, 10)
            async for _line in answer.aiter_lines():
                num_read -= 1
                if not num_read:
                    break
        self.statuses["leave", 0] += 1
        self.num_known["chat"] += 2

    async def _bad(self, _: int) -> None:
        await self._post("bad", self._body(**self._random.choice(BAD_FIELDS)), {400, 404})

    async def _bad_upload(self, number: int) -> None:
        content = self._random.choice(
            [b"not a zip", self._zip[: len(self._zip) // 2], zip_folder(ROOT / "assets" / "css")]
        )
        answer = await self._client.post(
            "/v1/adapters", data={"name": f"bad-{number}"}, files={"files": ("a.zip", content)}
        )
        self._note("bad upload", answer, {400})

    async def _change(self, number: int) -> None:
        """Load an adapter under a name of this client's own, ask it, unload it; now and then one that is not there."""
        name, source = f"own-{number}", self._random.choice(["sql", "pirate", "missing"])
        path = str(ROOT / "assets" / "adapters" / source)
        loaded = await self._client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        self._note("load", loaded, {404} if source == "missing" else {200})
        if loaded.status_code == 200:
            await self._post("own", self._body(model=name), {200})
            unloaded = await self._client.post("/v1/unload_lora_adapter", json={"lora_name": name})
            self._note("unload", unloaded, {200})

    async def _upload(self, number: int) -> None:
        """Try an upload, store it, pin it, ask it, fetch it, delete it."""
        name, files = f"up-{number}", {"files": ("a.zip", self._zip)}
        tried = await self._client.post("/v1/adapters", data={"name": name, "dry_run": "true"}, files=files)
        self._note("try upload", tried, {200})
        stored = await self._client.post("/v1/adapters", data={"name": name}, files=files)
        self._note("upload", stored, {200})
        if stored.status_code == 200:
            self._note("pin", await self._client.patch(f"/v1/adapters/{name}", json={"pinned": True}), {200})
            await self._post("own", self._body(model=name), {200})
            self._note("fetch", await self._client.get(f"/v1/adapters/{name}/download"), {200})
            self._note("delete", await self._client.delete(f"/v1/adapters/{name}"), {200})

    async def _ask_others(self, _: int) -> None:
        """Ask for an adapter that comes and goes: it answers, or is not there."""
        kind, number = self._random.choice(["own", "up"]), self._random.randrange(NUM_CLIENTS)
        await self._post("other", self._body(model=f"{kind}-{number}"), {200, 404})

    async def _transcribe(self, _: int) -> None:
        """A clip, or a recording that is cut into pieces; now and then streamed, now and then left."""
        form = {"model": self._names[0], "response_format": self._random.choice(FORMATS)}
        if form["response_format"] in ("json", "verbose_json") and self._random.random() < 0.5:
            form["stream"] = "true"
        content = self._random.choice([*self._clips, self._recording])
        posted = self._client.post(TRANSCRIPTIONS, data=form, files={"file": ("a.wav", content)})
        try:
            answer = await asyncio.wait_for(posted, self._random.choice([0.1, TIMEOUT_SECONDS, TIMEOUT_SECONDS]))
        except asyncio.TimeoutError:
            self.statuses["transcribe", 0] += 1
            self.num_left["transcriptions"] += len(CLIPS) + 1
            return
        self._note("transcribe", answer, {200})
        if "stream" in form:
            self._check_ending("transcribe", answer.text)
        # How many pieces a recording has is told by some formats alone.
        self.num_known["transcriptions"] += 1
        self.num_left["transcriptions"] += len(CLIPS) if content is self._recording else 0

    async def _look(self, _: int) -> None:
        for path in ("/v1/models", "/v1/adapters", "/health", "/health/ready", "/version", "/openapi.json"):
            self._note("look", await self._client.get(path), {200, 503} if path == "/health/ready" else {200})
        tokens = await self._client.post("/tokenize", json={"model": self._names[0], "prompt": "one two"})
        self._note("look", tokens, {200})


def join_clips(clips: Sequence[bytes]) -> bytes:
    """A recording of all clips, a second of silence between them."""
    joined = io.BytesIO()
    with wave.open(joined, "wb") as writer:
        for place, clip in enumerate(clips):
            with wave.open(io.BytesIO(clip)) as reader:
                if not place:
                    writer.setparams(reader.getparams())
                writer.writeframes(reader.readframes(reader.getnframes()))
                writer.writeframes(bytes(reader.getframerate() * reader.getsampwidth() * reader.getnchannels()))
    return joined.getvalue()


def zip_folder(folder: Path) -> bytes:
    """The folder's files as a zip."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.write(path, path.name)
    return packed.getvalue()


def slope(memory: Sequence[float]) -> float:
    """Bytes an hour by which memory grows, after the first fifth (least squares)."""
    values = memory[len(memory) // 5 :]
    centre = (len(values) - 1) / 2
    spread = sum((place - centre) ** 2 for place in range(len(values)))
    per_sample = sum((place - centre) * value for place, value in enumerate(values)) / spread if spread else 0.0
    return per_sample * 3600 / SAMPLE_SECONDS


def soak(seconds: float, seed: int = 0) -> Soak:
    """Run it; the server is ended in order, and must have left no file in its place for temporary ones."""
    with tempfile.TemporaryDirectory() as place:
        words = ["--adapter-dir", f"{place}/adapters", "--max-num-seqs", "8", "--drain-seconds", "2"]
        temporary = Path(place) / "temporary"
        temporary.mkdir()
        with running_server(words, {"TMPDIR": str(temporary)}) as server:

            async def work() -> Soak:
                made = Soak(server, seed)
                await made.run(seconds)
                return made

            at_start = set(os.listdir(temporary))
            result = asyncio.run(work())
            result.faults += [f"{name} was left behind" for name in set(os.listdir(temporary)) - at_start]
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
    figures = {
        "requests": sum(result.statuses.values()),
        "server_errors": sum(count for (_, status), count in result.statuses.items() if status >= 500),
        "counts": {f"{kind} {status or 'left'}": count for (kind, status), count in sorted(result.statuses.items())},
        "sequences_ended": result.num_ended,
        "memory_mib": [round(value / 2**20) for value in result.memory[:: max(1, len(result.memory) // 20)]],
        "memory_mib_per_hour": round(slope(result.memory) / 2**20, 1),
        "faults": result.faults[:50],
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.exit(1 if result.faults else 0)


if __name__ == "__main__":
    main()
