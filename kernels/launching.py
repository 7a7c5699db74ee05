"""Launches of Triton kernels, which at start can be compilations alone: several at once, rather than each where it is met.

A program that starts needs many variants of few kernels, and compiling one takes about half a second of a core. Used by the
kernels' modules in place of `kernel[grid](…)`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import triton

_is_compiling: ContextVar[bool] = ContextVar("is_compiling", default=False)

_MAX_THREADS = 16
"""A tenth of a compilation is Python, which runs one thread at a time."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel on the current stream; within `compiling_only`, see to it that this variant of it is compiled."""
    if _is_compiling.get():
        kernel.run(*args, grid=grid, warmup=True, **options)
    else:
        kernel[grid](*args, **options)


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Kernels that this thread would launch are compiled, in threads of their own, and are all there at the end.

    Raises:
        triton.CompilationError: at the end, one of them cannot be compiled.
    """
    num_threads = min(os.cpu_count() or 1, _MAX_THREADS)
    token = _is_compiling.set(True)
    try:
        with ThreadPoolExecutor(num_threads) as threads, triton.AsyncCompileMode(threads):
            yield
    finally:
        _is_compiling.reset(token)
