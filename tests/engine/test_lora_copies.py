"""Copies into rows, with CUDA's streams and events stood in for: what lands where, and what a fault leaves behind.

The order between copies and steps is tested on a GPU, in `tests/gpu`.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from adapters import slab_pool
from adapters.generation import Generation
from adapters.intake import read_generation
from adapters.slab_pool import SlabPool
from engine.lora_copies import Ring, RowCopies, slab_of, widened
from engine.lora_layers import LoraBuffers
from kernels import LoraMetadata, scatter_rows_
from tests.adapters.world import surface_of

RING = Ring(chunk_bytes=1000, num_chunks=5, num_threads=3)
"""Small chunks, so that a slab takes many."""


class _Done:
    """A stream or event on a device that has always finished."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's names without CUDA."""
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, _Done)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _Done())
    for name in ("empty", "zeros"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, pin_memory=False, **named: real(*a, **named))


def make_buffers(llama_dir: Path, dtype: torch.dtype, max_rank: int) -> LoraBuffers:
    model = AutoModelForCausalLM.from_pretrained(llama_dir, dtype=dtype)
    surface = surface_of(model, lora_dtype=dtype)
    metadata = {"decoder": LoraMetadata(8, 3, torch.device("cpu"), max_columns=32, max_in=256)}
    return LoraBuffers(model, surface.linears, metadata, num_slots=3, max_rank=max_rank, dtype=dtype)


@pytest.fixture(scope="module")
def generations(llama_dir: Path, llama_adapters: dict[str, Path]) -> dict[torch.dtype, list[Generation]]:
    surface = surface_of(AutoModelForCausalLM.from_pretrained(llama_dir))
    return {
        dtype: [read_generation(path, replace(surface, lora_dtype=dtype)) for path in llama_adapters.values()]
        for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_rank", [8, 9])
@pytest.mark.parametrize("is_locked", [False, True])
def test_rows_hold_what_the_plain_copy_puts_there(
    llama_dir: Path,
    generations: dict[torch.dtype, list[Generation]],
    dtype: torch.dtype,
    max_rank: int,
    is_locked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: is_locked)
    plain, copied = make_buffers(llama_dir, dtype, max_rank), make_buffers(llama_dir, dtype, max_rank)
    copies = RowCopies(copied._groups, RING)
    monkeypatch.setattr(copies, "_send_whole" if not is_locked else "_send_chunk", None)  # The other way is not taken.
    chance = random.Random(0)
    for _ in range(12):
        lora_slot, generation = chance.randrange(3), chance.choice(generations[dtype])
        plain.write(lora_slot, generation)
        copy = copies.start(lora_slot, generation)
        copy.wait()
        assert copy.is_ready() and not copy.has_failed()
        for ours, theirs in zip(copied._groups, plain._groups, strict=True):
            assert torch.equal(ours.lora_a, theirs.lora_a) and torch.equal(ours.lora_b, theirs.lora_b)
            assert ours.host_ranks == theirs.host_ranks == ours.ranks.tolist() == theirs.ranks.tolist()
    assert any(group.lora_a.any() for group in copied._groups)
    copies.clear(lora_slot)
    copies.start((lora_slot + 1) % 3, generation).wait()  # One copy after the other.
    assert not any(group.ranks[lora_slot].any() or any(group.host_ranks[lora_slot]) for group in copied._groups)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("place", "is_locked"),
    [("_send_chunk", False), ("_rows", False), ("_scatter", False), ("_send_whole", True), ("_rows", True), ("_scatter", True)],
)  # fmt: skip
def test_a_fault_ends_that_copy_and_the_next_one_works(
    llama_dir: Path,
    generations: dict[torch.dtype, list[Generation]],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    is_locked: bool,
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: is_locked)
    buffers = make_buffers(llama_dir, torch.float32, 8)
    copies = RowCopies(buffers._groups, RING)
    first, second = generations[torch.float32][:2]

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(copies, place, fail)
        copy = copies.start(0, first)
        with pytest.raises(RuntimeError, match="out of memory"):
            copy.wait()
        with pytest.raises(RuntimeError, match="out of memory"):
            copy.is_ready()
        assert copy.has_failed()
    assert not any(any(group.host_ranks[0]) for group in buffers._groups), "a row that failed shows ranks"
    copies.clear(0)
    copy = copies.start(0, second)
    while not copy.is_ready():
        time.sleep(0.001)
    plain = make_buffers(llama_dir, torch.float32, 8)
    plain.write(0, second)
    for ours, theirs in zip(buffers._groups, plain._groups, strict=True):
        assert ours.ranks.tolist() == theirs.ranks.tolist()
        for member, rank in enumerate(theirs.host_ranks[0]):
            assert torch.equal(ours.lora_a[0, member, :rank], theirs.lora_a[0, member, :rank])
    assert copies._free_chunks.qsize() == RING.num_chunks


