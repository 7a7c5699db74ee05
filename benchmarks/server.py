"""A server in a process of its own, for what measures or strains it from outside. Used by `serve` and by the soak test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
STOP_SECONDS = 60


class Server:
    """A running server: its address and what it has logged."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: list[str]) -> None:
        self.process = process
        self.url = url
        self.log = log


@contextmanager
def running_server(
    words: Sequence[str], environ: Mapping[str, str] | None = None, *, wrapper: Sequence[str] = ()
) -> Iterator[Server]:
    """`python app.py` with these words on a free port, ready to answer, and ended by a signal.

    Args:
        words: flags.
        environ: variables beside this process's own; those that are settings are left out.
        wrapper: a command that runs the command that is added to it.

    Raises:
        RuntimeError: it does not start; with the end of its log.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SWITCHBOARD_", "VLLM_"))}
    command = [*wrapper, sys.executable, "app.py", *words, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, env={**own, **(environ or {})}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    try:
        url = _wait_for_url(process.stderr, log)
        reader.start()
        yield Server(process, url, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader.ident is not None:
            reader.join()  # to the end of the log
        process.stderr.close()


def _wait_for_url(lines: IO[str], log: list[str]) -> str:
    for line in lines:
        log.append(line)
        if "event=ready " in line:
            return line.strip().rpartition("url=")[2]
    raise RuntimeError("the server did not start:\n" + "".join(log[-20:]))
