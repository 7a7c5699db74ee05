"""A request on its way from the ingress to a replica. Plain data that both sides and the router know."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

# Where a replica's id stands in the cookie that ties a page to it.
PAGE_COOKIE = "switchboard_replica"
# Which replica wrote an answer, and which was lost before it could.
REPLICA_HEADER = "X-Replica"
LOST_HEADER = "X-Replica-Lost"
# Where an answer to a change says how many replicas have it.
REPLICAS_HEADER = "X-Replicas"
# How often an ingress writes to a page's line and tells its replica that the page is still there.
LINE_BEAT_SECONDS = 15.0
_PAGE_LINE = re.compile(r"/gradio_api/heartbeat/[^/]+")


@dataclass(frozen=True)
class Call:
    """One HTTP request.

    Attributes:
        scope: the ASGI scope, as far as it is plain data.
        parts: the body in pieces: bytes, or references to bytes in Ray's object store.
        adapter: name of the adapter that the request asks for, as far as the ingress can tell.
        prefer: the replica that has the page which sends this.
        avoid: replicas that were lost while they answered this.
        line: of a page's line, which stays open for as long as the page: an id of its own; else empty.
    """

    scope: dict[str, Any]
    parts: list[Any] = field(default_factory=list)
    adapter: str | None = None
    prefer: str | None = None
    avoid: Collection[str] = ()
    line: str = ""


def is_page_line(method: str, path: str) -> bool:
    """Whether a request opens the line by which a page of the web app says that it is there; `path` without `--root-path`."""
    return method == "GET" and _PAGE_LINE.fullmatch(path) is not None
