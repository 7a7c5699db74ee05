"""Memory of slabs: lent to one at a time, used again, bounded, unlocked before it goes, and never part of what is read."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adapters import slab_pool
from adapters.errors import AdapterRefused
from adapters.intake import read_generation
from adapters.manager import AdapterManager
from adapters.slab_pool import MAX_IDLE, SlabPool
from adapters.surface import ModelSurface
from tests.adapters.world import edit

PAGE = slab_pool.mmap.PAGESIZE
SIZE = 10 * PAGE


class CountingLock:
    """Locks pages on paper, and notes what a real one would not forgive."""

    def __init__(self, limit: int = 10**9) -> None:
        self.limit = limit
        self.locked: dict[int, int] = {}
        self.num_locks = 0
        self.faults: list[str] = []

    def lock(self, address: int, num_bytes: int) -> bool:
        if address % PAGE or num_bytes % PAGE:
            self.faults.append("not whole pages")
        for start, length in list(self.locked.items()):
            if start < address + num_bytes and address < start + length:
                self.faults.append("pages are locked that were freed while they were locked")
        if sum(self.locked.values()) + num_bytes > self.limit:
            return False
        self.locked[address] = num_bytes
        self.num_locks += 1
        return True

    def unlock(self, address: int) -> None:
        if self.locked.pop(address, None) is None:
            self.faults.append("unlocked twice")


class DirtyLock(CountingLock):
    """Fills what it locks."""

    def lock(self, address: int, num_bytes: int) -> bool:
        ctypes.memset(address, 0xA5, num_bytes)
        return super().lock(address, num_bytes)


@pytest.fixture(autouse=True)
def pools_small_slabs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_pool, "MIN_BYTES", 1)


@pytest.fixture
def lock() -> Iterator[CountingLock]:
    lock = CountingLock()
    yield lock
    if lock.locked:
        gc.collect()
    assert not lock.faults and not lock.locked


@pytest.fixture
def pool(lock: CountingLock) -> Iterator[SlabPool]:
    pool = SlabPool(lock)
    yield pool
    pool.check_integrity()
    pool.close()


@pytest.fixture
def still_pool(pool: SlabPool) -> SlabPool:
    """A pool without a thread of its own: it does what `tidy` has it do."""
    pool._thread = threading.current_thread()
    return pool


def tidy(pool: SlabPool) -> None:
    """What the pool's thread does at each turn."""
    pool._trim()
    pool._make_ready()


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.002)


def test_memory_that_came_back_is_lent_again(pool: SlabPool, lock: CountingLock) -> None:
    for value in range(30):
        memory = pool.lend(SIZE - value)  # Up to a page less: an adapter that is a little smaller.
        assert len(memory) == memory.untyped_storage().nbytes() == SIZE - value and memory.data_ptr() % PAGE == 0
        memory.fill_(value)
        del memory
    wait_for(lambda: pool.usage().num_idle == lock.num_locks)
    assert lock.num_locks <= 2, "only the first, and the one that is kept ready"
    assert pool.usage().lent_bytes == 0


@pytest.mark.parametrize(
    "view_of",
    [
        lambda memory: memory.view(torch.float32)[5:].view(-1, 5),
        lambda memory: memory.as_strided((4, 7), (7, 1), 64),
        lambda memory: torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage()),
        lambda memory: memory.numpy()[100:],
        lambda memory: memory.view(torch.int32).numpy().data,
        lambda memory: iter([memory[1:]]),
    ],
)
def test_memory_is_lent_for_as_long_as_anything_shows_it(
    pool: SlabPool, view_of: Callable[[torch.Tensor], object]
) -> None:
    view = view_of(pool.lend(SIZE))
    assert pool.usage().lent_bytes == SIZE
    others = [pool.lend(SIZE) for _ in range(4)]
    assert len({other.data_ptr() for other in others}) == 4
    assert pool.usage().lent_bytes == 5 * SIZE
    del view
    assert pool.usage().lent_bytes == 4 * SIZE


