"""Whatever fails inside the engine, each accepted request ends once, holds nothing then, and takes no neighbour along."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models

from engine import Engine, EngineConfig, SamplingParams, sampler
from engine.answer import Answer
from engine.config import LoRAModule
from engine.detokenizer import DecodingTable, Detokenizer, StopMatcher
from engine.errors import AppError, EngineClosed, EngineFault, InvalidRequest
from engine.loop import EngineLoop
from engine.request import AudioPart, Delta, Receipt, TextPrompt, TokenPrompt
from engine.sampler import SamplerRow
from engine.scheduler import Plan
from engine.state import EngineRequest, RequestState
from tests.oracles import random_ids, tone
from tests.pace import held_after, held_before

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def drain(answer: Answer) -> list[Delta | AppError]:
    """All events; fails where the answer never ends."""
    events: list[Delta | AppError] = []

    def read() -> None:
        try:
            events.extend(answer)
        except AppError as error:
            events.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(300)
    assert not reader.is_alive(), "the answer never got its terminal event"
    return events


def start(engine: Engine, sampling: SamplingParams = SHORT, *, seed: int = 1, **named: Any) -> Answer:
    return engine.start_sync(TokenPrompt(random_ids(40, seed)), sampling, **named)[0]


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def engine(
    request: pytest.FixtureRequest, llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path
) -> Iterator[Engine]:
    modules = [LoRAModule(name, str(path)) for name, path in llama_adapters.items()]
    config = EngineConfig(
        model=str(llama_dir), adapter_dir=str(tmp_path), lora_modules=modules, async_scheduling=request.param
    )
    engine = Engine(config, checks_integrity=True)
    yield engine
    engine.close(0.0)


def fail(*_: Any) -> Any:
    raise RuntimeError("out of memory, say")


def test_a_request_that_cannot_be_started_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_after(engine), monkeypatch.context() as patch:
        events = iter(start(engine, LONG))
        next(events)
        patch.setattr(engine._slots._writer, "write", fail)  # type: ignore[union-attr]
        bad = drain(start(engine, lora="qv"))
    assert isinstance(bad[-1], EngineFault)
    assert list(events)[-1].finish_reason == "length"
    assert drain(start(engine, lora="qv"))[-1].finish_reason == "length"  # type: ignore[union-attr]
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


def test_readers_hear_of_the_end_even_when_the_device_has_failed_for_good(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._loop._runner, "launch", fail)
    monkeypatch.setattr(engine._loop._cache, "clear", fail)
    for _ in range(2):
        assert isinstance(drain(start(engine))[-1], AppError)


def test_a_clip_that_cannot_be_encoded_takes_no_neighbour_along(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_after(tiny_engine), monkeypatch.context() as patch:
        events = iter(tiny_engine.start_sync(TextPrompt("x"), LONG)[0])
        next(events)
        patch.setattr(tiny_engine.base, "encode", fail)
        clip = AudioPart((tone(0.6, 877), 16_000))
        bad = drain(tiny_engine.start_sync(TextPrompt("<|audio|>?", [clip]), SHORT)[0])
    assert isinstance(bad[-1], EngineFault)
    assert list(events)[-1].finish_reason == "length"


def test_an_id_that_is_under_way_is_refused_and_the_first_goes_on(engine: Engine) -> None:
    with held_after(engine):
        first = start(engine, LONG, request_id="same")
        second = start(engine, seed=2, request_id="same", lora="qv")
        second.abort()
        assert isinstance(drain(second)[-1], InvalidRequest)
    assert drain(first)[-1].finish_reason == "length"  # type: ignore[union-attr]


def test_of_n_answers_none_is_left_behind_when_one_cannot_be_queued(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[EngineRequest] = []
    submit = engine._loop.submit

    def second_fails(request: EngineRequest, answer: Answer) -> None:
        submitted.append(request)
        if len(submitted) == 2:
            raise EngineClosed("closing")
        submit(request, answer)

    monkeypatch.setattr(engine._loop, "submit", second_fails)
    with held_after(engine), pytest.raises(EngineClosed):
        start(engine, LONG, lora="qv", n=3)
    monkeypatch.undo()
    drain(start(engine))
    assert engine.stats().num_finished == {"abort": 1, "length": 1}
    engine.adapters.unload("qv")
    engine.adapters.check_integrity()


def test_starting_on_a_closed_engine_says_so(engine: Engine) -> None:
    engine.close(0.0)
    with pytest.raises(EngineClosed):
        asyncio.run(engine.start(TokenPrompt([1]), SHORT))


@pytest.mark.parametrize("leave", [lambda events: events.close(), lambda events: None], ids=["close", "drop"])
def test_an_iterator_that_is_left_before_its_first_event_aborts(engine: Engine, leave: Callable[[Any], None]) -> None:
    with held_after(engine):
        events = iter(start(engine, LONG))
        leave(events)
        del events
        gc.collect()
    drain(start(engine))
    assert engine.stats().num_finished["abort"] == 1


def test_what_a_broken_request_left_in_a_block_reaches_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers gone wrong in a prompt that is aborted before they are noticed."""
    expected = [drain(start(engine, seed=seed))[-1] for seed in range(3)]
    reached = threading.Event()
    decode = type(engine.base).decode

    def poison(base: Any, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        reached.set()
        return decode(base, embeddings * float("nan"), positions)

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.base), "decode", poison)
        bad = start(engine, LONG, seed=9)
        reached.wait(120)
        bad.abort()
        drain(bad)
    again = [start(engine, seed=seed) for seed in range(3)]
    assert [drain(answer)[-1] for answer in again] == expected


