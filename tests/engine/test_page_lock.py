"""What is asked of CUDA to lock memory, and what a refusal leaves behind; that it locks is tested in `tests/gpu`."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from adapters import slab_pool
from adapters.slab_pool import SlabPool
from engine import page_lock
from engine.page_lock import CudaPageLock

PAGE = slab_pool.mmap.PAGESIZE


class _Runtime:
    """CUDA's runtime on paper; `status` is what it answers."""

    def __init__(self) -> None:
        self.status = 0
        self.calls: list[tuple[Any, ...]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, num_bytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.status


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    runtime = _Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(slab_pool, "MIN_BYTES", 1)
    return runtime


def test_buffers_are_locked_once_and_unlocked_when_they_go(runtime: _Runtime) -> None:
    lock = CudaPageLock(torch.device("cpu"))
    pool = SlabPool(lock)
    for _ in range(9):
        pool.lend(3 * PAGE)
    kept = pool.lend(3 * PAGE)
    pool.close()
    assert lock.num_bytes == 3 * PAGE
    del kept
    registered = [call[1] for call in runtime.calls if call[0] == "register"]
    unregistered = [call[1] for call in runtime.calls if call[0] == "unregister"]
    assert 1 <= len(registered) <= 3 and sorted(registered) == sorted(unregistered) and lock.num_bytes == 0
    assert all(call[2:] == (3 * PAGE, 0) for call in runtime.calls if call[0] == "register")


def test_refusals_are_logged_once_and_memory_serves_without(
    runtime: _Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.status = 2
    lock = CudaPageLock(torch.device("cpu"))
    pool = SlabPool(lock)
    with caplog.at_level(logging.WARNING):
        kept = [pool.lend(3 * PAGE).fill_(1) for _ in range(4)]
    assert lock.num_bytes == 0 and len(kept) == 4
    kept.clear()
    pool.close()
    assert [record.message for record in caplog.records] == [
        "event=memory_not_page_locked bytes_locked=0 reason='cudaHostRegister gave 2'"
    ]
    assert not any(call[0] == "unregister" for call in runtime.calls)


def test_no_more_is_locked_than_the_bound(runtime: _Runtime, caplog: pytest.LogCaptureFixture) -> None:
    lock = CudaPageLock(torch.device("cpu"), 7 * PAGE)
    assert [lock.lock(number * 16 * PAGE, 3 * PAGE) for number in range(4)] == [True, True, False, False]
    assert lock.num_bytes == 6 * PAGE and len(runtime.calls) == 2
    lock.unlock(0)
    assert lock.lock(16 * 16 * PAGE, 4 * PAGE)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_by_default_a_quarter_of_the_hosts_memory_is_the_bound(
    runtime: _Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_lock, "total_bytes", lambda: 12 * PAGE)
    lock = CudaPageLock(torch.device("cpu"))
    assert not lock.lock(0, 3 * PAGE + 1) and lock.lock(0, 3 * PAGE)


def test_loads_that_lock_at_once_keep_the_bound_together(runtime: _Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = CudaPageLock(torch.device("cpu"), 7 * PAGE)
    is_registering, may_go_on = threading.Event(), threading.Event()
    register = runtime.cudaHostRegister

    def slow(address: int, num_bytes: int, flags: int) -> int:
        is_registering.set()
        assert may_go_on.wait(60)
        return register(address, num_bytes, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", slow)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(lock.lock, 0, 4 * PAGE)
        assert is_registering.wait(60)
        monkeypatch.setattr(runtime, "cudaHostRegister", register)
        second = lock.lock(16 * PAGE, 4 * PAGE)
        may_go_on.set()
        assert first.result() and not second
    assert lock.num_bytes == 4 * PAGE
    assert lock.lock(16 * PAGE, 3 * PAGE)


def test_what_could_not_be_locked_leaves_its_room_to_others(
    runtime: _Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock = CudaPageLock(torch.device("cpu"), 4 * PAGE)
    runtime.status = 2
    assert not lock.lock(0, 4 * PAGE)

    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device", fail)
        assert not lock.lock(0, 4 * PAGE)
    runtime.status = 0
    assert lock.lock(0, 4 * PAGE)
    assert not lock.lock(16 * PAGE, PAGE), "all room is taken"
    lock.unlock(0)
    assert lock.num_bytes == 0 and len(caplog.records) == 1
