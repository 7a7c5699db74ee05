"""What a token costs between the engine's thread and a socket, with a clock in the place of the device.

    python -m benchmarks.stream_cost --step-ms 6
    python -m benchmarks.stream_cost --step-ms 0

Scheduler, loop, detokeniser, routes and server are the real ones; a step of the model is a wait that lets go of the
interpreter lock, as waiting for a GPU does. With `--step-ms 0` there is nothing but the host's work. The same closed
loop runs twice: read by coroutines in this process, and over HTTP by another process. Each answer must have all its tokens
as chunks of their own or the stream's end in order; else no figure is printed.

`engine_us` and `server_us` are microseconds of processor time a token of the engine's thread and of the event loop's.
`put_us` and `chunk_us` are the fastest that this project's own part of it was, alone in a thread: handing a token out, and
making an event of it up to the server's door. They hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from api.app import create_app
from api.completions import CompletionView
from api.protocol import BoundedProtocol
from api.schema import CompletionRequest, read_body
from api.settings import ServerSettings
from api.stream import EventStream
from benchmarks.report import finish, refuse
from benchmarks.workload import around, make_prompts, write_model
from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.request import Delta, Receipt, TokenLogprob, TokenPrompt
from engine.scheduler import Plan, PlanItem
from engine.setup import freeze_startup_objects
from engine.state import RequestState
from engine.wakes import Wakes

TOKENIZER_SIZE = 256  # of `write_model`
NUM_STEPS = 300  # of which the fastest counts
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
FIRST_LETTER, NUM_LETTERS = 64, 26  # tokens that are one printable character each


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--step-ms", type=float, default=6.0, help="how long the device takes for a step")
    parser.add_argument("--streams", type=int, default=64, help="requests under way at any time")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each loop, after a fifth as much")
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--route", choices=("chat", "completions"), default="chat")
    parser.add_argument("--profile", type=Path, default=None, help="write a profile of the event loop's thread there")
    return parser.parse_args(words)


class Clock:
    """In the place of `engine.runner.Runner`: steps follow one another and take their time; tokens are letters."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ends_at = 0.0
        self._num_launched = 0

    def encode_media(self, items: Sequence[PlanItem]) -> None:
        """Nothing: there are none."""

    def is_recorded(self, plan: Plan) -> bool:
        """Launching takes no time."""
        return True

    def launch(self, plan: Plan) -> _Step:
        """Begin when the step before has ended."""
        self._ends_at = max(self._ends_at, time.perf_counter()) + self._step_s
        self._num_launched += 1
        token_id = FIRST_LETTER + self._num_launched % NUM_LETTERS
        return _Step(tuple(item for item in plan.items if item.is_sampled), token_id, self._ends_at)


class _Step:
    """As `engine.runner.LaunchedStep`."""

    def __init__(self, sampled: tuple[PlanItem, ...], token_id: int, ends_at: float) -> None:
        self.sampled = sampled
        self._token_id = token_id
        self._ends_at = ends_at

    def read(self) -> list[tuple[PlanItem, int, TokenLogprob | None]]:
        """The tokens, once the device would have them."""
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        return [(item, self._token_id, None) for item in self.sampled]

    def read_prompts(self) -> list[tuple[RequestState, list[TokenLogprob | None]]]:
        """Nobody asks for those."""
        return []


def measure(engine: Engine, reader: threading.Thread, seconds: float) -> dict[str, float]:
    """Watch for `seconds`, after a fifth as much: tokens, and the processor time of the two threads."""
    threads = {"engine_us": engine._loop._thread, "server_us": reader}
    clocks = {name: time.pthread_getcpuclockid(thread.ident or 0) for name, thread in threads.items()}
    time.sleep(seconds / 5)

    def now() -> dict[str, float]:
        used = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
        counters = engine._loop.counters
        return {"s": time.perf_counter(), "tokens": counters.generated_tokens, "steps": counters.num_steps, **used}

    before = now()
    time.sleep(seconds)
    spent = {name: value - before[name] for name, value in now().items()}
    if not spent["tokens"]:
        refuse("no token came")
    figures = {name: round(spent[name] / spent["tokens"] * 1e6, 2) for name in threads}
    figures |= {"tokens_per_s": round(spent["tokens"] / spent["s"], 1)}
    return figures | {"step_ms": round(spent["s"] / spent["steps"] * 1000, 3)}


def bare(engine: Engine, options: argparse.Namespace) -> dict[str, float]:
    """Read by coroutines, without HTTP."""
    lengths = random.Random(0)
    prompts = make_prompts(256, options.input_len, TOKENIZER_SIZE)
    is_over = threading.Event()

    async def lane(number: int) -> None:
        while not is_over.is_set():
            number += 1
            output_len = lengths.randint(*around(options.output_len))
            sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
            [answer] = await engine.start(TokenPrompt(prompts[number % len(prompts)]), sampling)
            num_tokens = sum([len(delta.token_ids) async for delta in answer])
            assert num_tokens == output_len

    with _in_a_thread(lambda: asyncio.run(_together(lane, options.streams))) as reader:
        figures = measure(engine, reader, options.seconds)
        is_over.set()
    return figures


