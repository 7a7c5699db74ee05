"""Adapters from the hub: pinned to a commit, their own files alone, from the cache without a network, and fast to fail."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from adapters.errors import AdapterFilesNotFound, SourceUnreachable
from adapters.resolvers import Sources
from adapters.resolvers.hub import HubAddress, HubSource, fetch_from_hub, parse_hub_address
from adapters.resolvers.progress import Downloads
from tests.adapters.hub_server import HubServer, serve_hub, use_hub

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 3_000_000}
OTHERS = {"adapter_model.bin": b"pickle", "model-00001-of-00002.safetensors": b"base", "notes.md": b"#", "a.py": b""}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serve_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


def fetch(text: str, downloads: Downloads | None = None) -> tuple[str | None, dict[str, bytes]]:
    """The revision that was found, and the files of the folder."""
    address = parse_hub_address(text)
    assert address is not None
    found = fetch_from_hub(address, downloads or Downloads())
    assert found.source == text
    return found.revision, {path.name: path.read_bytes() for path in found.folder.iterdir() if path.is_file()}


def test_the_adapters_own_files_are_downloaded_and_nothing_else(hub: HubServer) -> None:
    commit = hub.put("owner/name", ADAPTER | OTHERS)
    assert fetch("owner/name") == (commit, ADAPTER)
    assert not [line for line in hub.requests if any(name in line for name in OTHERS)]


def test_a_folder_of_a_repository_is_an_adapter_of_its_own(hub: HubServer) -> None:
    inner = {"adapter_config.json": b"{1}", "adapter_model.safetensors": b"inner"}
    commit = hub.put("owner/name", ADAPTER | {f"sub/one/{name}": content for name, content in inner.items()})
    assert fetch("owner/name/sub/one") == (commit, inner)
    with pytest.raises(AdapterFilesNotFound, match=r"owner/name/sub holds no adapter_config\.json"):
        fetch("owner/name/sub")


def test_a_branch_is_pinned_to_its_commit_and_followed_at_the_next_load(hub: HubServer) -> None:
    old = hub.put("owner/name", ADAPTER, "v1")
    assert fetch("owner/name@v1") == (old, ADAPTER)
    changed = ADAPTER | {"adapter_model.safetensors": b"new"}
    new = hub.put("owner/name", changed, "v1")
    assert new != old and fetch("owner/name@v1") == (new, changed)
    assert fetch(f"owner/name@{old}") == (old, ADAPTER)
    with pytest.raises(AdapterFilesNotFound, match="owner/name has no revision 'v2'"):
        fetch("owner/name@v2")


def test_what_is_in_the_cache_is_not_downloaded_again_and_serves_without_the_hub(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = hub.put("owner/name", ADAPTER)
    fetch("owner/name")
    hub.requests.clear()
    fetch("owner/name")
    assert [line.partition("?")[0] for line in hub.requests] == ["GET /api/models/owner/name"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert fetch("owner/name") == fetch(f"owner/name@{commit}") == (commit, ADAPTER) and not hub.requests
    with pytest.raises(AdapterFilesNotFound, match="owner/other is not in the local cache, and HF_HUB_OFFLINE"):
        fetch("owner/other")
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert fetch("owner/name") == (commit, ADAPTER)


def test_a_hub_that_cannot_be_reached_is_told_within_two_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as taken:  # Bound, but nobody listens: every connection is refused.
        taken.bind(("127.0.0.1", 0))
        use_hub(monkeypatch, f"http://127.0.0.1:{taken.getsockname()[1]}", tmp_path)
        waits: list[float] = []
        monkeypatch.setattr(time, "sleep", waits.append)
        with pytest.raises(SourceUnreachable, match="the Hugging Face hub cannot be reached") as caught:
            fetch("owner/name")
    assert sum(waits) < 2 and caught.value.status == 503 and caught.value.retry_after
    assert "127.0.0.1" not in caught.value.message


def test_repositories_that_are_private_or_absent_say_what_to_do(hub: HubServer) -> None:
    with pytest.raises(AdapterFilesNotFound, match="set HF_TOKEN for a private repository") as caught:
        fetch("owner/absent")
    assert caught.value.status == 404


def test_a_download_shows_how_far_it_is(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    hub.put("owner/name", ADAPTER)
    hub.gate.clear()
    downloads = Downloads()
    with caplog.at_level(logging.INFO):
        thread = threading.Thread(target=fetch, args=("owner/name", downloads))
        thread.start()
        while not any(line.startswith("GET /owner/name/resolve") for line in hub.requests):
            thread.join(0.01)
        (shown,) = downloads.list()
        assert (shown.source, shown.num_bytes, shown.total_bytes, shown.percent) == ("owner/name", 0, 3_000_002, 0)
        hub.gate.set()
        thread.join()
    assert downloads.list() == []
    assert "event=download_started source=owner/name bytes=3000002" in caplog.text
    assert "event=download_finished source=owner/name bytes=3000002" in caplog.text


def test_names_reach_listed_repositories_alone_and_choose_no_revision(hub: HubServer) -> None:
    pinned = hub.put("owner/listed", ADAPTER, "v1")
    hub.put("owner/listed", {f"sub/{name}": content for name, content in ADAPTER.items()}, "main")
    hub.put("owner/other", ADAPTER)
    source = HubSource([HubAddress("owner/listed", revision="v1")], Downloads())
    found = source.find("owner/listed")
    assert found is not None and found.revision == pinned
    hub.requests.clear()
    for name in ("owner/other", "owner/listed-2", "sql", f"owner/listed@{pinned}", "owner/listed@main"):
        assert source.find(name) is None
    assert not hub.requests
    assert source.find("owner/listed/sub") is None and hub.requests


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "name-alone", "./owner/name", "owner/../name", "~/none/such", "a/b@.."]
)
def test_what_is_no_hub_id_is_taken_as_a_path(source: str, tmp_path: Path) -> None:
    sources = Sources((), base_model_name="base", download_dir=tmp_path)
    assert sources.locate(source).folder == Path(source).expanduser()


def test_a_folder_wins_over_a_hub_id_of_the_same_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    sources = Sources((), base_model_name="base", download_dir=tmp_path)
    assert sources.locate("owner/name").folder == Path("owner/name")
