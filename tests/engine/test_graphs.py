"""Recorded steps without a device that records: the same buffers, padding and choice of sizes, computed anew at each replay."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.config import LoRAModule
from engine.graphs import StepGraphs, decode_sizes, mixed_sizes
from engine.request import AudioPart, ChatPrompt, Message, TextPart, TokenPrompt
from tests.oracles import random_ids, tone
from tests.pace import held_before

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Recomputed:
    """In the place of a `Recording`: computes at each replay what that would have recorded."""

    def __init__(self, compute: Callable[[], torch.Tensor], pool: object = None) -> None:
        compute()
        self.replay, self.pool = compute, pool


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[bool, int]]:
    """Replays by kind (whether decodes alone) and size; engines on a CPU warm up and have graphs, and compile nothing."""
    found: Counter[tuple[bool, int]] = Counter()
    launch = StepGraphs.launch

    def note(graphs: StepGraphs, size: int, is_decode: bool) -> torch.Tensor:
        found[is_decode, size] += 1
        return launch(graphs, size, is_decode)

    monkeypatch.setattr("engine.graphs.Recording", Recomputed)
    monkeypatch.setattr("engine.setup.has_graphs", lambda config, base: True)
    monkeypatch.setattr("engine.warmup.compile_kernels", lambda *args: None)
    monkeypatch.setattr("engine.warmup.compile_decoder", lambda decoder, kinds: [run(most) for run, most in kinds])
    monkeypatch.setattr(StepGraphs, "launch", note)
    return found


def make_engine(model: Path, adapters: dict[str, Path], root: Path, **settings: object) -> Engine:
    return Engine(
        EngineConfig(
            model=str(model), device="cpu", dtype="float32", max_loras=3, max_lora_rank=8, max_num_seqs=5, max_model_len=200,
            lora_modules=[LoRAModule(name, str(path)) for name, path in adapters.items()], adapter_dir=str(root), **settings,
        ),
        checks_integrity=True,
    )  # fmt: skip


def tokens(answer: Answer) -> list[int]:
    return [token_id for delta in answer for token_id in delta.token_ids]


def answers(engine: Engine, plan: list[tuple[str | None, list[int]]]) -> list[list[int]]:
    with held_before(engine, len(plan)):  # Else what shares a step, and so its size, would differ from run to run.
        started = [engine.start_sync(TokenPrompt(prompt), GREEDY, lora=name or "none")[0] for name, prompt in plan]
    return [tokens(answer) for answer in started]


@pytest.fixture
def plan() -> list[tuple[str | None, list[int]]]:
    names = [None, "qv", "all", "rs", "patterns"]
    return [(names[row % 5], random_ids(length, 100 + row)) for row, length in enumerate([1, 7, 64, 65, 12, 33, 2, 90])]


@pytest.fixture
def expected(
    llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path, plan: list[tuple[str | None, list[int]]]
) -> Iterator[list[list[int]]]:
    engine = make_engine(llama_dir, llama_adapters, tmp_path / "plain", max_num_batched_tokens=40)
    yield answers(engine, plan)
    engine.close()


def test_steps_with_prompts_and_padding_answer_as_steps_without(
    llama_dir: Path,
    llama_adapters: dict[str, Path],
    tmp_path: Path,
    plan: list[tuple[str | None, list[int]]],
    expected: list[list[int]],
    sizes: Counter[tuple[bool, int]],
) -> None:
    engine = make_engine(llama_dir, llama_adapters, tmp_path / "recorded", max_num_batched_tokens=40)
    try:
        assert dict(sizes) == {(True, size): 2 for size in (1, 2, 4, 5)} | {(False, size): 2 for size in (16, 32, 40)}
        sizes.clear()
        for _ in range(2):  # The second time through the prefix cache, and with other adapters in the rows.
            assert answers(engine, plan) == expected
        assert {size for is_decode, size in sizes if not is_decode} == {16, 32, 40}
        assert sum(sizes.values()) == engine.stats().num_steps, "a step was launched kernel by kernel"
    finally:
        engine.close()


def prompt_logprobs(engine: Engine, plan: list[tuple[str | None, list[int]]]) -> list[list[float | None]]:
    """Those of the plan's prompts, every second of which also gets an answer."""
    with held_before(engine, len(plan)):
        started = [
            engine.start_sync(
                TokenPrompt(prompt),
                SamplingParams(temperature=0, max_tokens=row % 2 * 12, ignore_eos=True, prompt_logprobs=1),
                lora=name or "none",
            )[0]
            for row, (name, prompt) in enumerate(plan)
        ]
    return [[entry and entry.logprob for delta in answer for entry in delta.prompt_logprobs] for answer in started]


