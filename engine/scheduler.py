"""Decides what one step computes: which requests, how many tokens of each, with which blocks and adapters.

Owns the waiting and running requests, and through the pools their KV blocks and LoRA rows. Decodes come first, then the
prompts under way, then new requests, all under one token budget. When blocks run out, the youngest request is put back
and computed again later. Knows nothing of tensors or text. Called by `engine/loop` on the engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.block_pool import BlockPool
from engine.state import MediaSpan, RequestState, Status

if TYPE_CHECKING:
    from adapters.slots import SlotPool


class PlanItem(NamedTuple):
    """Compute tokens [start, end) of a request; `is_sampled` when they end with its newest, so that the next is chosen.

    The newest token may be in flight: sampled by the step before, and not known on the host yet.
    """

    state: RequestState
    start: int
    end: int
    is_sampled: bool

    def media(self) -> Iterator[tuple[MediaSpan, int, int]]:
        """Spans of media that the tokens touch, each with the first place of theirs in it and the one after the last."""
        for span in self.state.request.spans:
            start, end = max(span.start, self.start), min(span.end, self.end)
            if start < end:
                yield span, start, end

    def scored(self) -> range:
        """Prompt tokens whose log probabilities are wanted and follow from these tokens' hidden states: the token after each.

        Those that are known are left out: after a preemption tokens are computed again.
        """
        num_known = self.state.num_scored
        if num_known is None:
            return range(0)
        return range(max(self.start + 1, num_known), min(self.end + 1, self.state.prompt_len))


def _item(state: RequestState, num_tokens: int) -> PlanItem:
    end = state.num_computed + num_tokens
    return PlanItem(state, state.num_computed, end, is_sampled=end == state.num_tokens)


def _chunk_len(state: RequestState, start: int, num_tokens: int) -> int:
    """As many of `num_tokens` tokens from `start` on as one step may compute; 0 where they must wait for a larger budget."""
    return state.request.end_of_chunk(start, start + num_tokens) - start


@dataclass
class Plan:
    """One step's work, ordered by LoRA row (base first), so that an adapter's tokens are one segment."""

    items: list[PlanItem] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """T, the packed tokens of the step."""
        return sum(item.end - item.start for item in self.items)


class AdmissionFault(Exception):
    """A waiting request could not be started, for a reason that is its own; it waits still, and should be failed."""

    def __init__(self, state: RequestState) -> None:
        super().__init__(f"request {state.request.request_id} could not be started")
        self.state = state


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse, preemption and fair use of LoRA rows.

    A request whose adapter finds no free row lets later ones pass, but at most `max_passes` of them; from then on no
    request may take or prolong a row before it (base requests still may), so it waits at most for the requests that
    run at that moment.

    Args:
        blocks: the KV block pool.
        slots: the LoRA rows, None when adapters are off.
        max_num_seqs: most requests in a step; no more than the token budget, so that each gets its token.
        max_num_batched_tokens: token budget of a step.
        block_size: tokens in a block.
        max_passes: see above.
    """

    def __init__(
        self,
        blocks: BlockPool,
        slots: SlotPool | None,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        block_size: int,
        max_passes: int = 64,
    ) -> None:
        self.blocks = blocks
        self.slots = slots
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_size = block_size
        self.max_passes = max_passes
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, state: RequestState) -> None:
        """Queue a new request."""
        self.waiting.append(state)

    def finish(self, state: RequestState, *, keep_content: bool = True) -> None:
        """Take a request out, wherever it is, and free all it holds but its adapter handle (the loop's)."""
        if state.status is Status.RUNNING:
            self.running.remove(state)
            self._free(state, keep_content=keep_content)
        elif state.status is Status.WAITING:
            self.waiting.remove(state)
            self._release_row(state)
        state.status = Status.FINISHED
        state.media_features.clear()

    def forget(self, state: RequestState) -> None:
        """Drop a request that could not be finished in order; what it held may be lost."""
        self.running = [other for other in self.running if other is not state]
        self.waiting = deque(other for other in self.waiting if other is not state)
        state.status = Status.FINISHED

    def schedule(self, *, may_preempt: bool = True) -> Plan | None:
        """The next step's plan; empty when nothing can run.

        Args:
            may_preempt: False while a step is in flight, whose requests must keep what they hold; the answer is None
                then where only a preemption makes room.

        Raises:
            AdmissionFault: a new request could not be started; all others are as they were.
        """
        plan: dict[int, PlanItem] = {}
        preempted: list[RequestState] = []
        budget = self.max_num_batched_tokens
        for state in sorted(self.running, key=lambda state: state.num_pending > 1):
            if budget == 0:
                break
            if state.status is not Status.RUNNING or state.is_sampled_out:
                continue
            num_tokens = _chunk_len(state, state.num_computed, min(state.num_pending, budget))
            if num_tokens == 0:
                continue
            while not self._grow(state, state.num_computed + num_tokens):
                if not may_preempt:
                    return None
                victim = max(self.running, key=lambda other: other.submitted_at)
                self._preempt(victim)
                preempted.append(victim)
                item = plan.pop(id(victim), None)
                if item is not None:
                    budget += item.end - item.start
                if victim is state:
                    break
            else:
                plan[id(state)] = _item(state, num_tokens)
                budget -= num_tokens
        if not preempted:
            self._admit(plan, budget)
            if not self.running and self._await_row():  # Only where no step could run meanwhile.
                self._admit(plan, budget)
        items = sorted(plan.values(), key=lambda item: item.state.lora_slot)
        return Plan(items, preempted)

    def advance(self, plan: Plan) -> None:
        """Record that the plan's step was launched: the next one may follow it on the device."""
        flight_row = 0
        for item in plan.items:
            item.state.num_computed = item.end
            if item.is_sampled:
                item.state.num_in_flight += 1
                item.state.flight_row = flight_row
                flight_row += 1

    def commit(self, plan: Plan) -> None:
        """Record that the plan's step has run, and offer the blocks that it filled to later prompts.

        Requests that ended meanwhile are passed over. Call it before the step's tokens are appended.
        """
        for item in plan.items:
            state = item.state
            if item.is_sampled:
                state.num_in_flight -= 1
            if state.status is not Status.RUNNING:
                continue
            num_full = item.end // self.block_size
            if num_full > state.num_published and self.blocks.enable_prefix_caching:
                state.update_hashes(self.block_size)
                for index in range(state.num_published, num_full):
                    self.blocks.publish(state.blocks[index], state.block_hashes[index])
                state.num_published = num_full

    def _admit(self, plan: dict[int, PlanItem], budget: int) -> None:
        """Start waiting requests, oldest first, while there is room."""
        passed: list[RequestState] = []
        rows_are_closed = False
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            state = self.waiting.popleft()
            if not self._may_take_row(state, rows_are_closed):
                passed.append(state)
                rows_are_closed = rows_are_closed or state.times_passed >= self.max_passes
                continue
            try:
                if not self._take_row(state):
                    passed.append(state)
                    continue
                matched = self._match_prefix(state)
                num_cached = len(matched) * self.block_size
                num_tokens = _chunk_len(state, num_cached, min(len(state.token_ids) - num_cached, budget))
                has_room = num_tokens > 0 and self._start(state, matched, num_tokens)
            except Exception as error:
                self.waiting.extendleft([state, *reversed(passed)])
                raise AdmissionFault(state) from error
            if not has_room:
                self._release_row(state)
                self.waiting.appendleft(state)
                break
            for earlier in passed:
                if earlier.lora_slot >= 0:
                    continue  # It has its row, and waits for the copy alone.
                earlier.times_passed += 1
                rows_are_closed = rows_are_closed or earlier.times_passed >= self.max_passes
            plan[id(state)] = _item(state, num_tokens)
            budget -= num_tokens
        self.waiting.extendleft(reversed(passed))

    def _await_row(self) -> bool:
        """Wait for the oldest request whose row is being filled; False where there is none."""
        state = next((state for state in self.waiting if state.lora_slot >= 0), None)
        if state is None:
            return False
        assert self.slots is not None and state.request.handle is not None
        try:
            self.slots.wait(state.request.handle.generation)
        except Exception as error:
            raise AdmissionFault(state) from error
        return True

    def _may_take_row(self, state: RequestState, rows_are_closed: bool) -> bool:
        handle = state.request.handle
        if handle is None or state.lora_slot >= 0:
            return True
        assert self.slots is not None, "a request holds an adapter although adapters are off"
        return not rows_are_closed and self.slots.can_acquire(handle.generation)

    def _take_row(self, state: RequestState) -> bool:
        """Hold a row for the request's adapter; False while it is being filled, so that no step waits for a copy."""
        if state.request.handle is None:
            return True
        assert self.slots is not None
        if state.lora_slot < 0:
            lora_slot = self.slots.acquire(state.request.handle.generation)
            assert lora_slot is not None, "a LoRA row was promised and is gone"
            state.lora_slot = lora_slot
        return self.slots.is_ready(state.request.handle.generation)

    def _release_row(self, state: RequestState) -> None:
        if state.lora_slot >= 0:
            assert self.slots is not None and state.request.handle is not None
            self.slots.release(state.request.handle.generation)
            state.lora_slot = -1

    def _match_prefix(self, state: RequestState) -> list[int]:
        """Cached blocks of the request's beginning, up to the first token whose hidden state is needed."""
        state.update_hashes(self.block_size)
        return self.blocks.match(state.block_hashes[: state.num_reusable // self.block_size])

    def _start(self, state: RequestState, matched: list[int], num_tokens: int) -> bool:
        """Give a waiting request its blocks; no change and False when there are not enough."""
        num_cached = len(matched) * self.block_size
        num_new = self._num_blocks(num_cached + num_tokens) - len(matched)
        if num_new + self.blocks.num_idle(matched) > self.blocks.num_free:
            return False
        self.blocks.take(matched)
        fresh = self.blocks.allocate(num_new)
        assert fresh is not None, "free blocks were counted wrongly"
        state.blocks = [*matched, *fresh]
        state.num_computed = num_cached
        state.num_published = len(matched)
        state.status = Status.RUNNING
        if state.num_preemptions == 0:
            self.prefix_query_tokens += state.prompt_len
            self.prefix_hit_tokens += num_cached
        self.running.append(state)
        return True

    def _grow(self, state: RequestState, num_tokens: int) -> bool:
        """Make sure that the request's blocks hold `num_tokens` tokens; False when there are not enough blocks."""
        num_new = self._num_blocks(num_tokens) - len(state.blocks)
        if num_new <= 0:
            return True
        fresh = self.blocks.allocate(num_new)
        if fresh is None:
            return False
        state.blocks += fresh
        return True

    def _preempt(self, state: RequestState) -> None:
        """Put a running request back at the head of the queue; what the prefix cache keeps of it is not lost."""
        self.running.remove(state)
        self._free(state)
        state.status = Status.WAITING
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(state)

    def _free(self, state: RequestState, *, keep_content: bool = True) -> None:
        self.blocks.release(state.blocks, keep_content=keep_content)
        state.blocks = []
        state.num_computed = 0
        state.num_published = 0
        self._release_row(state)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def all_states(self) -> Iterator[RequestState]:
        """Every request that has not ended."""
        yield from self.running
        yield from self.waiting

    def check_integrity(self) -> None:
        """Assert that pools and requests agree."""
        self.blocks.check_integrity([state.blocks for state in self.running])
        if self.slots is not None:
            self.slots.check_integrity()
        for state in self.waiting:
            assert state.status is Status.WAITING and not state.blocks, "a waiter holds things"
        for state in self.running:
            assert state.status is Status.RUNNING
            assert len(state.blocks) * self.block_size >= state.num_computed, "a request lacks blocks"
