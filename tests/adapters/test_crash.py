"""Kill -9 at any moment: every stored adapter is whole or absent, and nothing else is left."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters import vault
from adapters.catalog import Catalog, CatalogRow
from adapters.errors import AdapterStoreFault
from adapters.manager import AdapterManager
from adapters.surface import ModelSurface
from tests.adapters.world import edit


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}


def check_whole(surface: ModelSurface, root: Path, digests: set[str | None]) -> list[str]:
    """Open the folder again: each listed adapter must be complete, and each folder listed. Returns the names."""
    manager = AdapterManager(surface, adapter_dir=root, max_cpu_loras=4)
    for info in manager.restore():
        assert info.state == "disk" and info.error is None, info
        with manager.acquire(info.name) as handle:
            assert handle.generation.digest in digests
    listed = {version for name in manager.names() for version in _folders(root, name)}
    assert {path.name for path in (root / "adapters").iterdir()} == listed
    assert [*(root / "incoming").iterdir()] == []
    manager.close()
    return manager.names()


def _folders(root: Path, name: str) -> list[str]:
    with sqlite3.connect(root / "catalog.sqlite3") as db:
        rows = db.execute("SELECT folder FROM versions WHERE name = ?", (name,)).fetchall()
    db.close()
    return [folder for (folder,) in rows]


def work(surface: ModelSurface, root: Path, uploads: list[dict[str, bytes]], seed: int, ready: int) -> None:
    """Install, replace and delete until killed; writes a byte after each step. Runs in a child process."""
    chance = random.Random(seed)
    manager = AdapterManager(surface, adapter_dir=root, max_cpu_loras=4)
    manager.restore()
    while True:
        name = chance.choice("abc")
        if manager.contains(name) and chance.random() < 0.3:
            manager.unload(name)
        else:
            manager.install_upload(name, chance.choice(uploads), load_inplace=True)
        os.write(ready, b".")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_killed_server_leaves_each_stored_adapter_whole_or_absent(
    surface: ModelSurface, reference: Path, tmp_path: Path
) -> None:
    root, chance = tmp_path / "own", random.Random(5)
    uploads = [files_of(reference), files_of(edit(reference, tmp_path / "x", config={"lora_alpha": 3}))]
    probe = AdapterManager(surface, adapter_dir=None, max_cpu_loras=4)
    digests = {
        probe.load("a", reference).generation,
        probe.load("b", tmp_path / "x").generation,
    }
    num_found = 0
    for seed in range(15):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                work(surface, root, uploads, seed, writer)
            finally:
                os._exit(1)
        os.close(writer)
        for _ in range(chance.randrange(1, 6)):
            assert os.read(reader, 1) == b"."
        # A few microseconds to milliseconds into the next step, so that kills fall between all of its parts.
        for _ in range(chance.randrange(0, 60_000)):
            pass
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child must not end by itself"
        os.close(reader)
        num_found += len(check_whole(surface, root, digests))
    assert num_found > 5, "the children must have stored something"


class Killed(BaseException):
    """Stands for the end of the process."""


STEPS: dict[str, Callable[[pytest.MonkeyPatch, Callable[..., Any]], None]] = {
    "fsync": lambda patch, die: patch.setattr(vault, "_fsync", die),
    "rename": lambda patch, die: patch.setattr(vault.os, "replace", die),
    "row": lambda patch, die: patch.setattr(Catalog, "put", die),
    "old versions": lambda patch, die: patch.setattr(vault.Vault, "delete_folders", die),
}


@pytest.mark.parametrize("step", STEPS)
def test_the_end_at_each_step_of_an_upload_leaves_old_or_new(
    surface: ModelSurface, reference: Path, tmp_path: Path, step: str
) -> None:
    root = tmp_path / "own"
    manager = AdapterManager(surface, adapter_dir=root, max_cpu_loras=4)
    first = manager.install_upload("a", files_of(reference))
    twin = files_of(edit(reference, tmp_path / "x", config={"lora_alpha": 3}))
    with pytest.MonkeyPatch.context() as patch:
        # what the process would have cleaned up on the way out is not cleaned up
        patch.setattr(vault.Vault, "discard", lambda *args: None)

        def die(*args: Any, **kwargs: Any) -> None:
            raise Killed

        STEPS[step](patch, die)
        with pytest.raises(Killed):
            manager.install_upload("a", twin, load_inplace=True)
    manager.close()
    second = AdapterManager(surface, adapter_dir=None, max_cpu_loras=4).load("b", tmp_path / "x")
    expected = {second.generation} if step == "old versions" else {first.generation}
    assert check_whole(surface, root, expected) == ["a"]


def test_the_end_between_row_and_files_of_a_deletion_leaves_nothing(
    surface: ModelSurface, reference: Path, tmp_path: Path
) -> None:
    root = tmp_path / "own"
    manager = AdapterManager(surface, adapter_dir=root, max_cpu_loras=4)
    manager.install_upload("a", files_of(reference))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vault.Vault, "delete_folders", lambda *args: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            manager.unload("a")
    manager.close()
    assert check_whole(surface, root, set()) == []


def test_a_second_server_on_the_folder_does_not_sweep_the_firsts_work(
    surface: ModelSurface, reference: Path, tmp_path: Path
) -> None:
    root = tmp_path / "own"
    first = AdapterManager(surface, adapter_dir=root, max_cpu_loras=4)
    first.install_upload("a", files_of(reference))
    (root / "incoming" / "under-way").mkdir()
    second = AdapterManager(surface, adapter_dir=root, max_cpu_loras=4)
    assert [info.name for info in second.restore()] == ["a"] and (root / "incoming" / "under-way").is_dir()
    first.close()
    second.close()
    check_whole(surface, root, {first.get("a").generation})


def row(name: str, folder: str, created: float = 1.0, digest: str = "") -> CatalogRow:
    return CatalogRow(name, folder, f"sha256:{digest or folder}", "upload:x", None, {"rank": 4}, created)


def test_a_catalogue_keeps_the_newest_versions_and_names_the_rest(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite3")
    dropped = [catalog.put(row("a", f"f{number}", number), num_kept=2) for number in range(4)]
    assert dropped == [[], [], ["f0"], ["f1"]]
    assert [version.folder for version in catalog.versions("a")] == ["f3", "f2"]
    catalog.point("a", "f2")
    assert [current.folder for current in catalog.current()] == ["f2"] and catalog.folders() == {"f2", "f3"}
    assert sorted(catalog.remove("a")) == ["f2", "f3"] and catalog.current() == []
    catalog.close()


def test_a_new_version_pushes_out_its_own_content_and_then_the_oldest_but_never_what_it_replaces(
    tmp_path: Path,
) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite3")
    for number in range(3):
        assert catalog.put(row("a", f"f{number}", number), num_kept=3) == []
    catalog.point("a", "f0")
    assert catalog.put(row("a", "f3", 3), num_kept=3) == ["f1"]
    assert catalog.put(row("a", "f4", 4, digest="f2"), num_kept=3) == ["f2"]
    assert [version.folder for version in catalog.versions("a")] == ["f4", "f3", "f0"]
    catalog.close()


def test_a_catalogue_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "catalog.sqlite3") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(AdapterStoreFault, match="format 99"):
        Catalog(tmp_path / "catalog.sqlite3")


def test_a_transaction_that_fails_changes_nothing(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "catalog.sqlite3")
    catalog.put(row("a", "f"), num_kept=2)
    with pytest.raises(AdapterStoreFault):
        catalog.put(row("b", "f"), num_kept=2)
    with pytest.raises(AdapterStoreFault):
        catalog.point("a", "unknown")
    assert [(current.name, current.folder) for current in catalog.current()] == [("a", "f")]
    catalog.close()