class _Gated(_Done):
    """An event of a device that takes its time: it happens when `gate` is opened."""

    gate = threading.Event()
    is_awaited = threading.Event()

    def __init__(self, *_: Any, **settings: Any) -> None:
        self._is_gated = settings == {"blocking": True}  # Those after which a slab is let go of.

    def synchronize(self) -> None:
        if self._is_gated:
            self.is_awaited.set()
            assert self.gate.wait(60)


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.002)
    return is_so()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("place", [None, "_rows", "_scatter"])
def test_a_slab_that_the_device_reads_is_kept_until_it_has(
    llama_dir: Path, llama_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch, place: str | None
) -> None:
    monkeypatch.setattr(slab_pool, "MIN_BYTES", 1)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch.cuda, "Event", _Gated)
    monkeypatch.setattr(_Gated, "gate", threading.Event())
    buffers = make_buffers(llama_dir, torch.float32, 8)
    copies = RowCopies(buffers._groups, RING)
    surface = surface_of(AutoModelForCausalLM.from_pretrained(llama_dir))
    pool = SlabPool()
    generation = read_generation(next(iter(llama_adapters.values())), surface, memory=pool.lend)
    slab = slab_of(generation)
    address, num_bytes, content = slab.data_ptr(), slab.nbytes, slab.clone()
    del slab
    if place is not None:

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(copies, place, fail)
    copy = copies.start(0, generation)
    del generation  # Unloaded while the copy is under way.
    if place is None:
        copy.wait()
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            copy.wait()
    del copy
    gc.collect()
    assert torch.equal(copies._staging[: len(content)], content)
    others = [pool.lend(num_bytes) for _ in range(4)]
    assert address not in {other.data_ptr() for other in others}, "the device still reads there"
    lent = pool.usage().lent_bytes
    _Gated.gate.set()
    assert eventually(lambda: pool.usage().lent_bytes < lent), "nobody let go of it"
    del others
    pool.close()


@pytest.mark.usefixtures("on_cpu")
def test_where_the_process_ends_the_copy_waits_for_the_device_itself(
    llama_dir: Path, generations: dict[torch.dtype, list[Generation]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch.cuda, "Event", _Gated)
    monkeypatch.setattr(_Gated, "gate", threading.Event())
    monkeypatch.setattr(_Gated, "is_awaited", threading.Event())
    copies = RowCopies(make_buffers(llama_dir, torch.float32, 8)._groups, RING)
    copies._kept.shutdown()
    copy = copies.start(0, generations[torch.float32][0])
    assert _Gated.is_awaited.wait(60) and not copy._queued.done()
    _Gated.gate.set()
    with pytest.raises(RuntimeError, match="after shutdown"):
        copy.wait()


@pytest.mark.parametrize(("lengths", "item_bytes"), [((16, 8), 8), ((16, 6), 4), ((16, 5), 2), ((3, 8), 2)])
def test_the_widest_elements_that_fit_are_moved(lengths: tuple[int, ...], item_bytes: int) -> None:
    source = torch.arange(500, dtype=torch.int16)
    targets = [torch.zeros(4, 32, dtype=torch.int16) for _ in lengths]
    table = np.array(
        [
            (target.data_ptr(), 64 * index, 4, length, 32)
            for index, (target, length) in enumerate(zip(targets, lengths, strict=True))
        ],
        np.int64,
    )
    wide = widened(source[:496], table)
    assert wide.element_size() == item_bytes
    scatter_rows_(wide, torch.from_numpy(table), 4 * 16)
    for index, (target, length) in enumerate(zip(targets, lengths, strict=True)):
        assert torch.equal(target[:, :length], source[64 * index :][: 4 * length].view(4, length))
        assert not target[:, length:].any()
