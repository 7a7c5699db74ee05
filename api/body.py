"""Reading a request: JSON bodies checked off the event loop, the service that a route calls, ids and times.

Called by every route.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TypeVar

from fastapi import Request

from api.auth import CALLER, NOBODY
from api.schema import Body, read_body
from api.service import Service
from engine.errors import InvalidRequest

Model = TypeVar("Model", bound=Body)

# Above this many bytes, parsing would hold up other clients' streams for milliseconds.
INLINE_BYTES = 64 << 10


def service_of(request: Request) -> Service:
    """The service of the application that the request came to, as it is for who sent it."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service.for_caller(request.scope.get(CALLER, NOBODY))


def new_id(prefix: str) -> str:
    """A request id such as `chatcmpl-4f…`."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def json_body(request: Request, model: type[Model]) -> Model:
    """The request's JSON body, validated; raises `InvalidRequest`.

    The content type must be JSON's: a page of another site can post other types without asking, but not this one.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        shown = repr(media_type) if media_type else "missing"
        raise InvalidRequest(f"The content type is {shown}; send JSON with Content-Type: application/json.")
    raw = await request.body()
    if len(raw) <= INLINE_BYTES:
        return read_body(model, raw)
    return await asyncio.to_thread(read_body, model, raw)
