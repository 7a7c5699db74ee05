"""The examples of docs/api.md run as they stand, and there is one by curl and one in Python for every route."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from api.settings import ServerSettings
from engine import Engine, EngineConfig
from tests.api import conftest

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("\n## Every route by curl and Python\n")[1]
URL = "http://127.0.0.1:7860"
OTHER_HEADINGS = SECTION.count("\n## ")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)


class Recorder:
    """The application, which notes the route of each request that it answers well."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.seen: set[tuple[str, str]] = set()
        self.failed: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                if message["status"] == 200:
                    self.seen.add((scope["method"], scope["route"].path.replace(":path", "")))
                else:
                    self.failed.append(f"{message['status']} {scope['method']} {scope['path']}")
            await send(message)

        await self._app(scope, receive, noted)

    def routes(self) -> set[tuple[str, str]]:
        """Every route that is described."""
        paths = self._app.openapi()["paths"]
        return {(method.upper(), path) for path, methods in paths.items() for method in methods}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Recorder]]:
    """A server with the embedded model, started as by default."""
    engine = Engine(EngineConfig(adapter_dir=str(tmp_path_factory.mktemp("catalogue"))))
    made: list[Recorder] = []
    with pytest.MonkeyPatch.context() as patch:
        create = conftest.create_app

        def recorded(engine: Engine, settings: ServerSettings) -> Recorder:
            made.append(Recorder(create(engine, settings)))
            return made[0]

        patch.setattr(conftest, "create_app", recorded)
        with conftest.serve(engine, ServerSettings()) as url:
            yield url, made[0]
    engine.close(0)


@pytest.fixture
def recorder(server: tuple[str, Recorder]) -> Recorder:
    server[1].seen.clear()
    return server[1]


def test_the_examples_are_the_last_section() -> None:
    assert OTHER_HEADINGS == 0
    assert len(blocks("sh")) == len(blocks("python")) > 8


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_route_by_curl(
    server: tuple[str, Recorder], recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where the server looks for relative paths
    script = "set -e\n" + "\n".join(blocks("sh")).replace(URL, server[0]).replace("/tmp/", f"{tmp_path}/")
    script = re.sub(r"^curl ", "curl -sS --fail-with-body -m 60 ", script, flags=re.MULTILINE)
    ran = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr
    assert recorder.seen == recorder.routes() and not recorder.failed
    assert "Success: LoRA adapter 'sql2' removed successfully." in ran.stdout
    assert "data: [DONE]" in ran.stdout


def test_every_route_in_python(
    server: tuple[str, Recorder],
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block.replace(URL, server[0]), names)
    for each in ("client", "http"):
        names[each].close()
    for _, (_, file) in names["files"]:
        file.close()
    said = capsys.readouterr().out
    assert recorder.seen == recorder.routes() and not recorder.failed
    assert "removed successfully" in said and "transcript.text.done" in said
