"""Names and what they point to: load, replace, borrow, unload, pin; uploads and restarts."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from adapters.errors import (
    AdapterError,
    AdapterExists,
    AdapterFilesNotFound,
    AdapterNotFound,
    AdapterRefused,
    AdapterStoreFault,
    DefaultStaysPinned,
    InvalidAdapterName,
    StorageFull,
)
from adapters.located import Lease, Located
from adapters.manager import AdapterManager
from adapters.surface import ModelSurface
from tests.adapters.world import edit, save_peft, surface_of

Make = Callable[..., AdapterManager]


@pytest.fixture
def make(surface: ModelSurface, tmp_path: Path) -> Iterator[Make]:
    """Makes managers on one adapter folder; `retired` collects what they let go."""
    managers: list[AdapterManager] = []

    def manager(**settings: Any) -> AdapterManager:
        values: dict[str, Any] = {"adapter_dir": tmp_path / "own", "max_cpu_loras": 8, "reserved_names": {"base"}}
        where = settings.pop("surface", surface)
        managers.append(AdapterManager(where, **(values | settings)))
        return managers[-1]

    yield manager
    for one in managers:
        one.check_integrity()
        one.close()


@pytest.fixture
def others(reference: Path, tmp_path: Path) -> Callable[[float], Path]:
    """The reference adapter with another alpha: other content, same files otherwise."""
    return lambda alpha: edit(reference, tmp_path / f"alpha-{alpha}", config={"lora_alpha": alpha})


def upload_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


def test_a_loaded_adapter_is_listed_with_its_facts(make: Make, reference: Path) -> None:
    manager = make()
    info = manager.load("sql", reference, base_model_name="base")
    assert info == manager.get("sql") == manager.list()[0] and manager.names() == ["sql"]
    assert (info.rank, info.alpha, info.scale, info.num_modules, info.state) == (4, 8.0, 2.0, 4, "cpu")
    assert (info.source, info.base_model_name, info.is_stored, info.lora_int_id) == (str(reference), "base", False, 1)
    assert info.target_modules == ["q_proj", "v_proj"] and info.generation is not None
    assert info.report["matched"] == 4 and info.num_bytes == info.report["num_bytes"]


def test_borrowing_gives_the_content_and_counts(make: Make, reference: Path) -> None:
    manager = make()
    info = manager.load("sql", reference)
    with manager.acquire("sql") as handle:
        assert (handle.name, handle.generation.digest, handle.load_ms) == ("sql", info.generation, 0.0)
        assert set(handle.generation.pairs) == {
            f"model.layers.{layer}.self_attn.{leaf}_proj" for layer in (0, 1) for leaf in "qv"
        }
    assert manager.get("sql").num_requests == 1 and manager.get("sql").last_used is not None


def test_an_unknown_name_is_not_found(make: Make) -> None:
    manager = make()
    for call in (manager.acquire, manager.get, manager.unload, manager.delete, manager.versions):
        with pytest.raises(AdapterNotFound) as caught:
            call("ghost")
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    with pytest.raises(AdapterNotFound):
        manager.pin("ghost", True)


@pytest.mark.parametrize(
    "name",
    ["", "base", "none", "auto", "../x", "a/../b", "/x", "x/", "a//b", ".x", "a/.b", "with space", "tab\t", "ünï", "x\n",
     "a" * 129, "a/download", "a\\b", "x?y", "x#y", "%2e", "'", '"', "<b>", "\0"],
)  # fmt: skip
def test_names_that_cannot_be_adapters_are_refused(make: Make, reference: Path, name: str) -> None:
    manager = make()
    for call in (manager.load, manager.install_upload):
        with pytest.raises(InvalidAdapterName):
            call(name, upload_of(reference) if call == manager.install_upload else reference)
    assert manager.list() == []


@pytest.mark.parametrize("name", ["a", "sql-v2", "org/name", "team/sql_v1.2:prod@3+x", "0", "A" * 128])
def test_usual_names_are_allowed(make: Make, reference: Path, name: str) -> None:
    assert make().load(name, reference).name == name


def test_a_taken_name_needs_load_inplace(make: Make, reference: Path) -> None:
    manager = make()
    manager.load("sql", reference)
    for call in (manager.load, manager.install_upload):
        with pytest.raises(AdapterExists, match="already been loaded"):
            call("sql", upload_of(reference) if call == manager.install_upload else reference)


def test_replacing_keeps_running_requests_on_the_old_content(
    make: Make, reference: Path, others: Callable[[float], Path]
) -> None:
    retired: list[str] = []
    manager = make(on_retire=retired.append)
    first = manager.load("sql", reference, pinned=True)
    running = manager.acquire("sql")
    second = manager.load("sql", others(16), load_inplace=True)
    assert first.generation != second.generation and second.lora_int_id == first.lora_int_id and second.pinned
    assert retired == [] and running.generation.digest == first.generation
    with manager.acquire("sql") as fresh:
        assert fresh.generation.digest == second.generation
        name = "model.layers.0.self_attn.q_proj"
        assert torch.allclose(fresh.generation.pairs[name].b, running.generation.pairs[name].b * 2)
    alive = weakref.ref(running.generation)
    running.release()
    assert retired == [first.generation]
    del running
    gc.collect()
    assert alive() is None


def test_the_same_path_with_new_bytes_is_a_new_generation(make: Make, reference: Path, tmp_path: Path) -> None:
    manager = make()
    folder = edit(reference, tmp_path / "x")
    first = manager.load("sql", folder)
    shutil.rmtree(folder)
    edit(reference, folder, config={"lora_alpha": 5})
    assert manager.load("sql", folder, load_inplace=True).generation != first.generation


@pytest.mark.parametrize("damage", ["missing", "config", "truncated"])
def test_a_failed_replacement_leaves_the_old_one_serving(
    make: Make, reference: Path, tmp_path: Path, damage: str
) -> None:
    retired: list[str] = []
    manager = make(on_retire=retired.append)
    before = manager.load("sql", reference)
    folder = tmp_path / "x"
    if damage != "missing":
        edit(reference, folder, config={"r": "?"} if damage == "config" else {})
    if damage == "truncated":
        weights = folder / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(AdapterError) as caught:
        manager.load("sql", folder, load_inplace=True)
    assert "'sql'" in caught.value.message and str(tmp_path) not in caught.value.message
    assert manager.get("sql") == before and retired == []
    with manager.acquire("sql") as handle:
        assert handle.generation.digest == before.generation
    assert manager.stats().num_cpu == 1


def test_a_refused_adapter_is_not_listed_and_leaves_no_memory(
    make: Make, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    manager = make()
    with pytest.raises(AdapterRefused, match="--max-lora-rank 512"):
        manager.load("big", save_peft(llama, tmp_path / "x", r=512))
    assert manager.list() == [] and manager.stats().num_cpu == 0
    assert manager.stats().refusals == {"adapter_refused": 1}


def test_unloading_frees_the_copy_once_its_last_request_ends(make: Make, reference: Path) -> None:
    retired: list[str] = []
    manager = make(on_retire=retired.append)
    info = manager.load("sql", reference)
    handle = manager.acquire("sql")
    alive = weakref.ref(handle.generation)
    tensor = weakref.ref(next(iter(handle.generation.pairs.values())).a)
    manager.unload("sql")
    assert retired == [] and not manager.contains("sql")
    with pytest.raises(AdapterNotFound):
        manager.acquire("sql")
    assert alive() is not None
    handle.release()
    assert retired == [info.generation]
    del handle
    gc.collect()
    assert alive() is None and tensor() is None and manager.stats().num_cpu == 0


def test_unloading_never_touches_files_that_are_not_the_servers(make: Make, reference: Path) -> None:
    manager = make()
    manager.load("sql", reference)
    manager.delete("sql")
    assert (reference / "adapter_model.safetensors").exists()


def test_two_names_share_equal_content_until_both_are_gone(make: Make, reference: Path) -> None:
    retired: list[str] = []
    manager = make(on_retire=retired.append)
    first, second = manager.load("a", reference), manager.load("b", reference)
    assert first.generation == second.generation and manager.stats().num_cpu == 1
    manager.unload("a")
    assert retired == [] and manager.stats().num_cpu == 1
    manager.unload("b")
    assert retired == [first.generation] and manager.stats().num_cpu == 0


def test_evicted_content_is_read_again_when_it_is_needed(
    make: Make, reference: Path, others: Callable[[float], Path]
) -> None:
    manager = make(max_cpu_loras=1)
    manager.load("a", reference)
    manager.load("b", others(16))
    assert [info.state for info in manager.list()] == ["disk", "cpu"]
    with manager.acquire("a") as handle:
        assert handle.load_ms > 0 and handle.generation.digest == manager.get("a").generation
    assert [info.state for info in manager.list()] == ["cpu", "disk"] and manager.stats().evictions == 2
    assert manager.stats().loads == {"path": 3}


def test_files_that_changed_since_the_load_are_not_served_in_silence(
    make: Make, reference: Path, others: Callable[[float], Path], tmp_path: Path
) -> None:
    manager = make(max_cpu_loras=1)
    folder = edit(reference, tmp_path / "x")
    manager.load("a", folder)
    manager.load("b", others(16))
    shutil.rmtree(folder)
    with pytest.raises(AdapterFilesNotFound, match="adapter 'a'"):
        manager.acquire("a")
    edit(reference, folder, config={"lora_alpha": 5})
    with pytest.raises(AdapterRefused, match="files changed after it was loaded"):
        manager.acquire("a")
    manager.load("a", folder, load_inplace=True)
    manager.acquire("a").release()


def test_changed_files_are_read_once_for_each_change(
    make: Make, reference: Path, others: Callable[[float], Path], tmp_path: Path
) -> None:
    def write(alpha: float, written_at: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        edit(reference, folder, config={"lora_alpha": alpha})
        for path in folder.iterdir():
            os.utime(path, (written_at, written_at))

    manager = make(max_cpu_loras=1)
    folder = tmp_path / "x"
    write(8, 1000)
    manager.load("a", folder)
    manager.load("b", others(16))
    for alpha, written_at, num_reads in ((5, 2000, 3), (6, 2000.5, 4)):
        write(alpha, written_at)
        for _ in range(3):
            with pytest.raises(AdapterRefused, match=r"adapter 'a'.*files changed after it was loaded"):
                manager.acquire("a")
        assert manager.stats().loads == {"path": num_reads}
    write(7, time.time() + 1)  # Written just now: the next write might have the same time.
    for _ in range(2):
        with pytest.raises(AdapterRefused):
            manager.acquire("a")
    assert manager.stats().loads == {"path": 6}
    write(8, 3000)
    manager.acquire("a").release()
    assert manager.stats().loads == {"path": 7}


def test_a_pin_keeps_content_in_memory(make: Make, reference: Path, others: Callable[[float], Path]) -> None:
    manager = make(max_cpu_loras=1)
    manager.load("a", reference)
    manager.load("b", others(16))
    assert manager.pin("a", True).pinned and manager.get("a").state == "cpu"
    manager.load("c", others(24))
    assert manager.get("a").state == "cpu"
    assert not manager.pin("a", False).pinned
    manager.load("d", others(32))
    assert manager.get("a").state == "disk"


def test_the_engine_says_what_is_on_the_gpu_and_what_answers_media(make: Make, reference: Path) -> None:
    manager = make()
    info = manager.load("sql", reference)
    manager.residency = lambda digest: digest == info.generation
    for modality in ("image", "audio"):
        manager.set_default(modality, "sql")
    assert manager.get("sql").state == "gpu" and manager.get("sql").default_for == ["audio", "image"]


def test_paths_outside_the_allowed_roots_are_as_if_not_there(make: Make, reference: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    edit(reference, root / "x")
    (root / "link").symlink_to(reference)
    manager = make(allowed_roots=[root])
    manager.load("inside", root / "x")
    told = set()
    for path in (reference, root / "link", root / ".." / "root2", root / "missing", "/etc", "~", "\0", "x" * 5000, ""):
        with pytest.raises(AdapterFilesNotFound) as caught:
            manager.load("outside", path)
        told.add(caught.value.message)
        assert str(tmp_path) not in caught.value.message
    assert len(told) == 2, "only an empty path may be told apart"


def test_ids_go_through_the_function_that_fetches_them(make: Make, reference: Path) -> None:
    manager = make(locate=lambda source: Located({"org/adapter": reference}[source], source, "c0ffee"))
    info = manager.load("sql", "org/adapter")
    assert (info.source, info.revision) == ("org/adapter", "c0ffee")


def test_an_upload_is_stored_and_comes_back_after_a_restart(make: Make, reference: Path, tmp_path: Path) -> None:
    manager = make()
    folder = edit(reference, tmp_path / "x")
    info = manager.install_upload("sql", upload_of(folder))
    assert info.is_stored and info.source == "upload:sql"
    manager.pin("sql", True)
    manager.close()
    shutil.rmtree(folder)
    later = make()
    assert [restored.name for restored in later.restore()] == ["sql"]
    found = later.get("sql")
    assert (found.generation, found.state, found.pinned, found.is_stored) == (info.generation, "disk", True, True)
    assert found.report == info.report
    with later.acquire("sql") as handle:
        assert handle.generation.digest == info.generation
    assert later.restore() == []


def test_deleting_an_upload_deletes_its_files_for_good(make: Make, reference: Path, tmp_path: Path) -> None:
    manager = make()
    manager.install_upload("sql", upload_of(reference))
    running = manager.acquire("sql")
    manager.unload("sql")
    assert [*(tmp_path / "own" / "adapters").iterdir()] == [*(tmp_path / "own" / "incoming").iterdir()] == []
    assert running.generation.pairs["model.layers.0.self_attn.q_proj"].a.shape == (4, 64)
    running.release()
    manager.close()
    assert make().restore() == []


def test_inspecting_an_upload_keeps_nothing(make: Make, reference: Path, tmp_path: Path) -> None:
    manager = make()
    report = manager.inspect_upload(upload_of(reference))
    assert report.is_ok and report.report is not None and report.report["matched"] == 4 and report.errors == []
    assert report.files == ["README.md", "adapter_config.json", "adapter_model.safetensors"] and report.ignored == []
    assert manager.list() == [] and manager.stats().num_cpu == 0
    assert [*(tmp_path / "own" / "adapters").iterdir()] == [*(tmp_path / "own" / "incoming").iterdir()] == []


def test_inspecting_a_bad_upload_tells_all_reasons(make: Make, reference: Path, tmp_path: Path) -> None:
    bad = edit(reference, tmp_path / "x", config={"use_qalora": True, "use_mora": True})
    for manager in (make(), make(adapter_dir=None)):
        report = manager.inspect_upload(upload_of(bad))
        assert not report.is_ok and len(report.errors) == 2 and report.code == "adapter_refused"
        assert manager.inspect_upload({}).code == "upload_refused"


def test_a_bad_upload_leaves_nothing_behind(make: Make, reference: Path, tmp_path: Path) -> None:
    manager = make()
    with pytest.raises(AdapterRefused):
        manager.install_upload("sql", upload_of(edit(reference, tmp_path / "x", config={"use_qalora": True})))
    assert manager.list() == []
    assert [*(tmp_path / "own" / "adapters").iterdir()] == [*(tmp_path / "own" / "incoming").iterdir()] == []


def test_uploads_need_an_adapter_folder(make: Make, reference: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterStoreFault, match="--adapter-dir"):
        make(adapter_dir=None).install_upload("sql", upload_of(reference))
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterStoreFault, match="--adapter-dir"):
        make(adapter_dir=tmp_path / "file" / "x").install_upload("sql", upload_of(reference))
    assert make(adapter_dir=None).restore() == make(adapter_dir=tmp_path / "nowhere").restore() == []


def test_replacing_an_upload_keeps_versions_that_can_be_rolled_back_to(
    make: Make, reference: Path, others: Callable[[float], Path], tmp_path: Path
) -> None:
    manager = make()
    infos = [manager.install_upload("sql", upload_of(reference))]
    infos += [manager.install_upload("sql", upload_of(others(a)), load_inplace=True) for a in (16, 24, 32)]
    assert [version.generation for version in manager.versions("sql")] == [i.generation for i in reversed(infos[1:])]
    assert len([*(tmp_path / "own" / "adapters").iterdir()]) == 3
    assert manager.rollback("sql", str(infos[1].generation)).generation == infos[1].generation
    assert [version.is_current for version in manager.versions("sql")] == [False, False, True]
    with pytest.raises(AdapterNotFound):
        manager.rollback("sql", str(infos[0].generation))
    manager.close()
    later = make()
    later.restore()
    assert later.get("sql").generation == infos[1].generation
    later.unload("sql")
    assert [*(tmp_path / "own" / "adapters").iterdir()] == []


def test_a_path_can_be_rolled_back_while_memory_or_its_files_hold_the_version(
    make: Make, reference: Path, others: Callable[[float], Path], tmp_path: Path
) -> None:
    manager = make()
    folder = edit(reference, tmp_path / "one")
    infos = [manager.load("sql", folder, base_model_name="its-base", pinned=True)]
    infos += [manager.load("sql", others(alpha), load_inplace=True) for alpha in (16, 24)]
    first, second, third = (str(info.generation) for info in infos)
    assert [(version.generation, version.is_current, version.is_stored) for version in manager.versions("sql")] == [
        (third, True, False), (second, False, False), (first, False, False),
    ]  # fmt: skip
    back = manager.rollback("sql", first)
    assert (back.generation, back.source, back.base_model_name, back.pinned) == (first, str(folder), "its-base", True)
    assert manager.stats().num_cpu == 1, "what the name no longer points to is let go"
    assert {version.generation for version in manager.versions("sql")} == {first, second, third}
    with manager.acquire("sql"):  # Somebody still answers from it when its files are gone.
        manager.rollback("sql", third)
        shutil.rmtree(folder)
        assert manager.rollback("sql", first).generation == first
        manager.rollback("sql", third)
    before = manager.get("sql")
    with pytest.raises(AdapterFilesNotFound, match="'sql'"):
        manager.rollback("sql", first)
    edit(reference, folder, config={"lora_alpha": 5})
    with pytest.raises(AdapterRefused, match="'sql' is refused: that version is not in memory any more and its files"):
        manager.rollback("sql", first)
    with pytest.raises(AdapterNotFound, match="no version 'sha256:x'"):
        manager.rollback("sql", "sha256:x")
    assert manager.get("sql") == before and manager.stats().num_cpu == 1
    manager.unload("sql")
    manager.load("sql", others(32))
    assert len(manager.versions("sql")) == 1, "a new name does not inherit"


def test_rolling_back_leads_from_a_path_to_an_upload_and_back(
    make: Make, reference: Path, others: Callable[[float], Path]
) -> None:
    manager = make()
    upload = str(manager.install_upload("sql", upload_of(reference)).generation)
    path = str(manager.load("sql", others(16), load_inplace=True).generation)
    assert manager.pin("sql", True).is_stored is False
    back = manager.rollback("sql", upload)
    assert (back.generation, back.is_stored, back.source, back.pinned) == (upload, True, "upload:sql", True)
    assert manager.rollback("sql", path).is_stored is False
    manager.close()
    later = make()
    later.restore()
    assert (later.get("sql").generation, later.get("sql").pinned) == (upload, True)


def test_defaults_are_pinned_for_as_long_as_they_are_defaults(
    make: Make, reference: Path, others: Callable[[float], Path]
) -> None:
    manager = make(max_cpu_loras=1)
    manager.load("a", reference)
    manager.load("b", others(16))
    assert manager.get("a").state == "disk"
    manager.set_default("audio", "a")
    assert (manager.get("a").state, manager.get("a").pinned, manager.get("a").default_for) == ("cpu", True, ["audio"])
    manager.load("c", others(24))
    assert manager.get("a").state == "cpu"
    with pytest.raises(DefaultStaysPinned, match="answers audio by itself"):
        manager.pin("a", False)
    manager.load("a", others(32), load_inplace=True)
    manager.load("d", others(40))
    assert manager.get("a").state == "cpu", "what the name points to now is pinned"
    manager.set_default_for("b", ["image", "audio"])
    assert manager.defaults() == {"audio": "b", "image": "b"} and not manager.get("a").pinned
    manager.load("e", others(48))
    assert (manager.get("a").state, manager.get("b").state) == ("disk", "cpu")
    manager.pin("b", True)
    manager.set_default_for("b", [])
    assert manager.defaults() == {} and manager.get("b").pinned, "a pin of its own stays"
    for modality, name in (("audio", "nobody"), ("audio", "")):
        with pytest.raises(AdapterNotFound):
            manager.set_default(modality, name)
    manager.set_default("audio", None)
    assert manager.defaults() == {}


def test_a_default_that_is_unloaded_and_loaded_again_is_pinned_again(
    make: Make, reference: Path, others: Callable[[float], Path]
) -> None:
    manager = make(max_cpu_loras=1)
    manager.load("a", reference)
    manager.set_default("audio", "a")
    manager.unload("a")
    assert manager.defaults() == {"audio": "a"} and manager.stats().num_cpu == 0
    assert manager.load("a", others(16)).pinned
    manager.load("b", others(24))
    assert manager.get("a").state == "cpu"


def test_a_default_that_cannot_be_read_changes_nothing(
    make: Make, reference: Path, others: Callable[[float], Path], tmp_path: Path
) -> None:
    manager = make(max_cpu_loras=1)
    manager.load("a", edit(reference, tmp_path / "x"))
    manager.load("b", others(16))
    manager.set_default("audio", "b")
    shutil.rmtree(tmp_path / "x")
    with pytest.raises(AdapterFilesNotFound):
        manager.set_default("audio", "a")
    assert manager.defaults() == {"audio": "b"} and not manager.get("a").pinned


def test_memory_is_bounded_by_bytes(make: Make, reference: Path, others: Callable[[float], Path]) -> None:
    num_bytes = make().load("x", reference).num_bytes
    manager = make(max_cpu_bytes=2 * num_bytes)
    for name, folder in (("a", reference), ("b", others(16)), ("c", others(24))):
        manager.load(name, folder)
    stats = manager.stats()
    assert (stats.num_cpu, stats.cpu_bytes, stats.max_cpu_bytes, stats.evictions) == (
        2,
        2 * num_bytes,
        2 * num_bytes,
        1,
    )
    assert [info.state for info in manager.list()] == ["disk", "cpu", "cpu"]


def test_prompts_and_their_prefix_hits_are_counted_by_name(
    make: Make, reference: Path, others: Callable[[float], Path]
) -> None:
    manager = make()
    manager.load("a", reference)
    with manager.acquire("a") as handle, handle.fork() as fork:
        handle.note_prompt(40, 0)
        manager.load("a", others(16), load_inplace=True)
        fork.note_prompt(50, 32)
        manager.load("b", reference)
        info = manager.get("a")
        assert (info.prefix_query_tokens, info.prefix_hit_tokens, info.num_loads) == (90, 32, 2)
        manager.unload("a")
        fork.note_prompt(10, 10)
    assert (manager.get("b").prefix_query_tokens, manager.names()) == (0, ["b"])


def test_an_upload_that_a_path_replaced_comes_back_with_the_next_start(
    make: Make, reference: Path, others: Callable[[float], Path]
) -> None:
    manager = make()
    stored = manager.install_upload("sql", upload_of(reference))
    manager.load("sql", others(16), load_inplace=True)
    manager.unload("sql")
    manager.close()
    later = make()
    later.restore()
    assert later.get("sql").generation == stored.generation


@pytest.mark.parametrize("damage", ["lost", "truncated", "other_base"])
def test_a_stored_adapter_that_broke_is_listed_as_failed_with_its_reason(
    make: Make, reference: Path, llama: LlamaForCausalLM, tmp_path: Path, damage: str
) -> None:
    manager = make()
    manager.install_upload("good", upload_of(reference))
    manager.install_upload("bad", upload_of(edit(reference, tmp_path / "x", config={"lora_alpha": 3})))
    manager.close()
    folders = sorted((tmp_path / "own" / "adapters").iterdir(), key=lambda path: path.stat().st_ctime_ns)
    if damage == "lost":
        shutil.rmtree(folders[1])
    elif damage == "truncated":
        weights = folders[1] / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
    settings = {"surface": surface_of(llama, max_lora_rank=2)} if damage == "other_base" else {}
    later = make(**settings)
    later.restore()
    failed = later.get("bad")
    assert failed.state == "failed" and failed.error and failed.generation is None and str(tmp_path) not in failed.error
    for _ in range(2):
        with pytest.raises(AdapterError) as caught:
            later.acquire("bad")
        assert 400 <= caught.value.status < 500
    assert (later.get("good").state == "failed") == (damage == "other_base")
    later.install_upload("bad", upload_of(reference), load_inplace=True) if damage != "other_base" else None
    later.unload("bad")
    assert not later.contains("bad")


def test_a_stored_adapter_that_broke_can_go_back_to_a_version_that_did_not(
    make: Make, reference: Path, others: Callable[[float], Path], tmp_path: Path
) -> None:
    manager = make()
    good = str(manager.install_upload("sql", upload_of(reference)).generation)
    bad = str(manager.install_upload("sql", upload_of(others(3)), load_inplace=True).generation)
    manager.close()
    newest = max((tmp_path / "own" / "adapters").iterdir(), key=lambda path: path.stat().st_ctime_ns)
    (newest / "adapter_model.safetensors").unlink()
    later = make()
    later.restore()
    versions = [(version.generation, version.is_current) for version in later.versions("sql")]
    assert later.get("sql").state == "failed" and versions == [(bad, True), (good, False)]
    assert later.rollback("sql", good).state == "cpu"
    with pytest.raises(AdapterRefused):
        later.rollback("sql", bad)
    assert later.get("sql").generation == good


def test_names_of_the_command_line_win_over_stored_ones(
    make: Make, reference: Path, others: Callable[[float], Path], caplog: pytest.LogCaptureFixture
) -> None:
    manager = make()
    manager.install_upload("sql", upload_of(reference))
    manager.install_upload("main", upload_of(others(3)))
    manager.close()
    later = make(reserved_names={"main"})
    mine = later.load("sql", others(16))
    with caplog.at_level(logging.WARNING):
        assert later.restore() == []
    assert later.get("sql").generation == mine.generation and "name_taken" in caplog.text


def test_a_damaged_catalogue_is_told_and_nothing_is_deleted(make: Make, reference: Path, tmp_path: Path) -> None:
    manager = make()
    manager.install_upload("sql", upload_of(reference))
    manager.close()
    (tmp_path / "own" / "catalog.sqlite3").write_bytes(b"not a database, at all" * 100)
    with pytest.raises(AdapterStoreFault, match=r"move catalog\.sqlite3") as caught:
        make().restore()
    assert str(tmp_path) not in caught.value.message
    (tmp_path / "own" / "catalog.sqlite3").unlink()
    assert make().restore() == []
    assert len([*(tmp_path / "own" / "adapters").iterdir()]) == 1


def test_five_hundred_loads_and_unloads_leave_nothing(make: Make, reference: Path, tmp_path: Path) -> None:
    manager = make()
    files = {name: path.read_bytes() for name, path in upload_of(reference).items()}

    def cycle(*, is_upload: bool = False) -> None:
        manager.install_upload("sql", files) if is_upload else manager.load("sql", reference)
        manager.acquire("sql").release()
        manager.unload("sql")

    def count() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        return sum(issubclass(type(item), torch.Tensor) for item in objects), len(objects)

    for number in range(10):
        cycle(is_upload=number % 5 == 0)
    num_tensors, num_objects = count()
    for number in range(500):
        cycle(is_upload=number % 25 == 0)
    assert count()[0] == num_tensors and count()[1] - num_objects < 100, "five hundred cycles leave no object each"
    assert manager.stats().num_cpu == 0 and manager.list() == []
    assert [*(tmp_path / "own" / "adapters").iterdir()] == [*(tmp_path / "own" / "incoming").iterdir()] == []


def test_only_requests_count_as_requests(make: Make, reference: Path) -> None:
    manager = make()
    manager.load("a", reference, pinned=True)
    manager.pin("a", False)
    manager.pin("a", True)
    assert (manager.get("a").num_requests, manager.get("a").last_used) == (0, None)
    manager.acquire("a").release()
    assert manager.get("a").num_requests == 1
    assert manager.get("a").last_used is not None


def test_files_that_were_fetched_are_given_back_when_the_name_goes_or_the_load_fails(
    make: Callable[..., AdapterManager], reference: Path, tmp_path: Path
) -> None:
    given_back: list[str] = []
    manager = make()
    for name in ("a", "b"):
        manager.load(name, Located(reference, name, lease=Lease(lambda name=name: given_back.append(name))))  # type: ignore[misc]
    manager.unload("a")
    assert given_back == ["a"]
    with pytest.raises(AdapterFilesNotFound):
        manager.load("c", Located(tmp_path, "c", lease=Lease(lambda: given_back.append("c"))))
    assert given_back == ["a", "c"]
    with manager.acquire("b"):
        manager.unload("b")
    assert given_back == ["a", "c", "b"]


def test_an_upload_that_the_disk_has_no_room_for_leaves_nothing(
    make: Callable[..., AdapterManager], reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()

    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_room)
        with pytest.raises(StorageFull) as caught:
            manager.install_upload("x", upload_of(reference))
    assert caught.value.status == 507 and manager.names() == [] and manager.stats().num_cpu == 0
    (root,) = [path.parent for path in tmp_path.rglob("incoming")]
    assert [*(root / "incoming").iterdir(), *(root / "adapters").iterdir()] == []
    assert manager.install_upload("x", upload_of(reference)).is_stored