def test_slabs_get_no_buffer_that_is_much_larger_or_smaller(pool: SlabPool) -> None:
    kept = pool.lend(SIZE)
    wait_for(lambda: pool.usage().idle_bytes == SIZE)
    for num_bytes, is_taken in ((SIZE + 1, False), (6 * PAGE, False), (8 * PAGE, True)):
        before = pool.usage()
        lent = pool._take(num_bytes)
        assert (lent is not None) == is_taken
        if lent is None:
            assert pool.usage() == before
        else:
            pool._idle.append(lent)
    del kept


def test_one_buffer_of_the_size_last_asked_for_is_ready(pool: SlabPool, lock: CountingLock) -> None:
    pool.prepare(3 * SIZE)
    wait_for(lambda: pool.usage().idle_bytes == 3 * SIZE)
    pool.prepare(SIZE)
    kept = [pool.lend(3 * SIZE)]
    wait_for(lambda: pool.usage().idle_bytes == 3 * SIZE)
    kept.append(pool.lend(SIZE))
    wait_for(lambda: pool.usage().idle_bytes == 4 * SIZE)
    assert lock.num_locks == 4 and pool.usage().num_idle == 2


def test_idle_memory_is_bounded_in_number(pool: SlabPool, lock: CountingLock) -> None:
    lent = [pool.lend(SIZE) for _ in range(12)]
    num_made = lock.num_locks
    assert num_made >= 12
    lent.clear()
    wait_for(lambda: pool.usage().num_idle == MAX_IDLE and len(lock.locked) == MAX_IDLE)
    assert pool.usage().lent_bytes == 0


def test_the_one_that_is_made_ready_counts_among_those_that_wait(still_pool: SlabPool, lock: CountingLock) -> None:
    lent = [still_pool.lend(SIZE) for _ in range(6)]
    lent.clear()
    tidy(still_pool)
    kept = still_pool.lend(5 * SIZE)
    tidy(still_pool)
    usage = still_pool.usage()
    assert (usage.num_idle, usage.idle_bytes) == (MAX_IDLE, (5 + MAX_IDLE - 1) * SIZE)
    assert len(lock.locked) == MAX_IDLE + 1
    del kept


def test_idle_memory_is_bounded_in_bytes(pool: SlabPool, lock: CountingLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_pool, "MAX_IDLE_BYTES", int(2.5 * SIZE))
    lent = [pool.lend(SIZE) for _ in range(6)]
    lent.clear()
    wait_for(lambda: pool.usage().num_idle == len(lock.locked) == 2)


