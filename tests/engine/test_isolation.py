"""Nobody sees another's adapter: not through caches after a replacement, not in rows beside it, not after an unload."""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.errors import AdapterNotFound
from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.errors import ModelNotFound
from engine.request import AudioPart, ChatPrompt, Message, TextPart, TokenPrompt
from tests.oracles import Oracle, make_adapter, random_ids, tone

LLAMA = "LlamaForCausalLM"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
Made = Callable[..., Engine]
Answered = tuple[list[int], list[float]]


@pytest.fixture
def make(llama_dir: Path, tmp_path: Path) -> Iterator[Made]:
    engines: list[Engine] = []

    def engine(**settings: Any) -> Engine:
        values = {"model": str(llama_dir), "adapter_dir": str(tmp_path / f"own-{len(engines)}"), **settings}
        engines.append(Engine(EngineConfig(**values), checks_integrity=True))
        return engines[-1]

    yield engine
    for one in engines:
        one.close()
        one.check_integrity()


def ask(engine: Engine, prompt: Any, lora: str | None = "none", sampling: SamplingParams = GREEDY) -> Answer:
    return engine.start_sync(prompt, sampling, lora=lora)[0]


def read(answer: Answer) -> Answered:
    """Tokens and their logprobs."""
    deltas = list(answer)
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return token_ids, [entry.logprob for delta in deltas for entry in delta.logprobs]


# Caches after a replacement


@pytest.mark.parametrize("way", ["other path", "same path", "unload and load"])
def test_a_replaced_adapter_answers_as_on_a_server_that_never_saw_the_old_one(
    make: Made, llama_dir: Path, tmp_path: Path, way: str
) -> None:
    first, second = (make_adapter(llama_dir, LLAMA, tmp_path / str(seed), seed=seed) for seed in (41, 42))
    prompt = TokenPrompt(random_ids(70, 5))
    fresh = make()
    fresh.adapters.load("x", second)
    tokens, logprobs = read(ask(fresh, prompt, "x"))
    engine = make()
    engine.adapters.load("x", first)
    old = [read(ask(engine, prompt, "x")) for _ in range(2)]
    assert old[0][0] == old[1][0] != tokens
    if way == "same path":
        shutil.rmtree(first)
        shutil.copytree(second, first)
    elif way == "unload and load":
        engine.adapters.unload("x")
    engine.adapters.load("x", first if way == "same path" else second, load_inplace=way != "unload and load")
    answer = ask(engine, prompt, "x")
    again = read(answer)
    assert answer.receipt.cached_tokens == 0
    assert again[0] == tokens and again[1] == pytest.approx(logprobs, abs=1e-5)


def test_features_of_a_replaced_tower_are_computed_anew(
    speech_dir: Path, speech_adapters: dict[str, Path], make: Made, tmp_path: Path
) -> None:
    everything = r".*\.(q_proj|up_proj|to_q|to_kv|query|key|linear)"
    other = make_adapter(
        speech_dir, "GraniteSpeechForConditionalGeneration", tmp_path / "tower", targets=everything, rank=3, seed=50
    )
    prompt = ChatPrompt([Message("user", [AudioPart((tone(0.5), 16_000)), TextPart("what?")])])
    fresh, engine = (make(model=str(speech_dir)) for _ in range(2))
    fresh.adapters.load("x", other)
    expected = read(ask(fresh, prompt, "x"))
    engine.adapters.load("x", speech_adapters["tower"])
    old = read(ask(engine, prompt, "x"))
    misses = engine.stats().encoder_misses
    engine.adapters.load("x", other, load_inplace=True)
    new = read(ask(engine, prompt, "x"))
    assert new[1] == pytest.approx(expected[1], abs=1e-4) and new[1] != pytest.approx(old[1], abs=1e-4)
    assert engine.stats().encoder_misses == misses + 1


