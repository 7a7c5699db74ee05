"""Who may do what: one policy for the API and the browser app, and the two guards that stand before every route.

`Policy` turns an `Authorization` header into a `Caller`; `Guard` lets nobody past without one; `LimitBody` bounds what is
read of a request. Plain ASGI, so that streams and disconnects pass untouched. Installed by `api/app`; the browser app
asks the same policy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import AuthenticationFailed, BodyTooLarge, PermissionDenied, refusal
from api.settings import ServerSettings
from api.tenants import Caller, Role, TenantsFile

OPEN_PATHS = frozenset({"/health", "/health/ready"})
CALLER = "switchboard.caller"
DRAIN_BYTES = 64 << 20
DRAIN_SECONDS = 5.0


class Policy:
    """The credentials of the settings, compared in constant time.

    An API key is sent as a bearer token, or as the password of HTTP basic login (any user name), which is how a browser
    sends it, and so is a tenant's. Where no admin key is set, `--api-key` and `--auth` are an administrator's.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.is_open = not settings.has_credentials
        self._api_key = settings.api_key
        self._admin_key = settings.admin_key
        self._auth = settings.auth
        self._tenants = None if settings.tenants is None else TenantsFile(Path(settings.tenants))

    @property
    def has_tenants(self) -> bool:
        """Whether some callers may not know of some adapters."""
        return self._tenants is not None

    def caller_of(self, authorization: str | None) -> Caller:
        """Who sends a request with this `Authorization` header."""
        if self.is_open:
            return _OPEN
        user_and_password, secret = _secrets(authorization or "")
        # All are compared, so that time tells nothing about which one came near.
        is_admin = _matches(secret, self._admin_key)
        has_key, has_login = _matches(secret, self._api_key), _matches(user_and_password, self._auth)
        tenant = None if self._tenants is None else self._tenants.find(secret)
        if is_admin:
            return _ADMIN_KEY
        if has_key or has_login:
            role = Role.ADMIN if self._admin_key is None else Role.USER
            return Caller("api-key" if has_key else "auth", role)
        return tenant or NOBODY

    def role_of(self, authorization: str | None) -> Role:
        """The role of a request with this `Authorization` header."""
        return self.caller_of(authorization).role


NOBODY = Caller("nobody", Role.NOBODY)
_OPEN = Caller("anyone", Role.ADMIN)
_ADMIN_KEY = Caller("admin-key", Role.ADMIN)


def _secrets(authorization: str) -> tuple[str, str]:
    """`(USER:PASS, secret)` of a header: of basic login both and the password; of a bearer token the token."""
    scheme, _, value = authorization.partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return "", value
    if scheme.lower() != "basic":
        return "", ""
    try:
        pair = base64.b64decode(value, validate=True).decode("utf-8")
    except ValueError:
        return "", ""
    return pair, pair.partition(":")[2]


def _matches(given: str, expected: str | None) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), (expected or "").encode()) and bool(expected)


async def require_admin(request: Request) -> None:
    """Route dependency: the administrator's credential, and no page of another site acting in its browser."""
    if request.scope.get(CALLER, NOBODY).role < Role.ADMIN:
        raise PermissionDenied("This needs the administrator's credential; send the admin key.")
    origin = request.headers.get("origin")
    is_bearer = request.headers.get("authorization", "").lower().startswith("bearer ")
    if origin is not None and not is_bearer and urlsplit(origin).netloc != request.headers.get("host"):
        raise PermissionDenied("Another site's page may not change adapters; send the request from this server's own.")


class Guard:
    """Stands before every route and socket, the browser app's included."""

    def __init__(self, app: ASGIApp, policy: Policy, root_path: str = "") -> None:
        self._app = app
        self._policy = policy
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope[CALLER] = self._policy.caller_of(Headers(scope=scope).get("authorization"))
        path = scope["path"].removeprefix(self._root_path)
        if scope[CALLER].role is not Role.NOBODY or path in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            wrong = AuthenticationFailed(
                "A credential is missing or wrong; send the API key as a bearer token, or log in with HTTP basic."
            )
            await refusal(scope, wrong)(scope, receive, send)


class LimitBody:
    """Refuses bodies over `max_bytes`: before reading where the length is declared, while reading where it is not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            if "expect" not in headers:
                await _discard(receive)
            await refusal(scope, self._refusal())(scope, receive, send)
            return
        num_read = 0

        async def counted() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            if num_read > self._max_bytes:
                raise self._refusal()
            return message

        await self._app(scope, counted, send)

    def _refusal(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"The request's body is over the limit of {self._max_bytes / 2**20:g} MiB; send less, or start the server "
            "with a larger --max-upload-mb."
        )


async def _discard(receive: Receive) -> None:
    """Read and drop what a client is already sending, within bounds, so that it lives to read the refusal."""

    async def drop() -> None:
        num_dropped = 0
        is_more = True
        while is_more and num_dropped < DRAIN_BYTES:
            message = await receive()
            num_dropped += len(message.get("body", b""))
            is_more = message.get("more_body", False)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(drop(), DRAIN_SECONDS)
