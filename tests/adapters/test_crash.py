"""Kill -9 at any moment: every stored adapter is whole or absent, and nothing else is left."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

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


# name -> what it points to and whether it is pinned
State = dict[str, tuple[str, bool]]


def work(surface: ModelSurface, root: Path, uploads: dict[str, dict[str, bytes]], seed: int, log: BinaryIO) -> None:
    """Install, replace, roll back, pin and delete until killed. Runs in a child process.

    Writes a line before each step, with the name and what it will be, and one after it.
    """
    chance = random.Random(seed)
    manager = AdapterManager(surface, adapter_dir=root, max_cpu_loras=4)
    manager.restore()

    def say(name: str, after: tuple[str, bool] | None) -> None:
        log.write(json.dumps([name, after]).encode() + b"\n")
        log.flush()

    while True:
        name, action = chance.choice("abc"), chance.choice(["put", "put", "put", "unload", "roll back", "pin"])
        before = manager.get(name) if manager.contains(name) else None
        if action == "put" or before is None:
            digest = chance.choice([*uploads])
            say(name, (digest, before is not None and before.pinned))
            manager.install_upload(name, uploads[digest], load_inplace=True)
        elif action == "unload":
            say(name, None)
            manager.unload(name)
        elif action == "roll back":
            version = chance.choice(manager.versions(name)).generation
            say(name, (version, before.pinned))
            manager.rollback(name, version)
        else:
            say(name, (str(before.generation), not before.pinned))
            manager.pin(name, not before.pinned)
        log.write(b"done\n")
        log.flush()


def killed_child(job: Callable[[BinaryIO], None], chance: random.Random) -> list[bytes]:
    """Run a job in a child process, kill it at some moment after a few steps, and give the lines that it wrote."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as log:
                job(log)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as lines:
        written = [lines.readline() for _ in range(2 * chance.randrange(1, 6))]
        # Microseconds to milliseconds into the next step, so that kills fall between all of its parts.
        for _ in range(chance.randrange(0, 400_000)):
            pass
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child must not end by itself"
        return [line.strip() for line in [*written, *lines]]


def allowed_after(state: State, lines: list[bytes]) -> tuple[State, State]:
    """What must be found after a kill: the state before the step that it fell into, or the one after it."""
    before, after = dict(state), dict(state)
    for line in lines:
        if line == b"done":
            before = dict(after)
        else:
            name, found = json.loads(line)
            after.pop(name, None)
            after |= {} if found is None else {name: tuple(found)}
    return before, after


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_killed_server_leaves_each_stored_adapter_whole_or_absent_with_its_pin_and_version(
    surface: ModelSurface, reference: Path, tmp_path: Path
) -> None:
    root, chance, uploads = tmp_path / "own", random.Random(5), {}
    probe = AdapterManager(surface, adapter_dir=None, max_cpu_loras=4)
    for alpha in range(3, 7):
        folder = edit(reference, tmp_path / str(alpha), config={"lora_alpha": alpha})
        uploads[str(probe.load(str(alpha), folder).generation)] = files_of(folder)
    state: State = {}
    num_torn, num_found = 0, 0
    for seed in range(20):
        lines = killed_child(lambda log, seed=seed: work(surface, root, uploads, seed, log), chance)  # type: ignore[misc]
        before, after = allowed_after(state, lines)
        names = check_whole(surface, root, set(uploads))
        manager = AdapterManager(surface, adapter_dir=root, max_cpu_loras=4)
        state = {info.name: (str(info.generation), info.pinned) for info in manager.restore()}
        manager.close()
        assert state in (before, after), (seed, lines[-3:])
        num_torn += lines[-1] != b"done"
        num_found += len(names)
    assert num_found > 20 and num_torn > 3, "the children must have stored something and died in the middle"


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