def test_equal_content_under_two_names_shares_cached_keys_and_base_shares_none(
    make: Made, llama_adapters: dict[str, Path]
) -> None:
    engine = make()
    for name in ("x", "y"):
        engine.adapters.load(name, llama_adapters["qv"])
    cached = []
    for lora in ("none", "x", "y", "none", "x"):
        answer = ask(engine, TokenPrompt(random_ids(50, 6)), lora)
        read(answer)
        cached.append(answer.receipt.cached_tokens)
    assert cached == [0, 0, 48, 48, 48]
    hits = {info.name: (info.prefix_query_tokens, info.prefix_hit_tokens) for info in engine.adapters.list()}
    assert hits == {"x": (100, 48), "y": (50, 48)}


# Rows beside an adapter


def test_base_answers_are_the_same_before_beside_and_after_a_strong_adapter(
    make: Made, llama_dir: Path, tmp_path: Path
) -> None:
    strong = make_adapter(llama_dir, LLAMA, tmp_path / "strong", targets="all-linear", rank=4, alpha=80, seed=7)
    engine = make(enable_prefix_caching=False)
    short, long = TokenPrompt(random_ids(1, 8)), TokenPrompt(random_ids(200, 9))
    before = [read(ask(engine, prompt)) for prompt in (short, long)]
    engine.adapters.load("strong", strong)
    adapted = read(ask(engine, long, "strong"))
    assert adapted[1] != pytest.approx(before[1][1], abs=0.1), "the adapter must be felt"
    assert [read(ask(engine, prompt)) for prompt in (short, long)] == before, "bit for bit, when alone again"
    for others in ([short, long], [long, short]):
        answers = [ask(engine, prompt, lora) for prompt in others for lora in ("strong", "none")]
        read(answers[0])
        read(answers[2])
        for answer, prompt in ((answers[1], others[0]), (answers[3], others[1])):
            tokens, logprobs = before[[short, long].index(prompt)]
            got = read(answer)
            assert got[0] == tokens and got[1] == pytest.approx(logprobs, abs=1e-4)
    engine.adapters.unload("strong")
    assert [read(ask(engine, prompt)) for prompt in (short, long)] == before


@pytest.fixture(scope="module")
def mixed(
    llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, dict[tuple[str, int], list[int]]]]:
    """An engine with adapters of rank 4, 8 and 64, and PEFT's own answers by adapter and prompt length."""
    root = tmp_path_factory.mktemp("mixed")
    folders = {
        "A": make_adapter(llama_dir, LLAMA, root / "A", targets=["q_proj", "v_proj"], rank=4, seed=61),
        "B": make_adapter(llama_dir, LLAMA, root / "B", targets="all-linear", rank=8, alpha=6, seed=62, std=0.2),
        "C": make_adapter(llama_dir, LLAMA, root / "C", targets=["k_proj", "down_proj"], rank=64, alpha=16, seed=63),
    }
    oracle = Oracle(llama_dir, LLAMA, folders)
    right = {
        (name, length): oracle.generate(random_ids(length, length), 4, None if name == "none" else name)
        for name in ("none", *folders)
        for length in (1, 7, 64, 65)
    }
    assert len(set(map(tuple, right.values()))) == 16, "each adapter must change each answer"
    engine = Engine(
        EngineConfig(
            model=str(llama_dir), adapter_dir=str(root / "own"), max_loras=3, max_num_batched_tokens=70, max_num_seqs=6,
        ),
        checks_integrity=True,
    )  # fmt: skip
    for name, folder in folders.items():
        engine.adapters.load(name, folder)
    yield engine, right
    engine.close()


def check_batch(mixed: tuple[Engine, dict[tuple[str, int], list[int]]], plan: list[tuple[str, int]]) -> None:
    engine, right = mixed
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answers = [ask(engine, TokenPrompt(random_ids(length, length)), name, sampling) for name, length in plan]
    assert [read(answer)[0] for answer in answers] == [right[each] for each in plan], plan


