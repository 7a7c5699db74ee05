"""Engines that wait for a test, so that neither has to keep pace with the other.

While an engine is held it takes requests in and ends those that are aborted, expire or are closed, but computes no step:
an answer that a test wants to find under way is under way however late the test looks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from engine import Engine
from engine.state import RequestState


@contextmanager
def held_after(engine: Engine, num_tokens: int = 3) -> Iterator[Callable[[], None]]:
    """No step is computed once every answer under way has `num_tokens` tokens or more; until then each is.

    Yields what lets the engine go before the block ends.
    """

    def have_enough(states: Collection[RequestState]) -> bool:
        return bool(states) and all(state.num_outputs >= num_tokens for state in states)

    with _held(engine, have_enough) as let_go:
        yield let_go


@contextmanager
def held_before(engine: Engine, num_requests: int) -> Iterator[None]:
    """No step is computed before `num_requests` are under way at once; from then on each is."""
    most = 0

    def are_missing(states: Collection[RequestState]) -> bool:
        nonlocal most
        most = max(most, len(states))
        return most < num_requests

    with _held(engine, are_missing):
        yield


@contextmanager
def _held(engine: Engine, must_wait: Callable[[Collection[RequestState]], bool]) -> Iterator[Callable[[], None]]:
    loop = engine._loop
    step, is_over = loop._step, False

    def step_unless_held() -> None:
        with loop._wake:
            if not is_over and not loop._is_closing and must_wait(loop._states.values()):
                loop._wake.wait_for(lambda: is_over or loop._is_closing or loop._inbox)
                return
        step()

    def let_go() -> None:
        nonlocal is_over
        with loop._wake:
            is_over = True
            loop._wake.notify()

    loop._step = step_unless_held  # type: ignore[method-assign]
    try:
        yield let_go
    finally:
        loop._step = step  # type: ignore[method-assign]
        let_go()
