"""The numbers of one adapter in one piece of memory, the slab: read, hashed and checked by several threads, then cast.

Halves of one stored type and one scale lie side by side (a run), so that reading, checking and hashing go by pieces of a
megabyte, cast and scale are one operation for each run, and a copy to a GPU is one transfer. The threads work with the
system, numpy and hashlib alone, in few long calls: each of them lets go of the interpreter lock, which the engine's
thread needs too, and none starts threads of its own. Knows nothing of what the adapter is for. Called by `weights`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch

from adapters.places import Place
from adapters.slab_pool import Memory, fresh_memory
from adapters.tensor_file import FLOAT_DTYPES

MAX_THREADS = 8
ALIGNMENT = 64
"""Elements; every half starts at a multiple of it."""
PIECE_BYTES = 1 << 20
"""What is hashed at once. Digests depend on it."""

_Item = TypeVar("_Item")
# stored type -> the unsigned type of equal width, and the bits that are not the sign
_BITS = {
    torch.float64: (np.uint64, 0x7FFF_FFFF_FFFF_FFFF),
    torch.float32: (np.uint32, 0x7FFF_FFFF),
    torch.float16: (np.uint16, 0x7FFF),
    torch.bfloat16: (np.uint16, 0x7FFF),
}


@dataclass(eq=False)
class Half:
    """A or B of a pair on its way into the slab.

    Attributes:
        place: where its numbers are stored.
        factor: what they are multiplied by; 1.0 for every A.
        tensor: [rows, columns] in the serving type, a view of the slab; valid once `read_slab` has returned.
        is_finite: whether every number is finite as it is stored.
        fits: whether every number is finite in the serving type.
    """

    place: Place
    factor: float
    tensor: torch.Tensor = field(init=False, repr=False)
    is_finite: bool = True
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
    same memory where the types are equal. `starts` are the halves' offsets in both. What lies between halves is zero.
    """

    halves: list[Half]
    starts: list[int]
    source: torch.Tensor
    target: torch.Tensor

    def __post_init__(self) -> None:
        self.memory = self.source.view(torch.uint8).numpy()
        num_pieces = -(-len(self.memory) // PIECE_BYTES)
        self.hashes = [b""] * num_pieces
        self.peaks = [0.0] * num_pieces

    def memory_of(self, index: int) -> np.ndarray:
        """The bytes of one half."""
        size, start = self.source.element_size(), self.starts[index]
        return self.memory[start * size : (start + self.halves[index].num_elements) * size]

    def survey(self, piece: int) -> None:
        """Hash a piece and find its largest magnitude."""
        memory = self.memory[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]
        self.hashes[piece] = hashlib.sha256(memory.data).digest()
        self.peaks[piece] = _peak(memory, self.source.dtype)


def read_slab(
    halves: Sequence[Half], dtype: torch.dtype, *, memory: Memory = fresh_memory, max_threads: int = MAX_THREADS
) -> list[bytes]:
    """Read all halves into one new slab of `dtype` in `memory`, and fill in their other fields.

    Returns hashes of the stored numbers, which together with the halves' places and factors say all that was read; they
    do not follow the files' layout or the number of threads. Raises `AdapterRefused` where a file shrank, OSError, and
    MemoryError. Afterwards nothing refers to the files.
    """
    runs = _lay_out(halves, dtype, memory)
    _share(_read, _reads(runs), max_threads)
    _share(
        lambda item: item[0].survey(item[1]), [(run, i) for run in runs for i in range(len(run.hashes))], max_threads
    )
    for run in runs:
        _convert(run)
    return [digest for run in runs for digest in run.hashes]


@functools.cache
def _reading_threads() -> ThreadPoolExecutor:
    """Threads for all loads of the process; they are started when they are first needed."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(MAX_THREADS, num_cores), thread_name_prefix="adapter-read")


if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads: it starts its own.
    os.register_at_fork(after_in_child=_reading_threads.cache_clear)


def _share(function: Callable[[_Item], None], items: Iterable[_Item], max_threads: int) -> None:
    """Call `function` for all items, on several threads; the first fault is raised after all have ended."""
    todo = deque(items)

    def work() -> None:
        while True:
            try:
                item = todo.popleft()
            except IndexError:
                return
            function(item)

    num_threads = min(max_threads, len(todo))
    if num_threads <= 1:
        work()
        return
    futures = [_reading_threads().submit(work) for _ in range(num_threads)]
    wait(futures)  # All of them, also after a fault: the caller closes the files next.
    for future in futures:
        future.result()


def _lay_out(halves: Sequence[Half], dtype: torch.dtype, memory: Memory) -> list[_Run]:
    def key(half: Half) -> tuple[str, float]:
        return half.place.dtype, half.factor

    groups = [list(group) for _, group in groupby(sorted(halves, key=key), key)]
    lengths = [sum(padded_len(half.num_elements) for half in group) for group in groups]
    slab = memory(sum(lengths) * dtype.itemsize).view(dtype)
    runs, slab_start = [], 0
    for group, length in zip(groups, lengths, strict=True):
        target = slab[slab_start : slab_start + length]
        stored = group[0].dtype
        source = target if stored == dtype else fresh_memory(length * stored.itemsize).view(stored)
        starts, start = [], 0
        for half in group:
            shape = half.place.shape
            starts.append(start)
            half.tensor = slab.as_strided(shape, (shape[1], 1), slab_start + start)
            end = start + shape[0] * shape[1]
            start = padded_len(end)
            if end < start:
                source[end:start] = 0
        runs.append(_Run(group, starts, source, target))
        slab_start += length
    return runs


def padded_len(num_elements: int) -> int:
    """Elements of the slab that a half takes up."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


_Read = tuple[Place, "list[memoryview]"]


def _reads(runs: Sequence[_Run]) -> list[_Read]:
    """Neighbours in a file are read by one call, up to `PIECE_BYTES` or one half: (first place, memory of each)."""
    wanted = [(half.place, run.memory_of(index).data) for run in runs for index, half in enumerate(run.halves)]
    reads: list[_Read] = []
    by_file: dict[int, list[tuple[int, Place, memoryview]]] = {}
    for place, memory in wanted:
        extent = place.extent
        if extent is None:
            reads.append((place, [memory]))
        else:
            by_file.setdefault(id(extent[0]), []).append((extent[1], place, memory))
    for rows in by_file.values():
        end, num_bytes = -1, 0
        for start, place, memory in sorted(rows, key=lambda row: row[0]):
            if start == end and num_bytes < PIECE_BYTES:
                reads[-1][1].append(memory)
                num_bytes += memory.nbytes
            else:
                reads.append((place, [memory]))
                num_bytes = memory.nbytes
            end = start + memory.nbytes
    return reads


def _read(read: _Read) -> None:
    place, memories = read
    extent = place.extent
    if extent is None:
        place.read_into(memories[0])
    else:
        extent[0].read_at(extent[1], memories)


def _peak(memory: np.ndarray, dtype: torch.dtype) -> float:
    """The largest magnitude; not finite where any number is not."""
    unsigned, magnitude = _BITS[dtype]
    # Without the sign bit, floating-point numbers are ordered as their bits are; infinity and NaN lie above all.
    largest = (memory.view(unsigned) & unsigned(magnitude)).max()
    if dtype == torch.bfloat16:
        return float((np.uint32(largest) << np.uint32(16)).view(np.float32))
    return float(largest.view({2: np.float16, 4: np.float32, 8: np.float64}[largest.itemsize]))


def _convert(run: _Run) -> None:
    """Judge the stored numbers, multiply in float32, cast once, and judge what came out."""
    peaks = run.peaks
    if not all(map(math.isfinite, peaks)) or not _fit(peaks, run):  # Rare: find out which halves it is.
        peaks = [_peak(run.memory_of(index), run.source.dtype) for index in range(len(run.halves))]
        for index, half in enumerate(run.halves):
            half.is_finite = math.isfinite(peaks[index])
            half.fits = _fit(peaks[index : index + 1], run)
    _scale(run.source, run.target, run.halves[0].factor)


def _fit(peaks: Sequence[float], run: _Run) -> bool:
    """Whether numbers up to these magnitudes are finite once they are scaled and cast."""
    source = torch.tensor(peaks, dtype=torch.float64).to(run.source.dtype)
    target = torch.empty_like(source, dtype=run.target.dtype)
    _scale(source, target if run.source is not run.target else source, run.halves[0].factor)
    return bool((target if run.source is not run.target else source).isfinite().all())


def _scale(source: torch.Tensor, target: torch.Tensor, factor: float) -> None:
    """`target = source * factor`, computed in float32; both may be the same memory, and `source` may be overwritten."""
    if factor == 1.0:
        if source is not target:
            target.copy_(source)
    elif source is target:
        target.mul_(factor)  # For 16-bit types too this computes in float32 and rounds once.
    else:
        # Already float32 in most files: then the scratch memory itself is multiplied.
        target.copy_(source.float().mul_(factor))
