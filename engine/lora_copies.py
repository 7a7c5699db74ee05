"""Adapters' way into the LoRA rows of a GPU, beside the running steps.

An adapter's slab (see `adapters/slab`) goes to a staging buffer on the device: in one transfer straight from it where it
lies in page-locked memory (`adapters/slab_pool`), else in chunks through a small ring of page-locked buffers, filled by
several threads. One launch then scatters it into the fixed buffers of all groups, another writes the ranks. All of that
runs on a stream of its own. The order is kept by events in both ways: the scatter waits on the device for every step
launched before the row was given away, and no step reads the row before the copy's event. A slab that the device reads by
itself is kept until it has, whoever lets go of the adapter meanwhile, so that its memory is not used for another one.
Called by `engine/lora_layers` on the engine thread.

M modules of a group, N rows, R rank of the buffers.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from adapters.slab import padded_len
from adapters.weights import LoraPair
from kernels import scatter_rows_

if TYPE_CHECKING:
    from engine.lora_layers import LoraGroup

_Row = tuple[int, int, int, int, int]
"""A place of `kernels.scatter_rows_`."""


@dataclass(frozen=True)
class Ring:
    """The page-locked buffers and the threads that fill them.

    A thread copies 3 to 10 GB/s in CPU memory, by machine and by how many do; a PCIe 5 link takes 50. A chunk costs 0.15 ms
    whatever its size, and more threads take more time from the one that runs steps.
    """

    chunk_bytes: int = 4 << 20
    num_chunks: int = 8
    num_threads: int = 4


class HasPairs(Protocol):
    """A generation, or the part of one that belongs to one of several GPUs; all pairs are views of one slab."""

    @property
    def pairs(self) -> Mapping[str, LoraPair]:
        """LoRA by module name."""
        ...


class GpuRowCopy:
    """A copy under way; see `adapters.slots.RowCopy`."""

    def __init__(self, queued: Future[torch.cuda.Event]) -> None:
        self._queued = queued

    def is_ready(self) -> bool:
        """Whether the row can be read; asks without waiting. Raises what made the copy fail."""
        return self._queued.done() and self._queued.result().query()

    def has_failed(self) -> bool:
        """Whether it has ended in a fault."""
        return self._queued.done() and self._queued.exception() is not None

    def wait(self) -> None:
        """Make what the current stream runs from now on wait for the copy; blocks only until it is queued."""
        self._queued.result().wait()


@dataclass(frozen=True)
class _Place:
    """Where one module's halves lie in row 0, and how many bytes the rows are apart."""

    a_address: int
    a_row_bytes: int
    b_address: int
    b_row_bytes: int