def test_a_stop_string_that_the_last_token_completes_is_a_stop() -> None:
    vocab = {"<unk>": 0, "a": 1, "<0xC3>": 2, "<0xA9>": 3}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer: Any = SimpleNamespace(backend_tokenizer=backend)
    sampling, receipt = SamplingParams(max_tokens=3, stop=["é"]), Receipt(None, None, "base")
    request = EngineRequest("x", [1], (), sampling, 3, frozenset(), None, receipt)
    matcher = StopMatcher(tuple(sampling.stop))
    answer = Answer("x", receipt, [1])
    state = RequestState(request, answer, SamplerRow(sampling), Detokenizer(DecodingTable(tokenizer)), matcher, [1], [])
    scheduler: Any = SimpleNamespace(finish=lambda *_, **__: None, has_work=False)
    loop = EngineLoop(scheduler, None, None, tokenizer)  # type: ignore[arg-type]
    for token_id in (1, 2, 3):
        loop._take_token(state, token_id, None)
    events = list(answer)
    assert "".join(event.text for event in events) == "a"
    assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", "é")


def test_the_bound_on_being_passed_holds_within_one_step() -> None:
    from tests.engine.test_scheduler import _generation, _run_step, _scheduler, _state

    scheduler = _scheduler(num_blocks=500, num_rows=1, max_passes=2, max_num_seqs=64, max_num_batched_tokens=500)
    busy, rare = _generation("busy"), _generation("rare")
    scheduler.add(_state(0, [1], busy))
    _run_step(scheduler, random.Random(0))
    waiter = _state(1, [1], rare)
    scheduler.add(waiter)
    for number in range(2, 50):
        scheduler.add(_state(number, [1], busy))
    _run_step(scheduler, random.Random(0))
    assert waiter.times_passed == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"stop": ["x"] * 65},
        {"stop": "x" * 1001},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"repetition_penalty": 1e-320},
    ],
)
def test_parameters_that_would_slow_everybody_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        SamplingParams(**settings)


def fail_with(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_too_much: Callable[[Plan], bool], error: Exception
) -> list[Plan]:
    """Let the model's layers raise, after they have run, in steps that are too much; returns the steps so far."""
    launch, decode, plans = engine._loop._runner.launch, type(engine.base).decode, list[Plan]()

    def noted(plan: Plan) -> Any:
        plans.append(plan)
        return launch(plan)

    def failing(base: Any, *args: Any) -> torch.Tensor:
        hidden = decode(base, *args)
        if is_too_much(plans[-1]):
            raise error
        return hidden

    monkeypatch.setattr(engine._loop._runner, "launch", noted)
    monkeypatch.setattr(type(engine.base), "decode", failing)
    return plans


def holds_bad(plan: Plan) -> bool:
    return any(item.state.request.request_id == "bad" for item in plan.items)


SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, logprobs=1, repetition_penalty=1.1)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def start_neighbours(engine: Engine) -> list[Answer]:
    return [
        start(engine, sampling, seed=20 + number, lora=[None, "qv", "all"][number % 3])
        for number, sampling in enumerate([SEEDED, GREEDY, SEEDED, GREEDY, SEEDED])
    ]


def outcome(answer: Answer) -> tuple[list[int], str | None]:
    events = [event for event in drain(answer) if isinstance(event, Delta)]
    return [token_id for event in events for token_id in event.token_ids], events[-1].finish_reason


