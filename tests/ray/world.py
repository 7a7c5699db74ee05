"""A Ray Serve cluster on this machine with replicas of the embedded model, and what tests do with it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import ray
from ray import serve

from deploy.ray_serve import APP_NAME, make_application, prepare_environment
from deploy.replicas.call import LOST_HEADER, REPLICA_HEADER
from deploy.replicas.settings import parse_replica_command
from engine.config import EMBEDDED_ASSETS

T = TypeVar("T")

PATIENCE_SECONDS = 240.0
NUM_REPLICAS = 3
BUSY = 4
ADAPTERS = EMBEDDED_ASSETS / "adapters"
# Six names with two contents: equal names must give equal answers, and the two contents different ones.
NAMES = [f"{kind}-{index}" for index in range(3) for kind in ("pirate", "sql")]
QUESTION = "hello, show me all users"


def wait_for(what: str, is_so: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """What `is_so` returns as soon as it is true; connection errors count as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = is_so()
        except httpx.HTTPError:
            found = None
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} has not happened within {seconds} seconds"
        time.sleep(0.2)


@dataclass(frozen=True)
class Reply:
    """An answer of the cluster.

    Attributes:
        status: HTTP status.
        text: the answer's text, or the error's code.
        replica: who wrote it.
        lost: who was lost before that.
        generation: digest of the adapter that the receipt names.
        is_cut: a stream that ended with an error event.
        retry_after: the header of that name.
    """

    status: int
    text: str
    replica: str
    lost: str | None = None
    generation: str | None = None
    is_cut: bool = False
    retry_after: str | None = None


@dataclass
class Cluster:
    """A deployment and a client for it."""

    port: int
    adapter_dir: str
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_SECONDS, limits=limits)

    def deploy(self, *flags: str) -> None:
        """Deploy, or update what is deployed; returns once that is done."""
        modules = [f"{name}={ADAPTERS / name.partition('-')[0]}" for name in NAMES]
        words = ["--port", str(self.port), "--adapter-dir", self.adapter_dir, "--kv-cache-memory-mb", "64"]
        words += ["--max-cpu-loras", "16", "--replica-cpus", "0", "--busy-requests", str(BUSY), "--drain-seconds", "20"]
        words += [
            "--lora-modules",
            *modules,
            f"speech={ADAPTERS / 'speech'}",
            "--default-mm-loras",
            '{"audio": "speech"}',
        ]
        command = parse_replica_command([*words, *flags], {})
        serve.run(make_application(command), name=APP_NAME, route_prefix="/")

    def ask(self, model: str, *, max_tokens: int = 12, stream: bool = False) -> Reply:
        """A chat completion."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            raw = response.read().decode()
        headers = response.headers
        replica, lost = headers.get(REPLICA_HEADER, ""), headers.get(LOST_HEADER)
        if response.status_code != 200:
            code = json.loads(raw)["error"]["code"]
            return Reply(response.status_code, code, replica, lost, retry_after=headers.get("Retry-After"))
        if not stream:
            answer = json.loads(raw)
            text = answer["choices"][0]["message"]["content"]
            return Reply(200, text, replica, lost, answer["lora"]["generation"])
        return _read_events(raw, replica, lost)

    def ask_all(self, models: Iterable[str], *, at_once: int, **kwargs: Any) -> list[Reply]:
        """Chat completions, `at_once` of them at a time, in order."""
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda model: self.ask(model, **kwargs), models))

    def status(self) -> dict[str, Any]:
        """`GET /v1/replicas`."""
        status: dict[str, Any] = self.client.get("/v1/replicas").raise_for_status().json()
        return status

    def replicas(self) -> set[str]:
        """Ids of the replicas that the ledger knows to live."""
        return {row["id"] for row in self.status()["replicas"]}

    def change(self, path: str, **body: Any) -> httpx.Response:
        """Load or unload an adapter."""
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response


def _read_events(raw: str, replica: str, lost: str | None) -> Reply:
    events = [line.removeprefix("data: ") for line in raw.splitlines() if line]
    text, generation, is_cut = "", None, False
    for event in events:
        if event == "[DONE]":
            continue
        chunk = json.loads(event)
        is_cut = is_cut or "error" in chunk
        generation = chunk.get("lora", {}).get("generation") or generation
        text += "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
    assert is_cut != (events[-1] == "[DONE]"), "a stream ends with its mark or with an error, never with neither"
    return Reply(200, text, replica, lost, generation, is_cut)


def actor_of(deployment: str, replica: str | None = None) -> Any:
    """The actor of a replica, to be killed."""
    prefix = f"SERVE_REPLICA::{APP_NAME}#{deployment}#"
    named = ray.util.list_named_actors(all_namespaces=True)
    [row] = [row for row in named if row["name"].startswith(prefix + (replica or ""))]
    return ray.get_actor(row["name"], namespace=row["namespace"])


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start_ray() -> None:
    """A cluster of this machine alone. Its processes get one thread each: the model is tiny."""
    prepare_environment()
    os.environ.update(OMP_NUM_THREADS="1", RAY_AUTH_MODE="disabled")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
