"""Base models by hub id: a hub that cannot be reached is told at once, and a copy in the cache stands in for it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from benchmarks.workload import write_model
from engine import Engine, EngineConfig, SamplingParams
from engine.errors import InvalidRequest
from engine.model import outline_model
from engine.origin import find_origin
from engine.request import TokenPrompt
from tests.adapters.hub_server import HubServer, serve_hub, use_hub


def forbid_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sleeps before another try fails the test."""

    def wait(seconds: float) -> None:
        raise AssertionError(f"waits {seconds} s before it tries again")

    monkeypatch.setattr(time, "sleep", wait)


@pytest.fixture
def dead_url() -> Iterator[str]:
    """Bound, but nobody listens: every connection is refused."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serve_hub(monkeypatch, tmp_path / "cache") as server:
        folder = write_model("tiny", tmp_path / "model")
        server.put("owner/name", {path.name: path.read_bytes() for path in folder.iterdir()})
        yield server


def test_a_hub_that_cannot_be_reached_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dead_url: str
) -> None:
    use_hub(monkeypatch, dead_url, tmp_path)
    forbid_waiting(monkeypatch)
    with pytest.raises(
        InvalidRequest, match=r"'nope/nope': it is no folder here, the Hugging Face hub cannot be reached"
    ):
        outline_model("nope/nope")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidRequest, match="HF_HUB_OFFLINE keeps the Hugging Face hub from being asked"):
        outline_model("nope/nope")


def test_an_id_that_the_hub_does_not_know_is_told(hub: HubServer) -> None:
    with pytest.raises(InvalidRequest, match="No base model could be loaded from 'owner/absent'"):
        outline_model("owner/absent")


def test_a_file_in_a_folder_of_a_cached_repository_leads_to_the_repository(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("owner/files", {"one.gguf": b"1", "sub/two.gguf": b"2"})
    for name in ("one.gguf", "sub/two.gguf"):
        huggingface_hub.hf_hub_download("owner/files", name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("one.gguf", "sub/two.gguf"):
        assert (Path(find_origin("owner/files", name)) / name).is_file()


def test_what_is_in_the_cache_is_served_without_the_hub_and_under_its_own_name(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dead_url: str
) -> None:
    for name in hub.repos["owner/name"]["main"]:
        huggingface_hub.hf_hub_download("owner/name", name)
    use_hub(monkeypatch, dead_url, tmp_path / "cache")
    forbid_waiting(monkeypatch)
    engine = Engine(
        EngineConfig(
            model="owner/name", load_format="dummy", device="cpu", max_model_len=64, adapter_dir=str(tmp_path / "own")
        )
    )
    try:
        assert engine.model_names == ("owner/name",)
        [answer] = engine.start_sync(TokenPrompt([3, 4, 5]), SamplingParams(temperature=0, max_tokens=2))
        assert sum(len(delta.token_ids) for delta in answer) == 2
    finally:
        engine.close()
