"""`python app.py` as a user runs it: exit codes, what it logs, the page beside the API, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest
from fastapi import FastAPI

import app
from api.settings import ServerSettings

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def _same_signals_afterwards() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--wibble"], 2, "unknown flag --wibble"),
        (["--port", "many"], 2, "--port"),
        (["--lora-modules", "sql"], 2, "NAME=PATH"),
        (["--host", "0.0.0.0", "--allow-runtime-lora-updating"], 2, "--admin-key"),
        (["--port", "0", "--max-loras", "9", "--max-cpu-loras", "2"], 2, "--max-cpu-loras"),
        (["--port", "0", "--model", "/nowhere/at/all"], 2, "/nowhere/at/all"),
    ],
)
def test_a_start_that_fails_is_one_line_and_an_exit_code(
    words: list[str], status: int, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("SWITCHBOARD_", "VLLM_"))]:
        monkeypatch.delenv(name)
    assert app.main(words) == status
    [line] = [line for line in capfd.readouterr().err.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)]
    assert line.startswith("app.py: error: ")
    assert said in line


def test_an_adapter_that_cannot_be_loaded_ends_the_start(
    speech_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A path without a folder is the flag's fault, and told before the model is loaded; a folder without an adapter is not."""
    (tmp_path / "empty").mkdir()
    model = ["--port", "0", "--model", str(speech_dir), "--adapter-dir", str(tmp_path / "catalogue")]
    for folder, code in ((tmp_path / "nowhere", 2), (tmp_path / "empty", 1)):
        assert app.main([*model, "--lora-modules", f"gone={folder}"]) == code
        assert re.search(r"^app.py: error: .*gone", capfd.readouterr().err, re.MULTILINE)


def test_a_port_in_use_is_told_before_the_model_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert app.main(["--port", str(port), "--model", "/nowhere"]) == 1
    assert f"port {port} (address already in use); choose another with --port." in capfd.readouterr().err


class Draining:
    """An engine whose answers under way end when the test says so."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def close(self, _drain_s: float) -> None:
        assert self.may_end.wait(120)


def test_new_connections_are_answered_while_answers_drain() -> None:
    engine = Draining()
    stopper = app._Stopper(engine, 60.0)  # type: ignore[arg-type]
    pages = FastAPI()
    pages.add_api_route("/page", lambda: "here")
    is_ready = threading.Event()
    server = app._make_server(
        pages, ServerSettings(drain_seconds=60.0), on_ready=is_ready.set, on_stop=lambda: stopper.start(server.end)
    )
    with app._bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        assert is_ready.wait(120)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/page"
        try:
            server.handle_exit(signal.SIGINT, None)
            for _ in range(3):
                thread.join(0.15)  # as long as the server takes to notice that it should end
                assert thread.is_alive() and httpx.get(url).json() == "here"
        finally:
            engine.may_end.set()
        thread.join(60)
        assert not thread.is_alive()
    stopper.finish()


def next_line(log: IO[str], event: str, lines: list[str]) -> str:
    """The log's next line about an event; `lines` gets everything that was read."""
    for line in log:
        lines.append(line)
        if f"event={event} " in line or line.rstrip().endswith(f"event={event}"):
            return line
    raise AssertionError(f"the process ended without event={event}:\n" + "".join(lines))


@pytest.mark.timeout(600)
def test_a_run_from_start_to_ctrl_c(speech_dir: Path, speech_adapters: dict[str, Path], tmp_path: Path) -> None:
    words = [
        sys.executable, "app.py", str(speech_dir), "--served-model-name", "tiny", "alias", "--port", "0",
        "--adapter-dir", str(tmp_path), "--lora-modules", f"speech={speech_adapters['speech']}",
        json.dumps({"name": "style", "path": str(speech_adapters["style"])}),
        "--default-mm-loras", '{"audio": "speech"}', "--long-lora-scaling-factors", "4.0", "--drain-seconds", "1",
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SWITCHBOARD_", "VLLM_"))}
    lines: list[str] = []
    process = subprocess.Popen(words, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        told = next_line(process.stderr, "starting", lines)
        assert f"model={speech_dir} " in told and len(lines) <= 2, "whoever waits is told at once what for"
        url = next_line(process.stderr, "ready", lines).strip().rpartition("url=")[2]
        assert told.strip().endswith(f"url={url}")
        log = "".join(lines)
        assert re.search(r"event=flag_ignored .*long-lora-scaling-factors has no effect", log)
        assert re.search(
            r"event=adapter name=speech source=\S+speech rank=8 alpha=8 scale=1 modules=q_proj,v_proj num_modules=\d+ "
            r"size_mb=0\.\d\d "
            "default_for=audio",
            log,
        )
        assert re.search(r"event=memory model=tiny base_mb=\d+\.\d\d adapters_mb=.* lora_overhead_mb=\d+\.\d\d", log)
        with httpx.Client(base_url=url, timeout=60) as http:
            assert "gradio" in http.get("/").text
            assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [
                "tiny",
                "alias",
                "speech",
                "style",
            ]
            for path in ("/nowhere", "/v1/nowhere"):
                answer = http.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")
            body = {"model": "alias", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 450}
            with http.stream(
                "POST", "/v1/chat/completions", json={**body, "ignore_eos": True, "stream": True}
            ) as answer:
                events = answer.iter_lines()
                assert json.loads(next(events).removeprefix("data: "))["model"] == "alias"
                process.send_signal(signal.SIGINT)
                # The answer drains, or is cut off with an error event; it is never just dropped.
                *_, last = [line for line in events if line]
                assert last == "data: [DONE]" or "shutting_down" in last
        next_line(process.stderr, "stopped", lines)
        assert process.wait(30) == 0
        assert "Traceback" not in "".join(lines)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
