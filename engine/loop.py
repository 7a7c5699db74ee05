"""The engine thread: takes requests in, runs step after step, and hands events out.

Owns the thread, the inbox and the end of every request: whatever happens, each accepted request gets exactly one
terminal event and then holds nothing. No user's file is read here and no adapter is parsed. Called by `engine/engine`.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from engine.answer import Answer
from engine.delivery import first_delta, make_state, next_delta, only_prompt_delta, take_prompt_logprobs
from engine.detokenizer import DecodingTable, FastTokenizer
from engine.errors import AppError, EngineClosed, EngineFault, InvalidRequest
from engine.metrics import LoopCounters
from engine.recovery import blamed, give_back_memory, step_fault
from engine.request import PROBE, Delta, FinishReason, TokenLogprob
from engine.runner import LaunchedStep, Runner
from engine.sampler import INVALID_TOKEN
from engine.scheduler import AdmissionFault, Plan, PlanItem, Scheduler
from engine.state import EngineRequest, RequestState, Status
from engine.wakes import Wakes

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A launched step whose tokens have not been read."""

    plan: Plan
    step: LaunchedStep

    @property
    def is_read_first(self) -> bool:
        """Whether a row's next token depends on its earlier ones on the host (penalties, guides)."""
        return any(item.state.sampler_row.reads_outputs for item in self.step.sampled)


class BlockCleaner(Protocol):
    """Zeroes KV blocks; see `engine.kv_cache.KVCache`."""

    def clear(self, blocks: list[int]) -> None:
        """Zero some blocks."""