@pytest.mark.parametrize("order", ["AAB", "ABA", "AA-A", "-A-", "BBBA", "CAB-", "-CC-"])
def test_each_order_of_adapters_in_a_batch_gives_each_its_own(mixed: Any, order: str) -> None:
    lengths = [64, 1, 65, 7]
    for shift in range(4):
        plan = [("none" if name == "-" else name, lengths[(index + shift) % 4]) for index, name in enumerate(order)]
        check_batch(mixed, plan)


def test_two_hundred_random_batches_give_each_its_own(mixed: Any) -> None:
    chance = random.Random(0)
    each = [*mixed[1]]
    for _ in range(200):
        check_batch(mixed, chance.choices(each, k=chance.randint(1, 6)))


# After an unload


def test_unloading_frees_row_memory_and_name(make: Made, llama_adapters: dict[str, Path]) -> None:
    engine = make(max_loras=2, max_cpu_loras=2)
    for name in ("qv", "all", "rs"):
        engine.adapters.load(name, llama_adapters[name])
        read(ask(engine, TokenPrompt([1, 2, 3]), name))
    assert engine.stats().lora_rows_used == 2 and engine.stats().adapters.num_cpu == 2
    digest = str(engine.adapters.get("all").generation)
    assert engine.adapters.residency(digest)
    held = ask(engine, TokenPrompt([1, 2, 3]), "all", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    events = iter(held)
    next(events)
    engine.adapters.unload("all")
    with pytest.raises((ModelNotFound, AdapterNotFound)):
        ask(engine, TokenPrompt([1, 2, 3]), "all")
    assert len([token_id for delta in events for token_id in delta.token_ids]) == 60, "what ran on it ends on it"
    read(ask(engine, TokenPrompt([1])))
    assert not engine.adapters.residency(digest) and engine.stats().lora_rows_used == 1
    assert engine.stats().adapters.num_cpu == 1 and engine.adapters.names() == ["qv", "rs"]


@pytest.mark.parametrize("others_first", [False, True])
def test_answers_that_begin_after_their_adapter_was_unloaded_leave_no_row_behind(
    make: Made, llama_adapters: dict[str, Path], others_first: bool
) -> None:
    """They waited with the adapter in hand, so they take a row again; with the last of them it is free."""
    engine = make(max_loras=2, max_num_seqs=1)
    engine.adapters.load("all", llama_adapters["all"])
    digest = str(engine.adapters.get("all").generation)
    names = ["none", "all", "all"] if others_first else ["all", "none", "all"]
    answers = [ask(engine, TokenPrompt([1, 2, 3]), name) for name in names]
    engine.adapters.unload("all")
    assert all(read(answer)[0] for answer in answers)
    read(ask(engine, TokenPrompt([1])))
    assert engine.stats().lora_rows_used == 0 and not engine.adapters.residency(digest)


def test_a_hundred_cycles_of_load_answer_and_unload_leave_nothing(make: Made, llama_adapters: dict[str, Path]) -> None:
    engine = make(max_loras=2, max_cpu_loras=2)
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    expected = {}

    def cycle(name: str) -> None:
        engine.adapters.load("x", llama_adapters[name])
        tokens = read(ask(engine, TokenPrompt([5, 6, 7]), "x", sampling))[0]
        assert expected.setdefault(name, tokens) == tokens
        engine.adapters.unload("x")

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    for name in llama_adapters:
        cycle(name)
    read(ask(engine, TokenPrompt([1])))
    before = num_tensors()
    for number in range(100):
        cycle([*llama_adapters][number % len(llama_adapters)])
    read(ask(engine, TokenPrompt([1])))
    stats = engine.stats()
    assert num_tensors() <= before and stats.adapters.num_cpu == 0
    assert (stats.lora_rows_used, stats.kv_blocks_used) == (0, 0)
