"""The numbers of one adapter in one piece of memory, the slab: read, checked and hashed by several threads, then cast.

Halves of one stored type and one scale lie side by side (a run), so that the cast and the scale are one operation for
each run, and a copy to a GPU is one transfer. The threads work with numpy and hashlib alone, which let go of the
interpreter lock and start no threads of their own. Knows nothing of what the adapter is for. Called by `weights`.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np
import torch

from adapters.tensor_file import FLOAT_DTYPES

MAX_THREADS = 16
ALIGNMENT = 64
"""Elements; every half starts at a multiple of it."""

_JOB_BYTES = 1 << 20
# stored type -> the unsigned type of equal width, and the bits that are not the sign
_BITS = {
    torch.float64: (np.uint64, 0x7FFF_FFFF_FFFF_FFFF),
    torch.float32: (np.uint32, 0x7FFF_FFFF),
    torch.float16: (np.uint16, 0x7FFF),
    torch.bfloat16: (np.uint16, 0x7FFF),
}


class Place(Protocol):
    """Where a half is stored: its shape, its type as safetensors names it, and its bytes."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def read_into(self, memory: memoryview) -> None:
        """Fill `memory`, exactly as long as the half, with its numbers in the stored type; from any thread."""


@dataclass(eq=False)
class Half:
    """A or B of a pair on its way into the slab.

    Attributes:
        place: where its numbers are stored.
        factor: what they are multiplied by; 1.0 for every A.
        tensor: [rows, columns] in the serving type, a view of the slab; valid once `read_slab` has returned.
        tensor_hash: sha256 of the stored bytes.
        peak: the largest magnitude as stored; infinity or NaN where any number is not finite.
        fits: whether every number is finite in the serving type.
    """

    place: Place
    factor: float
    tensor: torch.Tensor = field(init=False, repr=False)
    tensor_hash: bytes = b""
    peak: float = 0.0
    fits: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """The stored type."""
        return FLOAT_DTYPES[self.place.dtype]

    @property
    def num_elements(self) -> int:
        """Rows times columns."""
        rows, columns = self.place.shape
        return rows * columns


@dataclass(eq=False)
class _Run:
    """Neighbours in the slab with one stored type and one factor.

    `target` [n] is their part of the slab; `source` [n] of the stored type is where the files are read to, which is the
    same memory where the types are equal. `starts` are the halves' offsets in both.
    """

    halves: list[Half]
    starts: list[int]
    source: torch.Tensor
    target: torch.Tensor


def read_slab(halves: Sequence[Half], dtype: torch.dtype, *, max_threads: int = MAX_THREADS) -> None:
    """Read all halves into one new slab of `dtype` and fill in their other fields.

    Raises `AdapterRefused` where a file shrank, OSError, and MemoryError. Afterwards nothing refers to the files.
    """
    runs = _lay_out(halves, dtype)
    jobs = _share_out([(run, index) for run in runs for index in range(len(run.halves))])
    if len(jobs) == 1 or max_threads == 1:
        for job in jobs:
            _read(job)
    else:
        futures = [_reading_threads(max_threads).submit(_read, job) for job in jobs]
        wait(futures)  # All of them, also after a fault: the caller closes the files next.
        for future in futures:
            future.result()
    for run in runs:
        _convert(run)


@functools.cache
def _reading_threads(max_threads: int) -> ThreadPoolExecutor:
    """Threads for all loads of the process; they are started when they are first needed."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(max_threads, num_cores), thread_name_prefix="adapter-read")


def _lay_out(halves: Sequence[Half], dtype: torch.dtype) -> list[_Run]:
    def key(half: Half) -> tuple[str, float]:
        return half.place.dtype, half.factor

    groups = [list(group) for _, group in groupby(sorted(halves, key=key), key)]
    lengths = [sum(padded_len(half.num_elements) for half in group) for group in groups]
    slab = _empty(sum(lengths), dtype)
    runs, slab_start = [], 0
    for group, length in zip(groups, lengths, strict=True):
        target = slab[slab_start : slab_start + length]
        source = target if group[0].dtype == dtype else _empty(length, group[0].dtype)
        starts, start = [], 0
        for half in group:
            starts.append(start)
            half.tensor = target[start : start + half.num_elements].view(half.place.shape)
            start += padded_len(half.num_elements)
        runs.append(_Run(group, starts, source, target))
        slab_start += length
    return runs


def padded_len(num_elements: int) -> int:
    """Elements of the slab that a half takes up."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


def _empty(length: int, dtype: torch.dtype) -> torch.Tensor:
    """[length]; numpy's memory, which comes in huge pages where the system has them, and raises MemoryError."""
    return torch.from_numpy(np.empty(length * dtype.itemsize, np.uint8)).view(dtype)


_Job = list[tuple[_Run, int]]


def _share_out(items: _Job) -> list[_Job]:
    """Jobs of at least `_JOB_BYTES` each, but for the last."""
    jobs: list[_Job] = [[]]
    num_bytes = 0
    for run, index in items:
        if num_bytes >= _JOB_BYTES:
            jobs.append([])
            num_bytes = 0
        jobs[-1].append((run, index))
        num_bytes += run.halves[index].num_elements * run.source.dtype.itemsize
    return jobs


def _read(job: _Job) -> None:
    """Read, hash and measure some halves; on a thread of the pool."""
    for run, index in job:
        half, start = run.halves[index], run.starts[index]
        size = run.source.dtype.itemsize
        numbers = run.source.view(torch.uint8).numpy()[start * size : (start + half.num_elements) * size]
        memory = numbers.data
        half.place.read_into(memory)
        half.tensor_hash = hashlib.sha256(memory).digest()
        unsigned, magnitude = _BITS[half.dtype]
        # Without the sign bit, floating-point numbers are ordered as their bits are; infinity and NaN lie above all.
        largest = (numbers.view(unsigned) & unsigned(magnitude)).max()
        half.peak = _to_float(largest, half.dtype)


def _to_float(bits: np.unsignedinteger, dtype: torch.dtype) -> float:
    if dtype == torch.bfloat16:
        return float((np.uint32(bits) << np.uint32(16)).view(np.float32))
    return float(bits.view({2: np.float16, 4: np.float32, 8: np.float64}[bits.itemsize]))


def _convert(run: _Run) -> None:
    """Multiply in float32, cast once, and note which halves are still finite: those whose largest number is."""
    factor = run.halves[0].factor
    peaks = torch.tensor([half.peak for half in run.halves], dtype=torch.float64).to(run.source.dtype)
    served = torch.empty_like(peaks, dtype=run.target.dtype)
    for source, target in ((run.source, run.target), (peaks, served)):
        if factor == 1.0:
            if source is not target:
                target.copy_(source)
        elif source is target:
            target.mul_(factor)  # For 16-bit types too this computes in float32 and rounds once.
        else:
            # [n] float32 already where the file is: then the scratch memory itself is multiplied.
            target.copy_(source.float().mul_(factor))
    for half, is_finite in zip(run.halves, served.isfinite().tolist(), strict=True):
        half.fits = is_finite
