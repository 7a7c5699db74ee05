"""Scheduling without a model: nothing leaks on random walks, adapters get their turn, budgets hold."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.slots import SlotPool
from engine.block_pool import BlockPool
from engine.request import Receipt, SamplingParams
from engine.scheduler import AdmissionFault, Plan, Scheduler
from engine.state import EngineRequest, MediaInput, MediaSpan, RequestState, Status


class _Writer:
    """Rows without tensors."""

    def write(self, lora_slot: int, generation: Any) -> None: ...
    def clear(self, lora_slot: int) -> None: ...


class _Copy:
    """A copy into a row that ends when the test says so, or when the scheduler waits for it."""

    def __init__(self) -> None:
        self.is_done = self.is_broken = False
        self.num_waits = 0

    def is_ready(self) -> bool:
        if self.is_broken:
            raise RuntimeError("out of memory")
        return self.is_done

    def has_failed(self) -> bool:
        return self.is_broken

    def wait(self) -> None:
        self.num_waits += 1
        self.is_done = self.is_ready() or True


class _SlowWriter(_Writer):
    """Rows that are filled in the background."""

    def __init__(self) -> None:
        self.copies: dict[str, _Copy] = {}

    def write(self, lora_slot: int, generation: Any) -> _Copy:  # type: ignore[override]
        self.copies[generation.digest] = _Copy()
        return self.copies[generation.digest]


def _generation(digest: str) -> Any:
    return SimpleNamespace(digest=digest, num_bytes=1, name=digest)


def _state(number: int, prompt: list[int], generation: Any = None, max_tokens: int = 1000) -> RequestState:
    handle = None if generation is None else SimpleNamespace(generation=generation, release=lambda: None)
    request = EngineRequest(
        request_id=str(number), prompt_token_ids=prompt, spans=(), sampling=SamplingParams(), max_tokens=max_tokens,
        eos_token_ids=frozenset(), handle=handle, receipt=Receipt(None, None, "base"),  # type: ignore[arg-type]
    )  # fmt: skip
    unused: Any = None
    return RequestState(
        request=request,
        answer=unused, sampler_row=unused, detokenizer=unused, stop_matcher=unused,
        token_ids=list(prompt), output_token_ids=[],
    )  # fmt: skip


def _generation_of(state: RequestState) -> Any:
    return None if state.request.handle is None else state.request.handle.generation


def _scheduler(num_blocks: int = 30, num_rows: int = 2, writer: Any = None, **settings: Any) -> Scheduler:
    defaults: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 20, "block_size": 4}
    return Scheduler(BlockPool(num_blocks), SlotPool(num_rows, writer or _Writer()), **{**defaults, **settings})


def _run_step(scheduler: Scheduler, chooser: random.Random) -> list[RequestState]:
    plan = scheduler.schedule()
    assert plan is not None and plan.num_tokens <= scheduler.max_num_batched_tokens
    assert len({id(item.state) for item in plan.items}) == len(plan.items) <= scheduler.max_num_seqs
    assert [item.state.lora_slot for item in plan.items] == sorted(item.state.lora_slot for item in plan.items)
    scheduler.advance(plan)
    scheduler.commit(plan)
    sampled = [item.state for item in plan.items if item.is_sampled]
    for state in sampled:
        state.append(chooser.randrange(3))
    scheduler.check_integrity()
    return sampled


@pytest.mark.parametrize("seed", range(5))
def test_random_walks_leak_nothing_and_everyone_ends(seed: int) -> None:
    chooser = random.Random(seed)
    scheduler = _scheduler()
    generations = [None, None, *[_generation(name) for name in "abcde"]]
    open_states: list[RequestState] = []
    number = 0
    for _ in range(1500):
        if number < 300 and chooser.random() < 0.3:
            prompt = [chooser.randrange(3) for _ in range(chooser.randint(1, 60))]
            state = _state(number, prompt, chooser.choice(generations))
            scheduler.add(state)
            open_states.append(state)
            number += 1
        for state in _run_step(scheduler, chooser):
            if state.num_outputs >= 10 or chooser.random() < 0.1:
                scheduler.finish(state)
        if open_states and chooser.random() < 0.05:
            scheduler.finish(chooser.choice(open_states))
        scheduler.check_integrity()
        open_states = [state for state in open_states if state.status is not Status.FINISHED]
    for _ in range(5000):
        if not scheduler.has_work:
            break
        for state in _run_step(scheduler, chooser):
            if state.num_outputs >= 10:
                scheduler.finish(state)
    assert not scheduler.has_work and number == 300
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable
    assert scheduler.num_preemptions > 0 and scheduler.prefix_hit_tokens > 0


def test_the_oldest_request_is_never_preempted() -> None:
    scheduler = _scheduler(num_blocks=11)
    states = [_state(number, [number] * 10) for number in range(4)]
    for state in states:
        scheduler.add(state)
    chooser = random.Random(0)
    for _ in range(25):
        for state in _run_step(scheduler, chooser):
            if state.num_outputs >= 20:
                scheduler.finish(state)
    assert scheduler.num_preemptions > 0
    assert states[0].num_preemptions == 0 and states[0].status is Status.FINISHED


def test_decodes_come_before_prompts_under_the_budget() -> None:
    scheduler = _scheduler(max_num_batched_tokens=6)
    first, second = _state(0, [1] * 5), _state(1, [2] * 30)
    scheduler.add(first)
    chooser = random.Random(0)
    _run_step(scheduler, chooser)
    scheduler.add(second)
    for _ in range(4):
        before = second.num_computed
        assert first in _run_step(scheduler, chooser)
        assert second.num_computed - before == 5


def test_an_adapter_waits_a_bounded_time_while_others_keep_coming() -> None:
    scheduler = _scheduler(num_blocks=200, num_rows=1, max_passes=5, max_num_seqs=4)
    busy, rare = _generation("busy"), _generation("rare")
    chooser = random.Random(0)
    number = 0
    for _ in range(3):
        scheduler.add(_state(number, [1, 2], busy))
        number += 1
    _run_step(scheduler, chooser)
    waiter = _state(1000, [1, 2], rare)
    scheduler.add(waiter)
    started_after = None
    for step in range(60):
        scheduler.add(_state(number, [1, 2], busy))
        number += 1
        for state in _run_step(scheduler, chooser):
            if state.num_outputs >= 4:
                scheduler.finish(state)
        if waiter.status is Status.RUNNING:
            started_after = step
            break
    assert started_after is not None, "the rare adapter starved"
    assert waiter.times_passed <= 5 + scheduler.max_num_seqs


def test_base_requests_pass_an_adapter_that_waits_for_a_row() -> None:
    scheduler = _scheduler(num_rows=1, max_passes=1)
    chooser = random.Random(0)
    scheduler.add(_state(0, [1, 2], _generation("a")))
    _run_step(scheduler, chooser)
    scheduler.add(_state(1, [1, 2], _generation("b")))
    for number in range(2, 5):
        base = _state(number, [3, 4])
        scheduler.add(base)
        assert base in _run_step(scheduler, chooser)


def test_other_adapters_content_never_shares_cached_blocks() -> None:
    scheduler = _scheduler(num_blocks=100, num_rows=2)
    chooser = random.Random(0)
    prompt = [1] * 17
    for generation, expected in (
        (None, 0),
        (None, 16),
        (_generation("a"), 0),
        (_generation("a"), 16),
        (_generation("b"), 0),
    ):
        before = scheduler.prefix_hit_tokens
        state = _state(chooser.randrange(10**9), prompt, generation)
        scheduler.add(state)
        _run_step(scheduler, chooser)
        assert scheduler.prefix_hit_tokens - before == expected
        scheduler.finish(state)


@pytest.mark.parametrize("seed", range(5))
def test_running_a_step_ahead_leaks_nothing_and_loses_no_token(seed: int) -> None:
    """Each step is planned while the one before it is in flight, and requests end in between."""
    chooser = random.Random(seed)
    scheduler = _scheduler(num_blocks=16)
    states = [_state(number, [number % 3] * chooser.randint(1, 30), max_tokens=5) for number in range(40)]
    in_flight: Plan | None = None
    waiting = list(states)
    num_refused = 0
    while waiting or scheduler.has_work or in_flight is not None:
        if waiting and chooser.random() < 0.4:
            scheduler.add(waiting.pop())
        plan = scheduler.schedule(may_preempt=in_flight is None)
        if plan is not None:
            assert all(item.state.num_in_flight == 0 or item.is_sampled for item in plan.items)
            assert all(item.state.num_outputs + item.state.num_in_flight < 5 for item in plan.items)
            scheduler.advance(plan)
        else:
            num_refused += 1
        if in_flight is not None:
            scheduler.commit(in_flight)
            for item in in_flight.items:
                if item.is_sampled and item.state.status is not Status.FINISHED:
                    item.state.append(chooser.randrange(3))
                    if item.state.num_outputs == 5 or chooser.random() < 0.1:
                        scheduler.finish(item.state)
        in_flight = plan if plan is not None and plan.items else None
        scheduler.check_integrity()
    assert all(state.status is Status.FINISHED and 1 <= state.num_outputs <= 5 for state in states)
    assert all(state.num_in_flight == 0 for state in states)
    assert scheduler.num_preemptions > 0 and num_refused > 0, "room never ran out, so half of this was not tried"


def test_no_request_runs_on_a_row_that_is_being_filled_and_others_run_meanwhile() -> None:
    writer, chooser = _SlowWriter(), random.Random(0)
    scheduler = _scheduler(num_rows=2, writer=writer, max_passes=2)
    base, cold = _state(0, [1, 2]), _state(1, [1, 2], _generation("a"))
    scheduler.add(base)
    _run_step(scheduler, chooser)
    scheduler.add(cold)
    for number in range(2, 6):
        late = _state(number, [3])
        scheduler.add(late)
        assert _run_step(scheduler, chooser) == [base, late]
        assert cold.status is Status.WAITING and cold.lora_slot >= 0 and cold.times_passed == 0
        scheduler.finish(late)
    assert writer.copies["a"].num_waits == 0
    writer.copies["a"].is_done = True
    assert set(map(id, _run_step(scheduler, chooser))) == {id(base), id(cold)}


def test_a_row_that_is_being_filled_is_not_taken_by_a_younger_request() -> None:
    writer, chooser = _SlowWriter(), random.Random(0)
    scheduler = _scheduler(num_rows=1, writer=writer)
    base, first, second = _state(0, [1, 2]), _state(1, [1, 2], _generation("a")), _state(2, [1, 2], _generation("b"))
    for state in (base, first, second):
        scheduler.add(state)
    assert _run_step(scheduler, chooser) == [base] == _run_step(scheduler, chooser)
    writer.copies["a"].is_done = True
    assert set(map(id, _run_step(scheduler, chooser))) == {id(base), id(first)} and "b" not in writer.copies
    scheduler.finish(first)
    assert _run_step(scheduler, chooser) == [base] and second.lora_slot == 0
    writer.copies["b"].is_done = True
    assert set(map(id, _run_step(scheduler, chooser))) == {id(base), id(second)}


def test_a_step_waits_for_a_copy_only_where_nothing_else_could_run() -> None:
    writer, chooser = _SlowWriter(), random.Random(0)
    scheduler = _scheduler(num_rows=2, writer=writer)
    first, second = _state(0, [1, 2], _generation("a")), _state(1, [1, 2], _generation("b"))
    scheduler.add(first)
    scheduler.add(second)
    assert _run_step(scheduler, chooser) == [first]
    assert writer.copies["a"].num_waits == 1 and writer.copies["b"].num_waits == 0
    assert _run_step(scheduler, chooser) == [first]
    scheduler.finish(first)
    assert _run_step(scheduler, chooser) == [second] and writer.copies["b"].num_waits == 1


def test_an_aborted_request_gives_the_row_back_while_it_is_being_filled() -> None:
    writer, chooser = _SlowWriter(), random.Random(0)
    scheduler = _scheduler(num_rows=1, writer=writer)
    base, cold, other = _state(0, [1, 2]), _state(1, [1, 2], _generation("a")), _state(2, [1], _generation("b"))
    scheduler.add(base)
    scheduler.add(cold)
    _run_step(scheduler, chooser)
    scheduler.finish(cold)
    scheduler.check_integrity()
    scheduler.add(other)
    _run_step(scheduler, chooser)
    assert cold.lora_slot == -1 and scheduler.slots is not None and scheduler.slots.resident() == {"b": 0}


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_copy_that_fails_fails_the_requests_that_need_it_and_no_other(is_alone: bool) -> None:
    writer, chooser = _SlowWriter(), random.Random(0)
    scheduler = _scheduler(num_rows=1, writer=writer)
    cold = [_state(number, [1, 2], _generation("a")) for number in (1, 2)]
    base = _state(0, [1, 2])
    if not is_alone:
        scheduler.add(base)
        _run_step(scheduler, chooser)
        for state in cold:
            scheduler.add(state)
        _run_step(scheduler, chooser)
        assert len(writer.copies) == 1 and all(state.lora_slot == 0 for state in cold)
        writer.copies["a"].is_broken = True
    else:
        writer.write = lambda lora_slot, generation: broken  # type: ignore[method-assign]
        broken = _Copy()
        broken.is_broken = True
        for state in cold:
            scheduler.add(state)
    for state in cold:
        with pytest.raises(AdmissionFault) as caught:
            scheduler.schedule()
        assert caught.value.state is state
        scheduler.finish(state)
        scheduler.check_integrity()
    assert scheduler.slots is not None and scheduler.slots.resident() == {}
    if not is_alone:
        assert _run_step(scheduler, chooser) == [base]


def test_a_request_without_room_for_its_keys_gives_its_row_back() -> None:
    writer, chooser = _Writer(), random.Random(0)
    scheduler = _scheduler(num_blocks=4, num_rows=1, writer=writer)
    big, cold = _state(0, [1] * 11), _state(1, [2] * 9, _generation("a"))
    scheduler.add(big)
    scheduler.add(cold)
    _run_step(scheduler, chooser)
    assert big.status is Status.RUNNING and cold.status is Status.WAITING and cold.lora_slot == -1


def _most_overtaken(max_passes: int) -> int:
    """Six adapters, two of them popular, on two rows: by how many later adapter requests was any request overtaken?"""
    chooser = random.Random(3)
    scheduler = _scheduler(
        num_rows=2, max_passes=max_passes, num_blocks=400, max_num_seqs=12, max_num_batched_tokens=60
    )
    generations = [_generation(name) for name in "abcdef"]
    popular = generations[:2]
    # in the order of their arrival, each with the number of later adapter requests that started before it
    waiting: list[RequestState] = []
    overtaken: dict[str, int] = {}
    most, number = 0, 0
    for _ in range(600):
        while sum(_generation_of(state) in popular for state in waiting) < 12:
            generation = chooser.choice([*popular * 6, None, *generations])
            waiting.append(_state(number, [chooser.randrange(3) for _ in range(3)], generation))
            scheduler.add(waiting[-1])
            number += 1
        for state in _run_step(scheduler, chooser):
            if state.num_outputs >= 2 + int(state.request.request_id) % 5:
                scheduler.finish(state)
        num_later = 0
        for state in reversed(waiting):
            if state.request.handle is None:
                continue
            if state.status is not Status.WAITING:
                num_later += 1
                continue
            name = state.request.request_id
            overtaken[name] = overtaken.get(name, 0) + num_later
            most = max(most, overtaken[name])
        waiting = [state for state in waiting if state.status is Status.WAITING]
    assert number > 500 and scheduler.num_preemptions == 0
    return most


@pytest.mark.parametrize("max_passes", [0, 3, 8])
def test_with_more_adapters_than_rows_nobody_is_overtaken_more_often_than_the_bound(max_passes: int) -> None:
    assert _most_overtaken(max_passes) <= max_passes


def test_without_the_bound_rare_adapters_would_be_overtaken_far_more_often() -> None:
    assert _most_overtaken(max_passes=10**9) > 20


def test_a_span_whose_tokens_see_each_other_is_never_cut() -> None:
    """Chunks end before it or after it; neighbours fill what it leaves of the budget, and it comes in the end."""
    media = MediaInput("image", {}, 12, "image", is_mutual=True)
    spans = (MediaSpan(5, media), MediaSpan(17, media), MediaSpan(40, media))
    scheduler = _scheduler(num_blocks=60, max_num_batched_tokens=18)
    whole = _state(0, list(range(60)))
    whole.request = replace(whole.request, spans=spans)
    scheduler.add(whole)
    for number in (1, 2, 3):
        scheduler.add(_state(number, list(range(100 * number, 100 * number + 25)), max_tokens=3))
    ends: list[int] = []
    for _ in range(40):
        plan = scheduler.schedule()
        assert plan is not None and plan.items and plan.num_tokens <= 18
        ends += [item.end for item in plan.items if item.state is whole]
        scheduler.advance(plan)
        scheduler.commit(plan)
        for item in plan.items:
            if item.is_sampled:
                item.state.append(1)
                if item.state.num_outputs >= item.state.request.max_tokens:
                    scheduler.finish(item.state)
        scheduler.check_integrity()
    assert not any(span.start < end < span.end for span in spans for end in ends)
    assert whole.num_outputs > 0 and not any(state.num_computed == 0 for state in scheduler.all_states())
