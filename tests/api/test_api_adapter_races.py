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
import torch
from safetensors.torch import load_file, save_file

from api.turns import KeyedTurns
from engine import Engine
from tests.pace import held_after

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


def test_adapters_that_cannot_be_loaded_disturb_neither_a_stream_nor_the_server(
    http: httpx.Client, base_url: str, speech_adapters: dict[str, Path], tiny_engine: Engine, tmp_path: Path
) -> None:
    """Each is a 4xx with its reason, whatever runs; what runs goes on, and memory is what it was."""

    def broken(name: str) -> Path:
        return Path(shutil.copytree(speech_adapters["style"], tmp_path / name))

    def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **config: Any) -> Path:
        weights, path = folder / "adapter_model.safetensors", folder / "adapter_config.json"
        save_file(edit(load_file(weights)), weights)
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    config_only, cut, long_header = broken("config-only"), broken("cut"), broken("long-header")
    (config_only / "adapter_model.safetensors").unlink()
    weights = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(weights[:-100])
    (long_header / "adapter_model.safetensors").write_bytes((2**40).to_bytes(8, "little") + weights[8:])
    large = change(broken("large"), lambda tensors: {
        name: value.repeat(128, 1) if "lora_A" in name else value.repeat(1, 128) for name, value in tensors.items()
    }, r=512)  # fmt: skip
    other_base = change(broken("other-base"), lambda tensors: {
        name: torch.ones(value.shape[0], 128) if "lora_A" in name else value for name, value in tensors.items()
    })  # fmt: skip
    empty = change(broken("empty"), lambda tensors: {name: torch.empty(0) for name in tensors})
    not_numbers = change(broken("nan"), lambda tensors: {name: value * torch.nan for name, value in tensors.items()})
    long = {"messages": CHAT["messages"], "model": tiny_engine.model_names[0], "temperature": 0, "ignore_eos": True}
    expected = http.post("/v1/chat/completions", json={**long, "max_tokens": 440}).json()["choices"][0]["message"]
    before = tiny_engine.stats().adapters, tiny_engine.adapters.names()
    expected_statuses = (
        (tmp_path / "missing", 404), (config_only, 400), (cut, 400), (long_header, 400), (large, 400), (other_base, 400),
        (empty, 400), (not_numbers, 400),
    )  # fmt: skip
    with (
        held_after(tiny_engine) as let_go,
        http.stream("POST", "/v1/chat/completions", json={**long, "max_tokens": 440, "stream": True}) as stream,
    ):
        lines = stream.iter_lines()
        received = [next(lines)]
        for folder, status in expected_statuses:  # while the stream is under way, and without a step of the engine
            with httpx.Client(base_url=base_url, timeout=60) as other:
                answer = other.post("/v1/load_lora_adapter", json={"lora_name": "hot", "lora_path": str(folder)})
                assert other.get("/health").status_code == 200
            assert answer.status_code == status, (folder.name, answer.text)
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"} and "'hot'" in error["message"]
            assert str(tmp_path) not in answer.text
        let_go()
        received += list(lines)
    chunks = [json.loads(line[6:]) for line in received if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == expected["content"] and received[-2] == "data: [DONE]"
    after = tiny_engine.stats().adapters
    assert (after.num_cpu, after.cpu_bytes, tiny_engine.adapters.names()) == (
        before[0].num_cpu, before[0].cpu_bytes, before[1],
    )  # fmt: skip
    good = {"lora_name": "hot", "lora_path": str(speech_adapters["style"])}
    assert http.post("/v1/load_lora_adapter", json=good).status_code == 200


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
