"""Adapters that nobody loaded, named by a request: found on every route, and a slow source keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import soundfile

from adapters.located import Located
from adapters.resolvers import LoRAResolver, LoRAResolverRegistry
from api.settings import ServerSettings
from engine import LLM, Engine, EngineConfig, LoRARequest, SamplingParams
from engine.finder import AdapterFinder
from tests.api.conftest import serve
from tests.oracles import tone

MESSAGES: Any = [{"role": "user", "content": "hello"}]


class Gated(LoRAResolver):
    """Knows `slow`, once its gate opens; cannot be reached for `down`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_asked = 0
        self.is_asked = threading.Event()
        self.gate = threading.Event()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if lora_name == "down":
            raise ConnectionError("no route to 10.0.0.1")
        if lora_name != "slow":
            return None
        self.num_asked += 1
        self.is_asked.set()
        await asyncio.to_thread(self.gate.wait, 120)
        return LoRARequest(lora_name, 1, str(self.folder))


@pytest.fixture(scope="module")
def folder(speech_dir: Path, speech_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resolver")
    shutil.copytree(speech_adapters["style"], root / "team" / "style")
    shutil.copytree(speech_adapters["style"], root / "bad")
    (root / "bad" / "adapter_model.safetensors").write_bytes(b"not tensors")
    return root


@pytest.fixture(scope="module")
def gated(folder: Path) -> Iterator[Gated]:
    resolver = Gated(folder / "team" / "style")
    LoRAResolverRegistry.register_resolver("gated", resolver)
    yield resolver
    LoRAResolverRegistry.unregister_resolver("gated")


@pytest.fixture
def engine(speech_dir: Path, folder: Path, gated: Gated, tmp_path: Path) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(speech_dir), lora_resolver=[f"local:{folder}"], max_loras=2, adapter_dir=str(tmp_path)
    )
    engine = Engine(config, checks_integrity=True)
    yield engine
    engine.close(drain_s=1.0)
    engine.check_integrity()


