"""After a step that failed: whose fault it was, and what that request is told.

Knows neither device nor scheduler; `loop` says how to compute some of the step's items anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from engine.errors import EngineFault, OutOfMemory

T = TypeVar("T")


def step_fault(error: Exception) -> EngineFault:
    """What a request is told whose step failed with `error`."""
    if isinstance(error, EngineFault):
        return error
    if _is_out_of_memory(error):
        return OutOfMemory(
            "There was no memory left to compute this answer; send a shorter prompt, or try again later."
        )
    return EngineFault("The engine failed while computing this answer; try again.")


def give_back_memory(error: Exception) -> None:
    """Where `error` says that memory ran out, let go of what the allocator keeps for later."""
    if _is_out_of_memory(error) and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _is_out_of_memory(error: Exception) -> bool:
    # The allocator of CPU tensors has no type of its own for it.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def blamed(items: Sequence[T], compute: Callable[[list[T]], EngineFault | None]) -> Iterator[tuple[T, EngineFault]]:
    """The items that cannot be computed even alone, each with its fault; all others have been computed.

    Everything is tried once more together, since memory that others held may be free by now, then in halves: a step with
    one bad item of n takes about 2 log n launches.

    Args:
        items: of the step that failed.
        compute: computes some of them; None, or why it failed, with nothing changed.
    """
    parts = [list(items)]
    while parts:
        part = parts.pop()
        cause = compute(part)
        if cause is None:
            continue
        if len(part) == 1:
            yield part[0], cause
        else:
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