class EngineLoop:
    """Runs the engine's steps on a thread of its own.

    Args:
        scheduler, runner, cache, tokenizer: the parts of the engine.
        runs_ahead: launch each step before the tokens of the one before it are read, so that the host's work is done
            while the device computes. A request that ends by its text then costs one more row of one step.
        checks_integrity: assert after every step that nothing leaked (tests).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        cache: BlockCleaner,
        tokenizer: FastTokenizer,
        *,
        runs_ahead: bool = False,
        checks_integrity: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._cache = cache
        self._decoding = DecodingTable(tokenizer)
        self._runs_ahead = runs_ahead
        self._checks_integrity = checks_integrity
        self._in_flight: _InFlight | None = None
        self._wakes = Wakes()
        self._states: dict[str, RequestState] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self.num_arriving = 0  # submitted during the present step, and not in the scheduler's queue yet
        self._wake = threading.Condition()
        self._is_closing = False
        self._has_ended = False
        self._close_at = 0.0
        self._cause: AppError | None = None
        self.counters = LoopCounters()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self._thread.is_alive() and not self._is_closing and not self._has_ended

    @property
    def is_running(self) -> bool:
        """Whether the thread runs, be it to end what is under way."""
        return self._thread.is_alive() and not self._has_ended

    def submit(self, request: EngineRequest, answer: Answer) -> None:
        """Queue a request; the answer's events follow. Thread-safe.

        Raises:
            EngineClosed: the engine is shutting down; the request's adapter handle is released.
        """
        decoding = self._decoding if request.text is None else request.text.decoding
        state = make_state(request, answer, decoding)
        answer.bind(lambda error: self._post(lambda: self._abort(state, error)), self._wakes)
        with self._wake:
            is_taken = self._post(lambda: self._accept(state))
            self.num_arriving += is_taken
        if not is_taken:
            if request.handle is not None:
                request.handle.release()
            raise self._closed("The server is shutting down; try again later.")

    def call(self, action: Callable[[], None]) -> bool:
        """Run something on the engine thread between two steps; False when the thread has ended. Thread-safe."""
        return self._post(action)

    def close(self, drain_s: float, timeout_s: float | None = None) -> bool:
        """Take no more requests, let those under way end for `drain_s` seconds, end the rest, and stop the thread.

        Returns:
            Whether the thread has ended, for which `timeout_s` seconds are waited; None means however long it takes.
        """
        with self._wake:
            if not self._is_closing:
                self._is_closing = True
                self._close_at = time.monotonic() + drain_s
            self._wake.notify()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def stop(self, cause: AppError) -> None:
        """Take no more requests and end those under way with `cause`, which later ones hear too. Thread-safe."""
        with self._wake:
            self._cause = self._cause or cause
            self._is_closing, self._close_at = True, 0.0
            self._wake.notify()

    def _closed(self, message: str) -> AppError:
        """Why a request is not answered any more: what stopped the engine, else `message`."""
        return EngineClosed(message) if self._cause is None else type(self._cause)(self._cause.message)

    def _post(self, action: Callable[[], None]) -> bool:
        with self._wake:
            if self._has_ended:
                return False
            self._inbox.append(action)
            self._wake.notify()
            return True

    def _run(self) -> None:
        try:
            self._run_steps()
        except Exception:  # Thread border: nothing may leave readers waiting for a thread that is gone.
            logger.exception("event=engine_died")
        self._wakes.send()
        with self._wake:
            self._has_ended = True  # From here on nothing gets into the inbox.
            actions = list(self._inbox)
            self._inbox.clear()
        for action in actions:
            self._guard(action)
        closed = self._closed("The engine has stopped; the answer was cut off.")
        for state in list(self._states.values()):
            self._fail(state, closed)

    def _run_steps(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not self._has_work and not self._is_closing:
                    self._wake.wait()
                actions = list(self._inbox)
                self._inbox.clear()
            for action in actions:
                self._guard(action)
            if self._is_closing and (not self._has_work or time.monotonic() > self._close_at):
                break
            if self._has_work:
                self._step()
            if not self._has_work:
                self._wakes.send()  # whatever the step came to: no next one is launched

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_work or self._in_flight is not None

    def _guard(self, action: Callable[[], None]) -> None:
        """Thread border: an inbox action that fails is logged and never stops the loop."""
        try:
            action()
        except Exception:
            logger.exception("event=engine_action_failed")

    def _accept(self, state: RequestState) -> None:
        with self._wake:
            self.num_arriving -= 1
        if self._is_closing or self._has_ended:
            self._states[state.request.request_id] = state
            self._scheduler.add(state)
            self._fail(state, self._closed("The server is shutting down; try again later."))
            return
        if state.request.request_id in self._states:
            if state.request.handle is not None:
                state.request.handle.release()
            state.answer.put(InvalidRequest(f"A request with the id {state.request.request_id!r} is under way."))
            return
        self._states[state.request.request_id] = state
        self._scheduler.add(state)

    def _abort(self, state: RequestState, error: AppError | None) -> None:
        """End a request from outside: quietly where its reader has left, else with the `error` that the reader gets."""
        if self._states.get(state.request.request_id) is state:
            self._finish(state, "abort", error or Delta(finish_reason="abort"))

    def _step(self) -> None:
        """Launch a step, then read the one before it. Thread border: a fault fails the requests of its step alone."""
        plan, launched, has_failed = Plan(), None, False
        try:
            plan = self._schedule()
            if not self._runner.is_recorded(plan) or any(item.state.sampler_row.reads_outputs for item in plan.items):
                self._wakes.send()  # launching would be long to wait for: kernel by kernel, or with guides to be asked
            if plan.items:
                self._announce(plan)
                self._encode_media(plan)
            elif self._in_flight is None:
                self._check_progress(plan)
            if plan.items:
                launched = self._launch(plan)
            self._wakes.send()
        except AdmissionFault as error:
            logger.exception("event=admission_failed request=%s", error.state.request.request_id)
            self._fail(error.state, EngineFault("The engine failed while starting this answer; try again."))
            return
        except Exception as error:
            logger.exception("event=step_failed requests=%s", _request_ids(plan))
            give_back_memory(error)
            has_failed = True
        # What follows is outside the handler, whose error would keep the failed step's tensors in memory.
        self._settle()
        self._in_flight = launched
        if has_failed:
            self._wakes.send()
            self._recover(plan)
        if not self._runs_ahead:
            self._settle()
        if self._checks_integrity:
            self._scheduler.check_integrity()

    def _launch(self, plan: Plan) -> _InFlight:
        launched = _InFlight(plan, self._runner.launch(plan))
        self._scheduler.advance(plan)
        self.counters.count(plan)
        return launched

    def _recover(self, plan: Plan) -> None:
        """Compute a failed step's requests anew, in halves where that fails again; one that fails by itself is to blame.

        A step that failed has changed nothing but keys and values that are written again.
        """

        def compute(items: list[PlanItem]) -> EngineFault | None:
            part = Plan([item for item in items if item.state.status is Status.RUNNING])  # some have just ended
            if not part.items:
                return None
            try:
                self._in_flight = self._launch(part)
            except Exception as error:  # noqa: BLE001 - thread border; the trace was logged for the whole step
                logger.error("event=part_of_step_failed requests=%s kind=%s", _request_ids(part), type(error).__name__)
                give_back_memory(error)
                return step_fault(error)
            self._settle()
            return None

        for item, cause in blamed(plan.items, compute):
            self._fail(item.state, cause)

    def _schedule(self) -> Plan:
        """The next plan. What runs is read first where the plan depends on it: on its tokens, or on its room."""
        if self._in_flight is not None and self._in_flight.is_read_first:
            self._settle()
        plan = self._scheduler.schedule(may_preempt=self._in_flight is None)
        if plan is None:
            self._settle()
            plan = self._scheduler.schedule()
            assert plan is not None, "the scheduler may preempt now"
        return plan

    def _settle(self) -> None:
        """Wait for the step in flight and hand out its tokens. Thread border, as `_step`."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        try:
            sampled = in_flight.step.read()
            for state, part in in_flight.step.read_prompts():
                take_prompt_logprobs(state, part)
            self._scheduler.commit(in_flight.plan)
        except Exception as error:
            logger.exception("event=step_failed requests=%s", _request_ids(in_flight.plan))
            self._fail_step(in_flight.plan, step_fault(error) if isinstance(error, EngineFault) else None)
            return
        self._wakes.hold()
        for item, token_id, logprob in sampled:
            self._take_token_guarded(item, token_id, logprob)
        if self._runs_ahead and self._scheduler.running:
            self._wakes.send_few()  # many wait for `_launch`
        else:
            self._wakes.send()

    def _fail_step(self, plan: Plan, cause: EngineFault | None) -> None:
        for item in plan.items:
            self._fail(item.state, cause or EngineFault("The engine failed while computing this answer; try again."))

    def _encode_media(self, plan: Plan) -> None:
        """Compute media features; where that fails, request by request, so that a clip takes no neighbour along."""
        try:
            self._runner.encode_media(plan.items)
            return
        except Exception:
            logger.exception("event=media_batch_failed requests=%s", _request_ids(plan))
        for item in list(plan.items):
            try:
                self._runner.encode_media([item])
            except Exception:
                logger.exception("event=media_failed request=%s", item.state.request.request_id)
                plan.items.remove(item)
                self._fail(item.state, EngineFault("The engine failed while reading this request's media; try again."))

    def _check_progress(self, plan: Plan) -> None:
        """Nothing could be planned: normal after a preemption, or where the last request ended just now; else the
        oldest waiter can never run."""
        if self._scheduler.waiting and not plan.preempted and not self._scheduler.running:
            state = self._scheduler.waiting[0]
            logger.error("event=request_cannot_run request=%s", state.request.request_id)
            self._fail(state, EngineFault("The engine has no room for this request; make it shorter."))

    def _announce(self, plan: Plan) -> None:
        """Send the first event of requests that start in this step."""
        for item in plan.items:
            state = item.state
            if not state.has_started:
                state.has_started = True
                state.answer.put(first_delta(item))

    def _take_token_guarded(self, item: PlanItem, token_id: int, logprob: TokenLogprob | None) -> None:
        """Thread border: a fault in one request's text handling fails that request alone."""
        try:
            self._take_token(item.state, token_id, logprob)
        except Exception:
            logger.exception("event=request_failed request=%s", item.state.request.request_id)
            self._fail(item.state, EngineFault("The engine failed while decoding this answer; try again."))

    def _take_token(self, state: RequestState, token_id: int, logprob: TokenLogprob | None) -> None:
        if state.status is Status.FINISHED:
            return
        if token_id == INVALID_TOKEN:
            name = state.request.receipt.name
            cause = f"the adapter {name!r} or the base model" if name else "the base model"
            self._fail(state, EngineFault(f"The model's output is not a number (NaN); {cause} is numerically broken."))
            return
        if state.request.max_tokens == 0:
            self._finish(state, "length", only_prompt_delta(state))
            return
        state.append(token_id)
        self.counters.generated_tokens += 1
        delta = next_delta(state, token_id, logprob)
        if delta.finish_reason is None:
            state.answer.put(delta)
        else:
            self._finish(state, delta.finish_reason, delta)

    def _fail(self, state: RequestState, error: AppError) -> None:
        """End a request with an error; what it computed is forgotten, since it may be wrong."""
        try:
            self._cache.clear(self._scheduler.blocks.exclusive(state.blocks))
        except Exception:  # A device that has failed for good raises here too; the reader must hear of the end.
            logger.exception("event=clear_failed request=%s", state.request.request_id)
        self._finish(state, "error", error, keep_content=False)

    def _finish(
        self, state: RequestState, outcome: FinishReason, event: Delta | AppError, *, keep_content: bool = True
    ) -> None:
        """The one place where a request ends: free everything, then tell the reader."""
        if state.status is Status.FINISHED:
            return
        try:
            self._scheduler.finish(state, keep_content=keep_content)
        except Exception:  # The reader must hear of the end whatever our own bookkeeping says.
            logger.exception("event=finish_failed request=%s", state.request.request_id)
            self._scheduler.forget(state)
        self._states.pop(state.request.request_id, None)
        if state.request.handle is not None:
            state.request.handle.release()
        if state.request.receipt.reason != PROBE:
            self.counters.num_finished[outcome] += 1
        state.answer.put(event)


def _request_ids(plan: Plan) -> str:
    return ",".join(item.state.request.request_id for item in plan.items)