def test_every_route_finds_an_adapter_by_the_name_that_model_or_lora_gives(engine: Engine) -> None:
    clip = io.BytesIO()
    soundfile.write(clip, tone(0.4), 16_000, format="WAV")
    asks: list[Any] = [
        lambda client, **named: client.chat.completions.create(messages=MESSAGES, max_tokens=4, temperature=0, **named),
        lambda client, **named: client.completions.create(prompt="hello", max_tokens=4, temperature=0, **named),
        lambda client, **named: client.audio.transcriptions.create(file=("a.wav", clip.getvalue()), **named),
    ]
    base = engine.model_names[0]
    with (
        serve(engine, ServerSettings()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        for ask in asks:
            for named in ({"model": "team/style"}, {"model": base, "extra_body": {"lora": "team/style"}}):
                assert not engine.adapters.contains("team/style")
                answer = ask(client, **named)
                assert answer.lora["name"] == "team/style" and answer.lora["reason"] == "explicit"
                engine.adapters.unload("team/style")
        with httpx.Client(base_url=url, timeout=30) as http:
            for path, body in (("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [5]})):
                assert http.post(path, json={"model": "team/style", **body}).status_code == 200
                engine.adapters.unload("team/style")


def test_what_is_not_served_says_which_of_the_three_it_is(engine: Engine) -> None:
    with serve(engine, ServerSettings()) as url, httpx.Client(base_url=url, timeout=30) as http:

        def ask(**named: str) -> tuple[int, dict[str, Any], httpx.Headers]:
            body = {"model": engine.model_names[0], "messages": MESSAGES, "max_tokens": 2} | named
            answer = http.post("/v1/chat/completions", json=body)
            return answer.status_code, answer.json()["error"], answer.headers

        for param, name in (("model", "nobody"), ("lora", "nobody"), ("lora", "../bad"), ("model", "/etc")):
            status, error, _ = ask(**{param: name})
            assert (status, error["code"], error["param"]) == (404, "model_not_found", param)
        status, error, _ = ask(model="bad")
        assert (status, error["code"]) == (400, "adapter_refused") and "adapter_model.safetensors" in error["message"]
        status, error, headers = ask(model="down")
        assert (status, error["code"], headers["Retry-After"]) == (503, "adapter_source_unreachable", "5")
        assert "10.0.0.1" not in error["message"]
        assert engine.adapters.names() == []


@pytest.mark.asyncio
async def test_requests_that_wait_for_a_slow_source_block_no_others_and_may_leave(engine: Engine, gated: Gated) -> None:
    with serve(engine, ServerSettings()) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30, limits=httpx.Limits(max_connections=60)) as http:

            def ask(model: str) -> asyncio.Task[httpx.Response]:
                body = {"model": model, "messages": MESSAGES, "max_tokens": 2}
                return asyncio.create_task(http.post("/v1/chat/completions", json=body))

            gated.num_asked = 0
            gated.is_asked.clear()
            gated.gate.clear()
            waiting = [ask("slow") for _ in range(40)]
            assert await asyncio.to_thread(gated.is_asked.wait, 120)
            for name in (engine.model_names[0], "team/style"):
                assert (await ask(name)).json()["model"] == name
            for task in waiting[:10]:
                task.cancel()
            await asyncio.gather(*waiting[:10], return_exceptions=True)
            gated.gate.set()
            answers = await asyncio.gather(*waiting[10:])
    assert gated.num_asked == 1
    assert {answer.json()["lora"]["name"] for answer in answers} == {"slow"}
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    engine.check_integrity()


@pytest.mark.asyncio
async def test_a_wait_that_takes_too_long_ends_with_leave_to_try_again(engine: Engine, gated: Gated) -> None:
    gated.gate.clear()
    finder = AdapterFinder(engine.sources, engine.adapters, engine.model_names, wait_s=0.05)
    for wait in (lambda: finder.find("slow"), lambda: asyncio.to_thread(finder.find_sync, "slow")):
        with pytest.raises(Exception, match="still being fetched") as caught:
            await wait()
        assert caught.value.status == 503  # type: ignore[attr-defined]
    gated.gate.set()
    finder._wait_s = 20
    await finder.find("slow")
    assert engine.adapters.contains("slow")


def test_the_offline_api_finds_adapters_by_name_alone(speech_dir: Path, folder: Path, tmp_path: Path) -> None:
    llm = LLM(str(speech_dir), lora_resolver=[f"local:{folder}"], adapter_dir=str(tmp_path), max_loras=1)
    try:
        (found,) = llm.generate("hello", SamplingParams(temperature=0), lora_request=LoRARequest("team/style"))
        by_path = LoRARequest("copy", 2, str(folder / "team" / "style"))
        (expected,) = llm.generate("hello", SamplingParams(temperature=0), lora_request=by_path)
        assert found.receipt.name == "team/style" and found.outputs[0].token_ids == expected.outputs[0].token_ids
        with pytest.raises(Exception, match="does not exist"):
            llm.generate("hello", lora_request=LoRARequest("nobody"))
    finally:
        llm.close()


def test_a_list_of_adapters_shows_downloads_under_way_and_pinned_commits(engine: Engine, folder: Path) -> None:
    engine.adapters.load("pinned", Located(folder / "team" / "style", "owner/name@main", "c0ffee"))
    with (
        serve(engine, ServerSettings()) as url,
        engine.sources.downloads.track("owner/large") as progress,
    ):
        progress.expect(400)
        progress.add(100)
        listed = httpx.get(f"{url}/v1/adapters", timeout=60).json()
    (adapter,) = listed["data"]
    assert (adapter["root"], adapter["revision"]) == ("owner/name@main", "c0ffee")
    (download,) = listed["downloads"]
    assert download.pop("seconds") >= 0
    assert download == {"source": "owner/large", "bytes": 100, "total_bytes": 400, "percent": 25}
