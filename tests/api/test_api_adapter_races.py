"""Loads, unloads and chats with one name, all at once and over HTTP: one winner, no fault, no wrong answer, no growth."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.turns import KeyedTurns
from engine import Engine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 6}
Call = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


@pytest.fixture(autouse=True)
def _same_adapters_afterwards(tiny_engine: Engine) -> Iterator[None]:
    before = set(tiny_engine.adapters.names())
    yield
    for name in set(tiny_engine.adapters.names()) - before:
        tiny_engine.adapters.delete(name)


def load(path: Path, **fields: Any) -> Call:
    body = {"lora_name": "hot", "lora_path": str(path), **fields}
    return lambda http: http.post("/v1/load_lora_adapter", json=body)


def unload(http: httpx.AsyncClient) -> Awaitable[httpx.Response]:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": "hot"})


def chat(http: httpx.AsyncClient) -> Awaitable[httpx.Response]:
    return http.post("/v1/chat/completions", json={"model": "hot", **CHAT})


def at_once(base_url: str, calls: list[Call]) -> list[httpx.Response]:
    async def scene() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=len(calls))
        async with httpx.AsyncClient(base_url=base_url, timeout=60, limits=limits) as http:
            return await asyncio.gather(*[call(http) for call in calls])

    return asyncio.run(scene())


def stronger(folder: Path, copy: Path) -> Path:
    """A copy with another scale, so that no other name has the same content."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    return copy


def solo_answers(http: httpx.Client, folders: list[Path]) -> dict[str, str]:
    """generation -> what a chat with it alone says."""
    answers = {}
    for folder in folders:
        http.post("/v1/load_lora_adapter", json={"lora_name": "hot", "lora_path": str(folder)})
        body = http.post("/v1/chat/completions", json={"model": "hot", **CHAT}).json()
        http.post("/v1/unload_lora_adapter", json={"lora_name": "hot"})
        answers[body["lora"]["generation"]] = body["choices"][0]["message"]["content"]
    assert len(set(answers.values())) == len(folders), "the adapters must differ"
    return answers


@pytest.mark.parametrize("is_same_path", [True, False])
def test_of_32_loads_of_one_name_one_wins(
    http: httpx.Client, base_url: str, speech_adapters: dict[str, Path], tiny_engine: Engine, is_same_path: bool
) -> None:
    paths = [speech_adapters["style"], speech_adapters["style" if is_same_path else "tower"]] * 16
    for _ in range(3):
        reads = tiny_engine.adapters.stats().loads["path"]
        answers = at_once(base_url, [load(path) for path in paths])
        assert sorted(answer.status_code for answer in answers) == [200] + [400] * 31
        winner = next(path for path, answer in zip(paths, answers, strict=True) if answer.status_code == 200)
        assert [info.source for info in tiny_engine.adapters.list() if info.name == "hot"] == [str(winner)]
        assert tiny_engine.adapters.stats().loads["path"] == reads + 1, "the losers read nothing"
        tiny_engine.adapters.unload("hot")
    tiny_engine.adapters.check_integrity()


def test_loads_unloads_replacements_and_chats_in_any_order(
    http: httpx.Client, base_url: str, speech_adapters: dict[str, Path], tiny_engine: Engine, tmp_path: Path
) -> None:
    first, second = (stronger(speech_adapters[name], tmp_path / name) for name in ("style", "tower"))
    num_cpu = tiny_engine.adapters.stats().num_cpu
    right = solo_answers(http, [first, second])
    calls = [load(first), load(second), load(first, load_inplace=True), load(second, load_inplace=True)] * 4
    calls += [unload] * 8 + [chat] * 16
    statuses: Counter[int] = Counter()
    for seed in range(10):
        random.Random(seed).shuffle(calls)
        for answer in at_once(base_url, calls):
            statuses[answer.status_code] += 1
            body = answer.json() if answer.status_code != 200 or "choices" in answer.text else None
            if answer.status_code == 200 and body is not None:
                assert body["choices"][0]["message"]["content"] == right[body["lora"]["generation"]]
            elif answer.status_code != 200:
                assert body is not None and body["error"]["code"] in ("adapter_exists", "model_not_found"), body
        if tiny_engine.adapters.contains("hot"):
            tiny_engine.adapters.unload("hot")
        # Its step comes after everything that was in the engine's inbox before, so rows are free by then.
        assert http.post("/v1/chat/completions", json={"model": "style", **CHAT}).status_code == 200
        stats = tiny_engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.adapters.num_cpu) == (0, 0, num_cpu)
        assert not any(tiny_engine.adapters.residency(generation) for generation in right)
    assert statuses.keys() <= {200, 400, 404} and statuses[200] > 10
    tiny_engine.check_integrity()


def test_turns_are_taken_in_order_and_leave_nothing_behind() -> None:
    turns = KeyedTurns()
    order: list[str] = []

    async def work(name: str, key: str) -> None:
        async with turns.hold(key):
            order.append(f"{name} in")
            await asyncio.sleep(0)
            order.append(f"{name} out")

    async def scene() -> None:
        tasks = [asyncio.create_task(work(name, "k")) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        other = asyncio.create_task(work("other", "o"))
        await asyncio.gather(*tasks, other, return_exceptions=True)

    asyncio.run(scene())
    assert [event for event in order if "other" not in event] == ["a in", "a out", "c in", "c out"]
    assert order.index("other in") < order.index("c in") and len(turns) == 0
