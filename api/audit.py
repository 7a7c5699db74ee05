"""Who changed which adapter, when, and how it ended: a line in the log, and one in the audit file where there is one."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import AppError

log = logging.getLogger("switchboard.audit")


class Audit:
    """Appends JSON lines to a file; None keeps to the log."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()

    @contextmanager
    def change(self, caller: str, action: str, adapter: str) -> Iterator[None]:
        """Record the change that is tried in the block; `outcome` is `ok`, an error's code, `fault` or `left`."""
        outcome = "left"  # the client went away; the change itself may still be done
        try:
            yield
            outcome = "ok"
        except AppError as error:
            outcome = error.code or error.error_type
            raise
        except Exception:
            outcome = "fault"
            raise
        finally:
            self._record({"by": caller, "action": action, "adapter": adapter, "outcome": outcome})

    def _record(self, fields: dict[str, str]) -> None:
        log.info("event=adapter_change %s", " ".join(f"{name}={value!r}" for name, value in fields.items()))
        if self._path is None:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": stamp, **fields}, ensure_ascii=False) + "\n")
        except OSError as error:
            log.error("event=audit_failed reason=%r", error.strerror)