async def _together(lane: Callable[[int], Coroutine[Any, Any, None]], number: int) -> None:
    await asyncio.gather(*(lane(index) for index in range(number)))


@contextmanager
def _in_a_thread(work: Callable[[], None]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join()


def over_http(engine: Engine, options: argparse.Namespace) -> dict[str, float]:
    """Read over HTTP by another process, served as `app.py` serves."""
    app = create_app(engine, ServerSettings().resolve())
    config = uvicorn.Config(
        app, port=0, http=BoundedProtocol, log_config=None, access_log=False, server_header=False, ws="none"
    )
    server = uvicorn.Server(config)

    def serve() -> None:
        if options.profile is None:
            server.run()
            return
        with cProfile.Profile() as profile:
            server.run()
        profile.dump_stats(options.profile)

    with _in_a_thread(serve) as thread:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        words = [sys.executable, "-m", "benchmarks.stream_client", str(port), str(options.streams), _request(options)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdin is not None and client.stdout is not None
            client.stdout.readline()  # it is under way
            figures = measure(engine, thread, options.seconds)
            said, _ = client.communicate()  # which closes its input: it ends
        server.should_exit = True
    if client.returncode:
        refuse("the client found a wrong answer")
    return figures | {"client": json.loads(said)}


def own_part(num_streams: int) -> dict[str, float]:
    """Steps of one token a stream, handed out and read in turns by one thread; the door takes events and does nothing."""
    return asyncio.run(_own_part(num_streams))


async def _own_part(num_streams: int) -> dict[str, float]:
    body = read_body(CompletionRequest, json.dumps({"model": "model", "prompt": "a", "stream": True}).encode())
    receipt, wakes, num_sent = Receipt(None, None, "base"), Wakes(), 0

    async def send(_: MutableMapping[str, Any]) -> None:
        nonlocal num_sent
        num_sent += 1

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    answers = [Answer(f"cmpl-{number:032x}", receipt, [1]) for number in range(num_streams)]
    readers = []
    for answer in answers:
        answer.bind(lambda _: None, wakes)
        events = EventStream(CompletionView(body, answer.request_id, None, [answer]).chunks(), [answer], {})
        readers.append(asyncio.ensure_future(events({"type": "http"}, receive, send)))

    async def step(delta: Delta) -> tuple[float, float]:
        wanted, began_at = num_sent + num_streams, time.perf_counter()
        wakes.hold()
        for answer in answers:
            answer.put(delta)
        wakes.send()
        put_at = time.perf_counter()
        while num_sent < wanted:  # noqa: ASYNC110 - the readers' turns are what is measured
            await asyncio.sleep(0)
        return put_at - began_at, time.perf_counter() - put_at

    await step(Delta(receipt=receipt))
    times = [await step(Delta(text=" word", token_ids=(1,))) for _ in range(NUM_STEPS)]
    await step(Delta(finish_reason="length"))
    await asyncio.gather(*readers)
    put, chunk = (min(each) / num_streams * 1e6 for each in zip(*times, strict=True))
    return {"put_us": round(put, 2), "chunk_us": round(chunk, 2)}


def _request(options: argparse.Namespace) -> str:
    """What the client sends: a path, a body and answers' lengths, as JSON."""
    body: dict[str, Any] = {
        "model": "model", "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    text = "a" * options.input_len
    if options.route == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
    else:
        path, body["prompt"] = "/v1/completions", text
    return json.dumps([path, body, around(options.output_len)])


def main() -> None:
    """Measure and print."""
    options = parse()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        model = write_model("tiny", root / "model")
        (model / "chat_template.jinja").write_text(TEMPLATE)
        engine = Engine(
            EngineConfig(
                model=str(model), served_model_name=["model"], load_format="dummy",
                adapter_dir=str(root / "catalogue"), max_num_seqs=options.streams, async_scheduling=True, device="cpu",
                max_model_len=4096, enable_lora=False, dtype="float32",
            )
        )  # fmt: skip
        freeze_startup_objects()  # As `app.py` does.
        engine._loop._runner = Clock(options.step_ms / 1000)  # type: ignore[assignment]
        try:
            figures: dict[str, Any] = {"own": own_part(options.streams)}
            figures |= {"bare": bare(engine, options), "http": over_http(engine, options)}
        finally:
            engine.close(0)
    figures["overhead"] = round(1 - figures["http"]["tokens_per_s"] / figures["bare"]["tokens_per_s"], 4)
    finish({name: value for name, value in vars(options).items() if name != "profile"}, figures)


if __name__ == "__main__":
    main()
