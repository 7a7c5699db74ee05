"""A trainer that replaces an adapter all the time: answers are of one version each, and steps do not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest

from adapters import intake
from adapters.slots import SlotPool
from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.request import TextPrompt, TokenPrompt
from engine.runner import Runner
from tests.oracles import make_adapter, random_ids

LLAMA = "LlamaForCausalLM"
PROMPT = TokenPrompt(random_ids(40, 3))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What a trainer writes, one after the other."""
    root = tmp_path_factory.mktemp("checkpoints")
    return [make_adapter(llama_dir, LLAMA, root / str(seed), seed=seed) for seed in (31, 32, 33)]


@pytest.fixture
def engine(llama_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(model=str(llama_dir), adapter_dir=str(tmp_path), max_loras=2, max_cpu_loras=2),
        checks_integrity=True,
    )
    yield engine
    engine.close()
    engine.check_integrity()


def tokens_of(answer: Answer) -> list[int]:
    return [token_id for delta in answer for token_id in delta.token_ids]


def test_a_stream_goes_on_while_its_adapters_replacement_is_being_read(
    engine: Engine, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.adapters.load("policy", checkpoints[0])
    real, is_reading, go_on = intake.read_adapter, threading.Event(), threading.Event()

    def slow(*args: Any, **named: Any) -> Any:
        is_reading.set()
        assert go_on.wait(120)
        return real(*args, **named)

    sampling = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    alone = tokens_of(engine.start_sync(PROMPT, sampling, lora="policy")[0])
    monkeypatch.setattr(intake, "read_adapter", slow)
    answer = engine.start_sync(PROMPT, sampling, lora="policy")[0]
    events = iter(answer)
    next(events)
    trainer = threading.Thread(
        target=engine.adapters.load, args=("policy", checkpoints[1]), kwargs={"load_inplace": True}
    )
    trainer.start()
    assert is_reading.wait(120)
    tokens = [token_id for _ in range(60) for token_id in next(events).token_ids]
    assert trainer.is_alive(), "sixty tokens came while the files were being read"
    go_on.set()
    trainer.join(30)
    tokens += [token_id for delta in events for token_id in delta.token_ids]
    assert tokens == alone
    replaced = engine.start_sync(PROMPT, GREEDY, lora="policy")[0]
    assert tokens_of(replaced) != alone[:12] and replaced.receipt.cached_tokens == 0


class Stopwatch:
    """CPU time of the engine thread: of each step's computation, and of the work on adapters between two of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[float] = []
        self.adapter_work: list[float] = [0.0]
        for name in ("acquire", "release", "collect"):
            monkeypatch.setattr(SlotPool, name, self._timed(getattr(SlotPool, name), self._add_work))
        monkeypatch.setattr(Runner, "launch", self._timed(Runner.launch, self._add_step))

    def _add_work(self, seconds: float) -> None:
        self.adapter_work[-1] += seconds

    def _add_step(self, seconds: float) -> None:
        self.steps.append(seconds)
        self.adapter_work.append(0.0)

    @staticmethod
    def _timed(function: Callable[..., Any], note: Callable[[float], None]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                note(time.thread_time() - started)

        return timed


def test_a_policy_that_is_replaced_all_the_time_never_mixes_versions_nor_holds_up_a_step(
    engine: Engine, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right: dict[str, list[int]] = {}
    for folder in checkpoints:
        info = engine.adapters.load("policy", folder, load_inplace=True)
        right[str(info.generation)] = tokens_of(engine.start_sync(PROMPT, GREEDY, lora="policy")[0])
    assert len(set(map(tuple, right.values()))) == 3, "the checkpoints must differ"
    base = tokens_of(engine.start_sync(PROMPT, GREEDY)[0])

    readers, real = set(), intake.read_adapter

    def watched(*args: Any, **named: Any) -> Any:
        readers.add(threading.current_thread().name)
        return real(*args, **named)

    monkeypatch.setattr(intake, "read_adapter", watched)
    watch, is_over = Stopwatch(monkeypatch), threading.Event()
    num_replaced, seen, wrong = 0, set(), []

    def train() -> None:
        nonlocal num_replaced
        for folder in cycle(checkpoints):
            if is_over.is_set():
                return
            engine.adapters.load("policy", folder, load_inplace=True)
            num_replaced += 1

    def ask(lora: str) -> None:
        """Until there is enough to see of the trainer, which may be slower than those who ask."""
        num_asked = 0
        while not is_over.is_set() and (num_asked < 8 or not seen >= right.keys() or num_replaced <= 12):
            num_asked += 1
            answer = engine.start_sync(PROMPT, GREEDY, lora=lora)[0]
            expected = base if lora == "none" else right[str(answer.receipt.generation)]
            seen.add(answer.receipt.generation)
            if tokens_of(answer) != expected:
                wrong.append(answer.receipt)

    trainer = threading.Thread(target=train)
    clients = [threading.Thread(target=ask, args=(lora,)) for lora in ("policy", "policy", "policy", "none")]
    for thread in (trainer, *clients):
        thread.start()
    for client in clients:
        client.join(120)
    is_over.set()
    trainer.join(30)
    assert wrong == [] and seen >= right.keys() and num_replaced > 12
    assert "engine" not in readers, "a step read files"
    # The bound: what replacements add to the gap between two tokens is less than one step's own time.
    assert max(watch.adapter_work) < max(watch.steps)
    tokens_of(engine.start_sync(TextPrompt("x"), GREEDY)[0])
    stats = engine.stats()
    assert stats.adapters.num_cpu == 1 and stats.lora_rows_used <= 1 and stats.num_finished.get("error", 0) == 0


def test_a_version_that_comes_back_finds_its_own_keys_again_and_no_others(
    engine: Engine, checkpoints: list[Path]
) -> None:
    first = engine.adapters.load("policy", checkpoints[0])
    cached = []

    def ask() -> list[int]:
        answer = engine.start_sync(PROMPT, GREEDY, lora="policy")[0]
        tokens = tokens_of(answer)
        cached.append(answer.receipt.cached_tokens)
        return tokens

    old = [ask(), ask()]
    engine.adapters.load("policy", checkpoints[1], load_inplace=True)
    new = [ask(), ask()]
    engine.adapters.rollback("policy", str(first.generation))
    assert [ask()] * 2 == old and new[0] == new[1] != old[0]
    assert cached == [0, 32, 0, 32, 32]
    info = engine.adapters.get("policy")
    assert (info.prefix_query_tokens, info.prefix_hit_tokens) == (5 * 40, 3 * 32)
    assert [a.created >= b.created for a, b in pairwise(engine.adapters.versions("policy"))] == [True]
