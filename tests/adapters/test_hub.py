"""Where an adapter's source leads: folders first, hub ids else, and plain words when neither is there."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from adapters.errors import AdapterFilesNotFound
from adapters.hub import locate_adapter


def test_a_folder_wins_over_a_hub_id_of_the_same_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_adapter("owner/name") == Path("owner/name")


@pytest.mark.parametrize("source", ["/no/such/folder", "name-alone", "./owner/name", "owner/../name", "~/none/such"])
def test_what_is_no_hub_id_is_taken_as_a_path(source: str) -> None:
    assert locate_adapter(source) == Path(source).expanduser()


@pytest.mark.parametrize(("source", "folder"), [("owner/name", ""), ("owner/name/sub/one", "sub/one")])
def test_a_hub_id_downloads_the_adapters_files_alone(
    source: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fake(repo: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert locate_adapter(source) == tmp_path / folder
    ((repo, patterns),) = asked
    assert repo == "owner/name"
    assert all(pattern.startswith(folder) and not pattern.endswith((".bin", ".pt")) for pattern in patterns)


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repo: str, *, allow_patterns: list[str]) -> str:
        raise OSError("https://hub/secret?token=x")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(AdapterFilesNotFound, match="owner/name is no folder here") as caught:
        locate_adapter("owner/name")
    assert "secret" not in str(caught.value)
