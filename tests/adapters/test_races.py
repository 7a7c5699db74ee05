"""Many threads on the same names: one winner, no half-loaded adapter, no lock left behind."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapters import intake
from adapters.errors import AdapterExists, AdapterNotFound
from adapters.manager import AdapterManager
from adapters.surface import ModelSurface
from tests.adapters.world import edit


def outcomes(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run all calls at once, from a common start; each gives its result or its exception."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - what was raised is the result
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@pytest.fixture
def manager(surface: ModelSurface, tmp_path: Path) -> AdapterManager:
    return AdapterManager(surface, adapter_dir=tmp_path / "own", max_cpu_loras=2)


@pytest.fixture
def twin(reference: Path, tmp_path: Path) -> Path:
    return edit(reference, tmp_path / "twin", config={"lora_alpha": 16})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each folder was read."""
    counter: Counter[str] = Counter()
    real = intake.read_adapter

    def counted(folder: Path, *args: Any, **kwargs: Any) -> Any:
        counter[folder.name] += 1
        return real(folder, *args, **kwargs)

    monkeypatch.setattr(intake, "read_adapter", counted)
    return counter


@pytest.mark.parametrize("_", range(5))
def test_of_many_loads_of_one_name_one_wins_and_is_read_once(
    manager: AdapterManager, reference: Path, twin: Path, reads: Counter[str], _: int
) -> None:
    results = outcomes([lambda path=path: manager.load("sql", path) for path in [reference, twin] * 16])  # type: ignore[misc]
    winners = [result for result in results if not isinstance(result, Exception)]
    assert len(winners) == 1 and sum(isinstance(result, AdapterExists) for result in results) == 31
    assert [info.source for info in manager.list()] == [winners[0].source] and reads.total() == 1
    manager.check_integrity()


@pytest.mark.parametrize("seed", range(10))
def test_loads_unloads_and_borrowing_in_any_order_never_show_half_an_adapter(
    manager: AdapterManager, reference: Path, twin: Path, seed: int
) -> None:
    whole = {manager.load(f"x{index}", path).generation for index, path in enumerate((reference, twin))}

    def borrow() -> str:
        with manager.acquire("sql") as handle:
            assert len(handle.generation.pairs) == 4
            return handle.generation.digest

    calls: list[Callable[[], Any]] = [
        *[lambda path=path: manager.load("sql", path) for path in [reference, twin] * 8],  # type: ignore[misc]
        *[lambda: manager.unload("sql")] * 16,
        *[borrow] * 16,
        *[lambda: manager.load("sql", twin, load_inplace=True)] * 4,
        *[lambda: manager.list()] * 4,
    ]
    random.Random(seed).shuffle(calls)
    for result in outcomes(calls):
        if isinstance(result, Exception):
            assert isinstance(result, (AdapterExists, AdapterNotFound)), repr(result)
        elif isinstance(result, str):
            assert result in whole
    manager.check_integrity()
    assert manager.stats().num_cpu <= 2


def test_evicted_content_is_read_once_for_all_who_wait(
    manager: AdapterManager, reference: Path, twin: Path, tmp_path: Path, reads: Counter[str]
) -> None:
    manager.load("a", edit(reference, tmp_path / "first"))
    manager.load("b", twin)
    manager.load("c", edit(reference, tmp_path / "third", config={"lora_alpha": 24}))
    assert manager.get("a").state == "disk"
    handles = outcomes([lambda: manager.acquire("a")] * 16)
    assert reads["first"] == 2 and len({id(handle.generation) for handle in handles}) == 1
    assert (manager.get("a").num_loads, manager.get("a").num_requests) == (2, 16)
    with manager.acquire("a") as warm:
        assert warm.load_ms == 0.0 < max(handle.load_ms for handle in handles)
    for handle in handles:
        handle.release()
    manager.check_integrity()


def test_borrowing_does_not_wait_for_a_replacement_that_is_being_read(
    manager: AdapterManager, reference: Path, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = manager.load("sql", reference)
    is_reading, go_on = threading.Event(), threading.Event()
    real = intake.read_adapter

    def slow(*args: Any, **kwargs: Any) -> Any:
        is_reading.set()
        assert go_on.wait(120)
        return real(*args, **kwargs)

    monkeypatch.setattr(intake, "read_adapter", slow)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(manager.load, "sql", twin, load_inplace=True)
        assert is_reading.wait(120)
        with manager.acquire("sql") as handle:
            assert handle.generation.digest == first.generation
        go_on.set()
        assert loading.result(120).generation != first.generation


def test_a_reload_that_a_replacement_overtakes_gives_the_new_content(
    manager: AdapterManager, reference: Path, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.load("a", reference)
    for alpha in (24, 32):
        manager.load(f"x{alpha}", edit(reference, tmp_path / str(alpha), config={"lora_alpha": alpha}))
    assert manager.get("a").state == "disk"
    real, new = intake.read_adapter, []

    def read(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(intake, "read_adapter", real)
        new.append(manager.load("a", twin, load_inplace=True))
        return real(*args, **kwargs)

    monkeypatch.setattr(intake, "read_adapter", read)
    with manager.acquire("a") as handle:
        assert handle.generation.digest == new[0].generation
    manager.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_uploads_of_one_name_at_once_leave_one_stored_adapter(
    manager: AdapterManager, reference: Path, twin: Path, tmp_path: Path, seed: int
) -> None:
    uploads = [
        {name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
        for folder in (reference, twin)
    ]
    calls: list[Callable[[], Any]] = [
        *[lambda files=files: manager.install_upload("sql", files) for files in uploads * 4],  # type: ignore[misc]
        *[lambda: manager.install_upload("sql", uploads[1], load_inplace=True)] * 4,
        *[lambda: manager.inspect_upload(uploads[0])] * 2,
        *[lambda: manager.unload("sql")] * 4,
    ]
    random.Random(seed).shuffle(calls)
    for result in outcomes(calls):
        if isinstance(result, Exception):
            assert isinstance(result, (AdapterExists, AdapterNotFound)), repr(result)
    manager.check_integrity()
    if manager.contains("sql"):
        manager.acquire("sql").release()
        manager.unload("sql")
    assert [*(tmp_path / "own" / "adapters").iterdir()] == [*(tmp_path / "own" / "incoming").iterdir()] == []
