"""A server that may write no large file: uploads are refused as a full disk refuses them, and leave nothing behind."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.server import ROOT, running_server
from tests.soak import zip_folder

SMALL, LARGE = (ROOT / "assets" / "adapters" / name for name in ("pirate", "sql"))
"""One whose zip is received in memory, and one whose zip needs a temporary file; neither has room when it is stored."""


EMPTY_STORE = {".lock", "catalog.sqlite3", "adapters", "incoming"}


def found_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform == "win32" or shutil.which("sh") is None, reason="needs a shell with ulimit")
def test_an_upload_without_room_is_507_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store, temporary = tmp_path / "store", tmp_path / "temporary"
    temporary.mkdir()
    # 300 blocks of 512 or 1024 bytes, whatever the shell counts in.
    limit = ("sh", "-c", 'ulimit -f 300 && exec "$@"', "sh")
    words = ["--adapter-dir", str(store), "--drain-seconds", "0"]
    with (
        running_server(words, {"TMPDIR": str(temporary)}, wrapper=limit) as server,
        httpx.Client(base_url=server.url, timeout=300) as http,
    ):
        names = [card["id"] for card in http.get("/v1/models").json()["data"]]
        before = found_below(temporary)
        for folder in (SMALL, LARGE):
            packed = zip_folder(folder)
            assert (len(packed) > 1 << 20) == (folder == LARGE)
            for dry_run in ("true", "false"):
                form = {"name": "mine", "dry_run": dry_run}
                answer = http.post("/v1/adapters", data=form, files={"files": ("a.zip", packed)})
                assert answer.status_code == 507, answer.text
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == ("storage_full", "server_error")
                assert "full" in error["message"] and str(tmp_path) not in answer.text
        assert found_below(store) <= EMPTY_STORE
        assert found_below(temporary) == before
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == names
        body = {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert server.process.returncode == 0
