"""What is asked of CUDA to lock memory, and what a refusal leaves behind; that it locks is tested in `tests/gpu`."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch

from adapters import slab_pool
from adapters.slab_pool import SlabPool
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


def test_by_default_a_quarter_of_the_hosts_memory_is_the_bound(runtime: _Runtime) -> None:
    lock = CudaPageLock(torch.device("cpu"))
    assert 2**26 < lock._max_bytes < 2**46
    assert not lock.lock(0, lock._max_bytes + 1) and lock.lock(0, lock._max_bytes)
