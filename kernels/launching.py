"""Launches of Triton kernels, which at start can be compilations alone: several at once, rather than each where it is met.

A program that starts needs many variants of few kernels, and compiling one takes about half a second of a core. Used by the
kernels' modules in place of `kernel[grid](…)`.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton

_is_compiling: contextvars.ContextVar[bool] = contextvars.ContextVar("is_compiling", default=False)

_MAX_THREADS = 16
"""A tenth of a compilation is Python, which runs one thread at a time."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel on the current stream; within `compile_only`, see to it that this variant of it is compiled."""
    if _is_compiling.get():
        kernel.run(*args, grid=grid, warmup=True, **options)
    else:
        kernel[grid](*args, **options)


def compile_only(work: Callable[[], None]) -> None:
    """Do `work`, but compile the kernels that it would launch, in threads of their own; at the end all are there.

    Raises:
        Exception: what `work` raises, or the compiler of any of the kernels. Launches after it are not touched by that.
    """
    # A context of its own, since Triton's mode stays set where a compilation fails.
    contextvars.copy_context().run(_compile, work)


def _compile(work: Callable[[], None]) -> None:
    _is_compiling.set(True)
    num_threads = min(os.cpu_count() or 1, _MAX_THREADS)
    with ThreadPoolExecutor(num_threads) as threads, triton.AsyncCompileMode(threads):
        work()