def check_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 503, "out_of_memory"),
        (RuntimeError("a kernel met something that it cannot do"), 500, "engine_fault"),
    ],
    ids=["memory", "other"],
)
def test_a_request_whose_step_always_fails_is_found_and_its_neighbours_lose_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, code: str
) -> None:
    expected = [outcome(answer) for answer in start_neighbours(engine)]
    with monkeypatch.context() as patch:
        plans = fail_with(engine, patch, holds_bad, error)
        with held_before(engine, 6):
            neighbours = start_neighbours(engine)
            bad = drain(start(engine, LONG, seed=9, request_id="bad", lora="rs"))
        assert [outcome(answer) for answer in neighbours] == expected
    [fault] = [event for event in bad if isinstance(event, AppError)]
    assert bad[-1] is fault and (fault.status, fault.code) == (status, code)
    assert 1 < sum(map(holds_bad, plans)) <= 2 + 3  # the step, once more, and halves of six
    assert outcome(start(engine, request_id="bad")) == outcome(start(engine))
    check_idle(engine)


def test_a_step_that_is_too_large_for_the_memory_is_computed_in_parts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [outcome(answer) for answer in start_neighbours(engine)]
    error = torch.OutOfMemoryError("CUDA out of memory.")
    plans = fail_with(engine, monkeypatch, lambda plan: len(plan.items) > 2, error)
    with held_before(engine, 5):
        assert [outcome(answer) for answer in start_neighbours(engine)] == expected
    assert max(len(plan.items) for plan in plans) > 2
    check_idle(engine)


def test_a_step_that_fails_once_costs_nobody_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [outcome(answer) for answer in start_neighbours(engine)]
    steps = iter(range(10**6))
    fail_with(engine, monkeypatch, lambda _: next(steps) % 7 == 3, RuntimeError("now and then"))
    assert [outcome(answer) for answer in start_neighbours(engine)] == expected
    check_idle(engine)


def test_a_request_whose_choice_of_a_token_fails_takes_no_neighbour_along(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault comes after random numbers were drawn: those of the neighbours are not drawn again."""
    expected = [outcome(answer) for answer in start_neighbours(engine)]
    packed = sampler._packed_logprobs

    def failing(logits: torch.Tensor, rows: list[SamplerRow], chosen: torch.Tensor) -> torch.Tensor | None:
        if any(row.params.seed == 666 for row in rows):
            raise IndexError("a parameter that nobody thought of")
        return packed(logits, rows, chosen)

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_packed_logprobs", failing)
        with held_before(engine, 6):
            neighbours = start_neighbours(engine)
            bad = drain(start(engine, SamplingParams(seed=666, max_tokens=60, ignore_eos=True), seed=9))
        assert [outcome(answer) for answer in neighbours] == expected
    assert isinstance(bad[-1], EngineFault)
    check_idle(engine)


def test_a_request_whose_text_cannot_be_made_takes_no_neighbour_along(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [outcome(answer) for answer in start_neighbours(engine)]
    push = StopMatcher.push

    def failing(matcher: StopMatcher, text: str) -> tuple[str, str | None]:
        if matcher._first_characters == {"\x00"}:
            raise UnicodeError("a text that nobody thought of")
        return push(matcher, text)

    with monkeypatch.context() as patch:
        patch.setattr(StopMatcher, "push", failing)
        with held_before(engine, 6):
            neighbours = start_neighbours(engine)
            bad = drain(start(engine, SamplingParams(stop=["\x00"], max_tokens=60, ignore_eos=True), seed=9))
        assert [outcome(answer) for answer in neighbours] == expected
    assert isinstance(bad[-1], EngineFault)
    check_idle(engine)


def test_an_adapter_whose_numbers_overflow_fails_by_name_and_takes_no_neighbour_along(
    engine: Engine, llama_adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Finite weights, but their products are not; such a request is in the batch again before it is noticed."""
    expected = [outcome(answer) for answer in start_neighbours(engine)]
    broken = shutil.copytree(llama_adapters["all"], tmp_path / "broken")
    tensors = load_file(broken / "adapter_model.safetensors")
    save_file({name: tensor * 1e25 for name, tensor in tensors.items()}, broken / "adapter_model.safetensors")
    engine.adapters.load("broken", str(broken))
    with held_before(engine, 6):
        neighbours = start_neighbours(engine)
        bad = drain(start(engine, LONG, seed=9, lora="broken"))
    assert [outcome(answer) for answer in neighbours] == expected
    fault = bad[-1]
    assert isinstance(fault, EngineFault) and "NaN" in fault.message and "'broken'" in fault.message
    check_idle(engine)