def test_none_is_made_ready_or_kept_that_is_larger_than_all_that_may_wait(
    still_pool: SlabPool, lock: CountingLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = still_pool
    bound = 25 * PAGE
    monkeypatch.setattr(slab_pool, "MAX_IDLE_BYTES", bound)
    large = pool.lend(4 * SIZE)
    tidy(pool)
    assert pool.usage().num_idle == 0 and sum(lock.locked.values()) == 4 * SIZE
    del large
    tidy(pool)
    assert pool.usage().num_idle == 0 and not lock.locked
    kept = pool.lend(SIZE)
    large = pool.lend(4 * SIZE)  # Not a size to be ready for: the one before stays usual.
    tidy(pool)
    assert pool.usage().idle_bytes == SIZE
    del kept, large
    slightly_larger = pool.lend(bound + PAGE)
    kept = pool.lend(bound)
    del slightly_larger  # `kept`'s size would fit in there.
    tidy(pool)
    assert pool.usage().idle_bytes == bound and sum(lock.locked.values()) == 2 * bound
    del kept


def test_with_a_bound_on_all_memory_only_the_next_loads_buffer_lies_beyond_it(lock: CountingLock) -> None:
    pool = SlabPool(lock, max_bytes=4 * SIZE)
    lent = [pool.lend(SIZE) for _ in range(6)]
    wait_for(lambda: pool.usage().num_idle == 1)
    del lent[4:]
    wait_for(lambda: (pool.usage().num_idle, len(lock.locked)) == (1, 5))
    del lent[2:]
    wait_for(lambda: (pool.usage().num_idle, len(lock.locked)) == (2, 4))
    lent.clear()
    wait_for(lambda: (pool.usage().num_idle, len(lock.locked)) == (4, 4))
    pool.close()


def test_memory_that_cannot_be_locked_is_lent_all_the_same() -> None:
    lock = CountingLock(limit=2 * SIZE)
    pool = SlabPool(lock)
    lent = [pool.lend(SIZE) for _ in range(5)]
    assert len({memory.data_ptr() for memory in lent}) == 5 and len(lock.locked) == 2
    lent.clear()
    pool.close()
    assert not lock.locked and not lock.faults


def test_a_lock_that_raises_fails_no_load(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(CountingLock):
        def lock(self, address: int, num_bytes: int) -> bool:
            raise RuntimeError("the device has gone")

    pool = SlabPool(Broken())
    kept = pool.lend(SIZE).fill_(1)
    wait_for(lambda: pool.usage().num_idle == 1)
    assert kept.sum() == SIZE and "the device has gone" in caplog.text
    del kept
    pool.close()


def test_the_pools_thread_outlives_a_fault(
    pool: SlabPool, lock: CountingLock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_calls = 0

    def fail() -> None:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("no more buffers")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_make_ready", fail)
        lent = [pool.lend(SIZE) for _ in range(12)]
        wait_for(lambda: num_calls > 2)
    lent.clear()
    wait_for(lambda: pool.usage().num_idle == len(lock.locked) == MAX_IDLE and pool._wakes.empty())
    assert [record.message for record in caplog.records] == [
        "event=adapter_memory_not_kept_ready reason=RuntimeError('no more buffers')"
    ]


def test_small_slabs_are_left_to_the_system(monkeypatch: pytest.MonkeyPatch, lock: CountingLock) -> None:
    monkeypatch.setattr(slab_pool, "MIN_BYTES", SIZE)
    pool = SlabPool(lock)
    assert len(pool.lend(SIZE - 1)) == SIZE - 1
    pool.prepare(SIZE - 1)
    assert pool._thread is None and lock.num_locks == 0
    pool.close()


def test_after_the_end_nothing_idle_is_left_and_what_is_lent_goes_when_it_comes_back(lock: CountingLock) -> None:
    pool = SlabPool(lock)
    first, second = pool.lend(SIZE), pool.lend(SIZE)
    del second
    first.fill_(7)
    pool.close()
    assert pool.usage().num_idle == 0 and len(lock.locked) == 1
    assert (first == 7).all()
    late = pool.lend(SIZE)
    assert len(late) == SIZE and len(lock.locked) == 1
    del first
    assert not lock.locked
    pool.close()


def test_memory_is_never_lent_twice_while_it_lives(pool: SlabPool, lock: CountingLock) -> None:
    faults: list[str] = []
    num_done = [0] * 4

    def borrow(number: int) -> None:
        chance = random.Random(number)
        held: list[tuple[int, torch.Tensor]] = []
        for turn in range(150):
            memory = pool.lend(chance.choice((SIZE, SIZE - PAGE, 2 * SIZE)))
            mark = (number * 61 + turn) % 251
            memory.fill_(mark)
            held.append((mark, memory[PAGE:]))
            del memory
            if len(held) > 3 or chance.random() < 0.4:
                mark, view = held.pop(chance.randrange(len(held)))
                if not (view == mark).all():
                    faults.append(f"another one wrote there: {mark}")
                if chance.random() < 0.5:
                    ring: list[object] = [view]
                    ring.append(ring)  # Only the collector finds it.
                    del ring
                del view
            if chance.random() < 0.1:
                gc.collect(0)
            num_done[number] += 1

    threads = [threading.Thread(target=borrow, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and num_done == [150] * 4
    gc.collect()
    wait_for(lambda: pool.usage().lent_bytes == 0 and pool.usage().num_idle == len(lock.locked) <= MAX_IDLE)


def test_a_collection_at_any_moment_can_give_memory_back(pool: SlabPool) -> None:
    ring: list[object] = [pool.lend(SIZE)]
    ring.append(ring)
    before = pool.usage().lent_bytes

    def collect() -> None:
        with pool._lock:  # As within `lend`, where anything that is allocated may begin a collection.
            gc.collect()

    del ring
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "what gives memory back waits for a lock"
    assert before == SIZE and pool.usage().lent_bytes == 0


def flags_of(address: int) -> list[str]:
    """How the system treats the memory at an address."""
    flags: list[str] = []
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            start, end = (int(word, 16) for word in words[0].split("-"))
            is_there = start <= address < end
        elif is_there and words[0] == "VmFlags:":
            flags = words[1:]
    return flags


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not tell")
def test_children_do_not_get_what_is_locked(pool: SlabPool) -> None:
    locked, other_pool = pool.lend(SIZE), SlabPool()
    plain = other_pool.lend(SIZE)
    assert "dc" in flags_of(locked.data_ptr()) and "dc" not in flags_of(plain.data_ptr()), "dc: do not copy on fork"
    other_pool.close()


def test_memory_that_the_system_does_not_have_is_a_memory_error(pool: SlabPool) -> None:
    with pytest.raises(MemoryError, match="bytes for an adapter"):
        pool.lend(1 << 60)
    assert pool.usage().lent_bytes == 0
    assert len(pool.lend(SIZE)) == SIZE


def bytes_of(folder: Path, surface: ModelSurface, memory: Callable[[int], torch.Tensor]) -> bytes:
    generation = read_generation(folder, surface, memory=memory)
    storage = next(iter(generation.pairs.values())).a.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_slab_in_used_memory_equals_one_in_fresh_memory_byte_for_byte(
    reference: Path, surface: ModelSurface, tmp_path: Path, stored: torch.dtype
) -> None:
    def odd(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # Rank 3: no half ends where the next one begins.
        return {
            name: (tensor[:3] if "lora_A" in name else tensor[:, :3]).to(stored).contiguous()
            for name, tensor in tensors.items()
        }

    folder = edit(reference, tmp_path / "odd", tensors=odd, config={"r": 3})
    for serving in (torch.float32, torch.bfloat16):
        served = replace(surface, lora_dtype=serving)
        fresh = bytes_of(folder, served, lambda n: torch.from_numpy(np.zeros(n, np.uint8)))
        for more in (0, PAGE):  # A buffer of just that size, and a larger one.
            pool = SlabPool(DirtyLock())
            pool.lend(len(fresh) + more)
            was_full: list[bool] = []

            def lend(num_bytes: int, pool: SlabPool = pool, was_full: list[bool] = was_full) -> torch.Tensor:
                memory = pool.lend(num_bytes)
                was_full.append(bool((memory == 0xA5).all()))
                return memory

            assert bytes_of(folder, served, lend) == fresh and was_full == [True]
            pool.close()


def test_a_manager_reads_into_memory_of_what_went_before(
    reference: Path, surface: ModelSurface, tmp_path: Path, lock: CountingLock
) -> None:
    def changed(number: int) -> Path:
        return edit(
            reference, tmp_path / str(number), tensors=lambda rows: {name: row + number for name, row in rows.items()}
        )

    folders = [changed(number) for number in range(5)]
    fresh = [read_generation(folder, surface) for folder in folders]
    manager = AdapterManager(surface, adapter_dir=None, max_cpu_loras=2, slabs=SlabPool(lock))
    for turn in range(20):
        index = turn % len(folders)
        manager.load("x", folders[index], load_inplace=True)
        with manager.borrow("x") as handle:
            assert handle.generation.digest == fresh[index].digest
            for name, pair in handle.generation.pairs.items():
                assert torch.equal(pair.a, fresh[index].pairs[name].a)
                assert torch.equal(pair.b, fresh[index].pairs[name].b)
        if turn % 3 == 0:
            manager.unload("x")
        del handle, pair
        manager.check_integrity()
    gc.collect()
    assert lock.num_locks <= 2 + MAX_IDLE
    wait_for(lambda: manager.stats().spare_bytes > 0)
    manager.close()
    assert manager.stats().spare_bytes == 0


def test_a_refused_adapter_gives_its_memory_back(
    reference: Path, surface: ModelSurface, tmp_path: Path, pool: SlabPool
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor * float("nan") for name, tensor in tensors.items()}

    folder = edit(reference, tmp_path / "x", tensors=spoil)
    with pytest.raises(AdapterRefused, match="NaN"):
        read_generation(folder, surface, memory=pool.lend)
    gc.collect()
    wait_for(lambda: pool.usage().num_idle > 0)
    assert pool.usage().lent_bytes == 0


def test_a_system_without_anonymous_maps_lends_as_well(pool: SlabPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MAP_ANONYMOUS")
    memory = pool.lend(SIZE)
    assert memory.fill_(7).eq(7).all() and pool.usage().lent_bytes >= SIZE
