"""Loads that many wait for: one thread, a handle for each waiter, and nothing left over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters import intake
from adapters.errors import AdapterFilesNotFound, AdapterNotFound
from adapters.flights import Flights
from adapters.generation import GenerationHandle
from adapters.manager import AdapterManager
from adapters.surface import ModelSurface
from tests.adapters.world import edit


class Gate:
    """Stands before the reading of files."""

    def __init__(self) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.is_reached.set()
        assert self.is_open.wait(120)
        return self.real(*args, **kwargs)

    real: Callable[..., Any] = staticmethod(intake.read_adapter)


@pytest.fixture
def manager(surface: ModelSurface, reference: Path, tmp_path: Path) -> Iterator[AdapterManager]:
    """`cold` was evicted by `warm`."""
    manager = AdapterManager(surface, adapter_dir=None, max_cpu_loras=1)
    manager.load("cold", reference)
    manager.load("warm", edit(reference, tmp_path / "warm", config={"lora_alpha": 3}))
    assert [info.state for info in manager.list()] == ["disk", "cpu"]
    yield manager
    manager.check_integrity()
    manager.close()


@pytest.fixture
def gate(manager: AdapterManager, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(intake, "read_adapter", gate)
    yield gate
    gate.is_open.set()


def test_waiting_for_a_slow_adapter_takes_one_thread_and_each_waiter_gets_a_handle(
    manager: AdapterManager, gate: Gate
) -> None:
    num_threads = threading.active_count()
    futures = [manager.acquire_soon("cold") for _ in range(100)]
    assert gate.is_reached.wait(120) and threading.active_count() <= num_threads + 1
    manager.acquire("warm").release()
    futures[0].cancel()
    gate.is_open.set()
    handles = [future.result(120) for future in futures[1:]]
    assert len({id(handle) for handle in handles}) == 99 and len({id(handle.generation) for handle in handles}) == 1
    assert manager.get("cold").num_requests == 99 and manager.get("cold").num_loads == 2
    assert all(handle.load_ms > 0 for handle in handles)
    for handle in handles:
        assert manager.stats().num_cpu == 1
        handle.release()


def test_who_asks_after_a_replacement_does_not_get_what_was_asked_for_before(
    manager: AdapterManager, gate: Gate, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = manager.acquire_soon("cold")
    assert gate.is_reached.wait(120)
    monkeypatch.setattr(intake, "read_adapter", gate.real)
    new = manager.load("cold", edit(reference, tmp_path / "new", config={"lora_alpha": 5}), load_inplace=True)
    after = manager.acquire_soon("cold")
    assert after.done() and after.result().generation.digest == new.generation
    gate.is_open.set()
    assert before.result(120).generation.digest == new.generation
    for future in (before, after):
        future.result().release()


def test_an_error_reaches_every_waiter_and_the_next_one_tries_again(
    manager: AdapterManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise AdapterFilesNotFound("gone")

    with monkeypatch.context() as patch:
        patch.setattr(intake, "read_adapter", broken)
        for future in [manager.acquire_soon("cold") for _ in range(3)]:
            with pytest.raises(AdapterFilesNotFound):
                future.result(120)
    assert isinstance(manager.acquire_soon("nobody").exception(), AdapterNotFound)
    manager.acquire("cold").release()


def test_keys_beyond_the_threads_queue_and_late_ones_are_served_in_person() -> None:
    flights, releases = Flights(2), []
    gate = threading.Barrier(3)

    def load(is_slow: bool) -> GenerationHandle:
        if is_slow:
            gate.wait(120)
        return GenerationHandle("x", SimpleNamespace(digest="d"), release=releases.append)  # type: ignore[arg-type]

    slow = [flights.join(key, lambda: load(True)) for key in "ab"]
    queued = flights.join("c", lambda: load(False))
    assert not queued.done() and len(flights) == 3
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gate.wait, 120)
    for future in [*slow, queued]:
        future.result(120).release()
    flights.close()
    flights.join("d", lambda: load(False)).result(0).release()
    assert len(flights) == 0 and len(releases) == 8, "each load's own handle and each waiter's"
