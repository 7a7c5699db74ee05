"""A small Hugging Face hub: repositories in memory behind the few routes that huggingface_hub uses to read files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest

Files = dict[str, bytes]


class HubServer:
    """Repositories as `repo -> revision -> files`; a revision's commit is a digest of its files.

    Attributes:
        requests: `METHOD path` of everything that was asked for.
        gate: answers with a file's content wait for it; set unless a test clears it.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Files]] = {}
        self.requests: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""

    def put(self, repo: str, files: Files, revision: str = "main") -> str:
        """Make `files` a revision's content; returns its commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repos.setdefault(repo, {}).update({revision: files, commit: files})
        return commit

    def commit_of(self, files: Files) -> str:
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@contextmanager
def serve_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubServer]:
    """Run a hub and make huggingface_hub use it, with a cache of its own."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._repository("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main")
            else:
                self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), with_body=with_body)

        def _repository(self, repo: str, revision: str) -> None:
            if repo not in hub.repos:
                return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            files = hub.repos[repo].get(revision)
            if files is None:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            found = {"id": repo, "sha": hub.commit_of(files), "siblings": siblings}
            return self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

        def _file(self, repo: str, revision: str, name: str, *, with_body: bool) -> None:
            content = hub.repos[repo][revision][name]
            if with_body:
                hub.gate.wait(120)
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            commit = hub.commit_of(hub.repos[repo][revision])
            self._send(200, content, {"ETag": etag, "X-Repo-Commit": commit}, with_body=with_body)

        def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """The test's output stays clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    use_hub(monkeypatch, hub.url, cache)
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HOME do, for a package that has been imported already."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "")