class RowCopies:
    """Writes adapters into the rows of groups on one CUDA device, one after the other.

    Holds `num_bytes` on the device (one row's worth) and the ring's page-locked memory (32 MiB), from the start: taking
    either later would make running steps wait.
    """

    def __init__(self, groups: Sequence[LoraGroup], ring: Ring | None = None) -> None:
        self._groups = groups
        self._ring = ring = ring or Ring()
        self._device = groups[0].lora_a.device
        self._dtype = groups[0].lora_a.dtype
        self._max_rank = groups[0].lora_b.shape[2]
        self._places = dict(_places(groups))
        self._stream = torch.cuda.Stream(self._device)
        self._staging = torch.zeros(_slab_len(groups), dtype=self._dtype, device=self._device)
        self._table = _Mirror(2 * len(self._places) + len(groups), 5, torch.int64, self._device)
        self._ranks = _Mirror(len(self._places), 1, torch.int32, self._device)
        self._free_chunks: queue.SimpleQueue[_Chunk] = queue.SimpleQueue()
        for _ in range(ring.num_chunks):
            self._free_chunks.put(_Chunk(ring.chunk_bytes))
        self._latest = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # The buffers' zeros come first.
        # Whatever these threads launch goes to the copies' stream.
        on_stream = functools.partial(torch.cuda.set_stream, self._stream)
        self._in_order = ThreadPoolExecutor(1, thread_name_prefix="lora-copy", initializer=on_stream)
        self._senders = ThreadPoolExecutor(ring.num_threads, thread_name_prefix="lora-send", initializer=on_stream)
        self._kept = ThreadPoolExecutor(1, thread_name_prefix="lora-sent")  # Each job holds the slab that it waits for.
        # Compiles the kernel for each width: row 0 of the new buffers gets zeros, which it holds.
        address = self._places[groups[0].names[0]].a_address
        for length in (1, 4 // self._staging.element_size(), 8 // self._staging.element_size()):
            nothing = [(address, 0, 1, length, length)]
            self._in_order.submit(self._write, 0, {}, self._event_now(), nothing).result().synchronize()

    @property
    def num_bytes(self) -> int:
        """Device memory of the staging buffer."""
        return self._staging.nbytes

    def start(self, lora_slot: int, generation: HasPairs) -> GpuRowCopy:
        """Begin to fill a row that no later step will read before the copy is ready."""
        return GpuRowCopy(self._in_order.submit(self._copy, lora_slot, generation, self._event_now()))

    def clear(self, lora_slot: int) -> None:
        """Make the row's ranks 0, so that it adds nothing."""
        self._in_order.submit(self._write, lora_slot, {}, self._event_now())

    def _event_now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _copy(self, lora_slot: int, generation: HasPairs, steps: torch.cuda.Event) -> torch.cuda.Event:
        """On the copy thread: queue everything, and return the event of its end."""
        if not generation.pairs:  # All that it holds lies beside linears: other writers have it.
            return self._write(lora_slot, {}, steps)
        sends = self._send(slab_of(generation))
        try:  # While the senders copy.
            rank_of = {name: pair.rank for name, pair in generation.pairs.items()}
            tables = self._fill_tables(lora_slot, rank_of, self._rows(lora_slot, generation))
        finally:
            wait(sends)  # All of them, also after a fault: none may write into the staging buffer later.
        for send in sends:
            send.result()
        return self._scatter(tables, steps)

    def _write(
        self, lora_slot: int, rank_of: Mapping[str, int], steps: torch.cuda.Event, rows: Sequence[_Row] = ()
    ) -> torch.cuda.Event:
        """Write a row's ranks, 0 where `rank_of` lacks them, and the `rows` of what is staged already."""
        return self._scatter(self._fill_tables(lora_slot, rank_of, rows), steps)

    def _rows(self, lora_slot: int, generation: HasPairs) -> list[_Row]:
        """Where each half of the slab goes."""
        slab = slab_of(generation)
        first_byte, num_bytes, item_bytes = slab.data_ptr(), slab.nbytes, slab.element_size()
        rows: list[_Row] = []
        for name, pair in generation.pairs.items():
            place = self._places[name]
            a, b = place.a_address + lora_slot * place.a_row_bytes, place.b_address + lora_slot * place.b_row_bytes
            for target, half, stride in ((a, pair.a, pair.a.shape[1]), (b, pair.b, self._max_rank)):
                if half.numel():
                    start = half.data_ptr() - first_byte
                    assert 0 <= start < num_bytes, "a pair outside the slab"
                    rows.append((target, start // item_bytes, half.shape[0], half.shape[1], stride))
        return rows

    def _fill_tables(self, lora_slot: int, rank_of: Mapping[str, int], rows: Sequence[_Row]) -> _Tables:
        """The host's side of what `_scatter` needs: the staged `rows`, and the ranks of all modules."""
        ranks: list[int] = []
        rank_rows: list[_Row] = []
        by_group = [[rank_of.get(name, 0) for name in group.names] for group in self._groups]
        for group, host_ranks in zip(self._groups, by_group, strict=True):
            address = group.ranks.data_ptr() + lora_slot * len(host_ranks) * group.ranks.element_size()
            rank_rows.append((address, len(ranks), 1, len(host_ranks), len(host_ranks)))
            ranks += host_ranks
        num_rows, table = len(rows), np.array([*rows, *rank_rows], np.int64)
        staging = widened(self._staging, table[:num_rows])
        self._latest.synchronize()  # The host's side of the tables is free again.
        self._table.host[: len(table)] = table
        self._ranks.host[:, 0] = ranks
        max_elements = int((table[:num_rows, 2] * table[:num_rows, 3]).max(initial=0))
        return _Tables(lora_slot, by_group, staging, num_rows, len(table), max_elements)

    def _scatter(self, tables: _Tables, steps: torch.cuda.Event) -> torch.cuda.Event:
        """Send the tables, and scatter what is staged and the ranks behind the `steps`."""
        for group, host_ranks in zip(self._groups, tables.ranks, strict=True):
            group.host_ranks[tables.lora_slot] = host_ranks
        self._table.send()
        self._ranks.send()
        self._stream.wait_event(steps)
        on_device = self._table.device[: tables.num_places]
        scatter_rows_(tables.staging, on_device[: tables.num_rows], tables.max_elements)
        ranks = self._ranks.device.view(-1)
        scatter_rows_(ranks, on_device[tables.num_rows :], len(ranks))
        self._latest = event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _send(self, slab: torch.Tensor) -> list[Future[None]]:
        """Begin the transfer of a slab to the staging buffer; once these have ended the caller may let go of it."""
        assert slab.dtype == self._dtype and slab.numel() <= self._staging.numel(), "a slab of another server"
        if slab.is_pinned():
            self._send_whole(slab)
            return []
        source, target, size = slab.view(torch.uint8).numpy(), self._staging.view(torch.uint8), self._ring.chunk_bytes
        return [
            self._senders.submit(self._send_chunk, source[start : start + size], target[start : start + size])
            for start in range(0, len(source), size)
        ]

    def _send_whole(self, slab: torch.Tensor) -> None:
        """Queue the transfer straight from the slab, and keep that until the device has read it, whatever happens here."""
        self._staging[: len(slab)].copy_(slab, non_blocking=True)
        sent = torch.cuda.Event(blocking=True)
        sent.record(self._stream)
        try:
            self._kept.submit(_keep_until, sent, slab)
        except RuntimeError:  # The process is ending, and takes no more jobs.
            sent.synchronize()
            raise

    def _send_chunk(self, source: np.ndarray, target: torch.Tensor) -> None:
        chunk = self._free_chunks.get()
        try:
            chunk.event.synchronize()
            np.copyto(chunk.array[: len(source)], source)
            target[: len(source)].copy_(chunk.memory[: len(source)], non_blocking=True)
            chunk.event.record(self._stream)
        finally:
            self._free_chunks.put(chunk)


def _keep_until(sent: torch.cuda.Event, slab: torch.Tensor) -> None:
    """Hold `slab` until then."""
    sent.synchronize()


class _Chunk:
    """A page-locked buffer, and the event after which it may be filled again."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.array = self.memory.numpy()
        self.event = torch.cuda.Event()


@dataclass(frozen=True)
class _Tables:
    """What `_fill_tables` made of a row: its `ranks` by group and module; on the host's side of the table `num_rows` places in
    `staging`'s elements, then those of the ranks, `num_places` in all."""

    lora_slot: int
    ranks: list[list[int]]
    staging: torch.Tensor
    num_rows: int
    num_places: int
    max_elements: int


class _Mirror:
    """A small table on the device, and the page-locked memory that it is filled from."""

    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pinned = torch.zeros(num_rows, num_columns, dtype=dtype, pin_memory=True)
        self.host = self._pinned.numpy()
        self.device = torch.zeros(num_rows, num_columns, dtype=dtype, device=device)

    def send(self) -> None:
        self.device.copy_(self._pinned, non_blocking=True)


def slab_of(generation: HasPairs) -> torch.Tensor:
    """[S] in the serving type: the memory that all pairs of a generation are views of."""
    half = next(iter(generation.pairs.values())).a
    return torch.empty(0, dtype=half.dtype).set_(half.untyped_storage())


def widened(source: torch.Tensor, table: np.ndarray) -> torch.Tensor:
    """The source in the widest elements, of at most 8 bytes, that every place of the table begins and ends with.

    `table` [K, 5] (see `kernels.scatter_rows_`) is changed to count in these. Fewer elements are moved in less time.
    """
    item_bytes = source.element_size()
    for wide in (torch.int64, torch.int32):
        times = wide.itemsize // item_bytes
        counts = table[:, (1, 3, 4)]
        if times > 1 and not (counts % times).any() and not (table[:, 0] % wide.itemsize).any():
            table[:, (1, 3, 4)] = counts // times
            return source.view(wide)
    return source


def _places(groups: Sequence[LoraGroup]) -> Iterator[tuple[str, _Place]]:
    for group in groups:
        start = 0
        for index, (name, end) in enumerate(zip(group.names, group.slice_ends, strict=True)):
            yield (
                name,
                _Place(
                    group.lora_a[0, index].data_ptr(),
                    group.lora_a[0].nbytes,
                    group.lora_b[0, start].data_ptr(),
                    group.lora_b[0].nbytes,
                ),
            )
            start = end


def _slab_len(groups: Sequence[LoraGroup]) -> int:
    """Elements of the largest slab that fits: every module at the full rank."""
    total = 0
    for group in groups:
        (a_rows, in_features), max_rank = group.lora_a.shape[2:], group.lora_b.shape[2]
        ends = group.slice_ends
        for start, end in zip((0, *ends[:-1]), ends, strict=True):
            total += padded_len(a_rows * in_features) + padded_len((end - start) * max_rank)
    return total
