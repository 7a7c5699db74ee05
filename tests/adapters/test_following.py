"""Two managers on one adapter folder: what one changes, the other follows."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest

from adapters.errors import AdapterFilesNotFound, AdapterNotFound, AdapterRefused
from adapters.manager import AdapterManager
from adapters.name_state import DEFAULTS, NameState
from adapters.surface import ModelSurface
from tests.adapters.world import edit

Pair = tuple[AdapterManager, AdapterManager]


@pytest.fixture
def pair(surface: ModelSurface, tmp_path: Path) -> Iterator[Pair]:
    managers = [AdapterManager(surface, adapter_dir=tmp_path / "own", max_cpu_loras=8) for _ in range(2)]
    yield managers[0], managers[1]
    for manager in managers:
        manager.check_integrity()
        manager.close()


@pytest.fixture
def other_alpha(reference: Path, tmp_path: Path) -> Callable[[float], Path]:
    return lambda alpha: edit(reference, tmp_path / f"alpha-{alpha}", config={"lora_alpha": alpha})


def upload_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


def test_a_load_is_followed(pair: Pair, reference: Path) -> None:
    first, second = pair
    first.load("sql", reference, base_model_name="base", pinned=True)
    state = first.state_of("sql")
    second.follow(state)
    assert second.state_of("sql") == state
    info = second.get("sql")
    assert (info.generation, info.pinned, info.base_model_name) == (first.get("sql").generation, True, "base")
    second.follow(state)
    assert second.get("sql") == info, "following twice changes nothing"


def test_a_replacement_is_followed_and_requests_keep_what_they_have(
    pair: Pair, reference: Path, other_alpha: Callable[[float], Path]
) -> None:
    first, second = pair
    first.load("sql", reference)
    second.follow(first.state_of("sql"))
    with second.acquire("sql") as handle:
        first.load("sql", other_alpha(3.0), load_inplace=True)
        second.follow(first.state_of("sql"))
        assert handle.generation.digest != second.get("sql").generation == first.get("sql").generation


def test_an_upload_is_followed_and_its_files_stay_when_that_is_forgotten(pair: Pair, reference: Path) -> None:
    first, second = pair
    first.install_upload("up", upload_of(reference))
    stored = first.state_of("up")
    second.follow(stored)
    assert second.get("up").is_stored
    with second.acquire("up") as handle:
        assert handle.generation.digest == stored.generation
    # Forgetting is not deleting: whoever unloads it deletes the files, and a newer upload's are not the follower's to touch.
    second.follow(NameState("up"))
    assert not second.contains("up")
    second.follow(stored)
    assert second.get("up").generation == stored.generation


def test_an_unload_is_followed(pair: Pair, reference: Path) -> None:
    first, second = pair
    first.install_upload("up", upload_of(reference))
    second.follow(first.state_of("up"))
    first.unload("up")
    assert first.state_of("up") == NameState("up")
    second.follow(first.state_of("up"))
    with pytest.raises(AdapterNotFound):
        second.acquire("up")
    second.follow(first.state_of("up"))


def test_pins_and_defaults_are_followed(pair: Pair, reference: Path) -> None:
    first, second = pair
    for name in ("a", "b"):
        first.load(name, reference)
        second.follow(first.state_of(name))
    first.set_default_for("a", ["audio"])
    second.follow(first.state_of(DEFAULTS))
    assert second.defaults() == {"audio": "a"}
    assert second.get("a").default_for == ["audio"]
    first.set_default_for("b", ["audio"])
    second.follow(first.state_of(DEFAULTS))
    assert second.defaults() == {"audio": "b"}
    first.pin("a", True)
    second.follow(first.state_of("a"))
    assert second.get("a").pinned and second.defaults() == {"audio": "b"}


def test_who_follows_late_has_no_default_that_was_taken_away(pair: Pair, reference: Path) -> None:
    first, second = pair
    for name in ("a", "b"):
        first.load(name, reference)
    second.load("flag", reference)
    second.set_default_for("flag", ["image"])  # As a flag of its command line does.
    first.set_default_for("a", ["audio"])
    first.set_default_for("b", ["audio"])
    first.set_default_for("b", [])
    for name in (DEFAULTS, "a", "b"):
        second.follow(first.state_of(name))
    assert second.defaults() == {}


def test_a_default_is_followed_before_its_adapter(pair: Pair, reference: Path) -> None:
    first, second = pair
    first.load("a", reference)
    first.set_default_for("a", ["audio"])
    for name in (DEFAULTS, "a"):
        second.follow(first.state_of(name))
    assert second.get("a").default_for == ["audio"]


def test_equal_content_from_elsewhere_is_followed(pair: Pair, reference: Path, tmp_path: Path) -> None:
    first, second = pair
    shutil.copytree(reference, tmp_path / "copy")
    first.load("sql", tmp_path / "copy")
    second.follow(first.state_of("sql"))
    first.load("sql", reference, load_inplace=True)
    second.follow(first.state_of("sql"))
    assert second.state_of("sql") == first.state_of("sql")
    first.install_upload("sql", upload_of(reference), load_inplace=True)
    second.follow(first.state_of("sql"))
    assert second.get("sql").is_stored
    # Taken away and uploaded again, with the first not followed: the files lie in another folder.
    first.unload("sql")
    first.install_upload("sql", upload_of(reference))
    second.follow(first.state_of("sql"))
    second.export("sql", BytesIO())


def test_content_that_is_not_there_any_more_is_refused_and_the_old_stays(
    pair: Pair, reference: Path, other_alpha: Callable[[float], Path]
) -> None:
    first, second = pair
    folder = other_alpha(3.0)
    first.load("sql", reference)
    second.follow(first.state_of("sql"))
    first.load("sql", folder, load_inplace=True)
    state = first.state_of("sql")
    (folder / "adapter_config.json").write_bytes((reference / "adapter_config.json").read_bytes())
    before = second.get("sql")
    with pytest.raises(AdapterRefused, match=r"'sql'.*have changed since"):
        second.follow(state)
    with pytest.raises(AdapterFilesNotFound, match="does not list"):
        second.follow(NameState("sql", "sha256:0", "upload:sql", is_stored=True))
    assert second.get("sql").generation == before.generation