def test_prompts_are_scored_in_recorded_steps_too(
    llama_dir: Path,
    llama_adapters: dict[str, Path],
    tmp_path: Path,
    plan: list[tuple[str | None, list[int]]],
    sizes: Counter[tuple[bool, int]],
) -> None:
    plain = make_engine(llama_dir, llama_adapters, tmp_path / "plain", max_num_batched_tokens=40)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepGraphs, "size_for", lambda graphs, plan: None)
            expected = prompt_logprobs(plain, plan)
    finally:
        plain.close()
    assert [len(each) for each in expected] == [len(prompt) for _, prompt in plan]
    engine = make_engine(llama_dir, llama_adapters, tmp_path / "recorded", max_num_batched_tokens=40)
    try:
        sizes.clear()
        for _ in range(2):
            found = prompt_logprobs(engine, plan)
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, abs=1e-4)
        assert sum(sizes.values()) == engine.stats().num_steps, "a step was launched kernel by kernel"
        assert {is_decode for is_decode, _ in sizes} == {False, True}
    finally:
        engine.close()


def test_tokens_of_padding_are_seen_by_nobody(
    llama_dir: Path, tmp_path: Path, sizes: Counter[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of earlier steps in the buffers, or computed for padding, must not matter, not even if it is no number."""
    decode = None

    def poison(graphs: StepGraphs, size: int, is_decode: bool) -> torch.Tensor:
        graphs._inputs[graphs._num_rows * size :] = 3
        return launch(graphs, size, is_decode)

    launch = StepGraphs.launch
    prompts: list[tuple[str | None, list[int]]] = [(None, random_ids(length, length)) for length in (5, 21, 3)]
    engine = make_engine(llama_dir, {}, tmp_path / "one", max_num_batched_tokens=40)
    try:
        one_by_one = [answers(engine, [prompt])[0] for prompt in prompts]
        monkeypatch.setattr(StepGraphs, "launch", poison)
        decode = engine.base.decode

        def spoil(embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            metadata = engine._loop._runner._attention_step.metadata
            assert metadata is not None
            is_padding = torch.tensor(
                [size == 0 for size, n in zip(metadata.kv_lens, metadata.query_lens, strict=True) for _ in range(n)]
            )
            embeddings[is_padding] = float("nan")
            assert decode is not None
            return decode(embeddings, positions)

        monkeypatch.setattr(engine.base, "decode", spoil)
        assert answers(engine, prompts) == one_by_one
    finally:
        engine.close()


def test_only_chunks_with_media_in_them_are_launched_kernel_by_kernel(
    speech_dir: Path, speech_adapters: dict[str, Path], tmp_path: Path, sizes: Counter[tuple[bool, int]]
) -> None:
    prompt = ChatPrompt([Message("user", [AudioPart((tone(0.4, 300), 16_000)), TextPart("and what " * 9)])])
    engine = make_engine(speech_dir, speech_adapters, tmp_path / "speech", max_num_batched_tokens=32)
    try:
        sizes.clear()
        [answer] = engine.start_sync(prompt, GREEDY, lora="speech")
        first = tokens(answer)
        num_steps = engine.stats().num_steps
        recorded = sum(sizes.values())
        assert 0 < num_steps - recorded < num_steps and any(not is_decode for is_decode, _ in sizes)
    finally:
        engine.close()
    plain = make_engine(speech_dir, speech_adapters, tmp_path / "plain", max_num_batched_tokens=32)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepGraphs, "size_for", lambda graphs, plan: None)
            [answer] = plain.start_sync(prompt, GREEDY, lora="speech")
            assert tokens(answer) == first
    finally:
        plain.close()


def test_sizes_go_up_to_what_a_step_may_hold() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(100)[-3:] == [80, 96, 100]
    assert mixed_sizes(40) == [16, 32, 40]
    assert mixed_sizes(8) == [8]
    assert mixed_sizes(8192)[-1] == 2048


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self
        self.alive.append(1)

    alive: ClassVar[list[int]] = []

    def __del__(self) -> None:
        self.alive.pop()


def test_nothing_is_collected_while_steps_are_recorded(
    llama_dir: Path, tmp_path: Path, sizes: Counter[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage may own memory and events of the device, and freeing those breaks the graph that is being recorded."""
    alive: list[int] = []

    def litter(graphs: StepGraphs, size: int, is_decode: bool) -> torch.Tensor:
        Cycle()
        alive.append(len(Cycle.alive))
        return launch(graphs, size, is_decode)

    launch = StepGraphs.launch
    monkeypatch.setattr(StepGraphs, "launch", litter)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        make_engine(llama_dir, {}, tmp_path).close()
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
    assert len(alive) > 4 and alive == list(range(1, len(alive) + 1))
    gc.collect()
    assert not Cycle.alive


def test_lora_knows_while_steps_are_recorded_and_not_after(
    llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path, sizes: Counter[tuple[bool, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What is tried out first must be what is recorded: else kernels are compiled in the midst of it."""
    seen: list[bool] = []

    def note(graphs: StepGraphs, size: int, is_decode: bool) -> torch.Tensor:
        seen.extend(metadata.is_recording for metadata in graphs._lora_metadata.values())
        return launch(graphs, size, is_decode)

    launch = StepGraphs.launch
    monkeypatch.setattr(StepGraphs, "launch", note)
    engine = make_engine(llama_dir, llama_adapters, tmp_path)
    try:
        assert seen and all(seen)
        seen.clear()
        answers(engine, [("all", random_ids(5, 1))])
        assert seen and not any(seen)
    finally:
        engine.close()
