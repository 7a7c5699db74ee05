"""The one error envelope: every fault of every route becomes `{"error": {"message", "type", "param", "code"}}` here.

Knows exceptions and status numbers, nothing of what caused them. Installed by `api/app`; `api/stream` uses the envelope
for faults that come after a stream has begun, and `api/auth` for refusals before any route is chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from engine.errors import AppError, EngineFault

log = logging.getLogger("switchboard.api")


class AuthenticationFailed(AppError):
    """No credential, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class PermissionDenied(AppError):
    """The credential is good, but not for this."""

    status = 403
    error_type = "permission_error"
    code = "permission_denied"


class RuntimeUpdatingOff(PermissionDenied):
    """The server was started without leave to change adapters."""

    code = "runtime_lora_updating_off"


class BodyTooLarge(AppError):
    """The request's body is over the limit."""

    status = 413
    code = "request_too_large"


def envelope(error: AppError) -> dict[str, Any]:
    """The body of an error answer."""
    return {
        "error": {
            "message": error.message,
            "type": error.error_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: AppError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as an HTTP answer."""
    extra = dict(headers or {})
    if error.retry_after is not None or error.status == 429:
        extra.setdefault("Retry-After", str(error.retry_after or 1))
    if error.status == 401:
        extra.setdefault("WWW-Authenticate", 'Basic realm="Switchboard", charset="UTF-8"')
    return JSONResponse(envelope(error), status_code=error.status, headers=extra)


def refusal(scope: Scope, error: AppError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a request that fails, counted by its reason."""
    scope["app"].state.service.metrics.refuse(error)
    return error_response(error, headers)


def unexpected(error: BaseException, where: str) -> AppError:
    """What the client hears of a fault that is ours; the log gets the cause."""
    log.error("event=fault where=%s kind=%s", where, type(error).__name__, exc_info=error)
    return EngineFault("The server failed on this request; the cause is in its log.")


def http_error(status: int, *, method: str, path: str) -> AppError:
    """The framework's own refusals in our words."""
    if status == 404:
        error = AppError(f"No route {method} {path}; /docs lists the routes.", code="route_not_found")
        error.error_type = "not_found_error"
    elif status == 405:
        error = AppError(f"{path} does not take {method}; /docs lists the methods.", code="method_not_allowed")
    else:
        phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else "refused"
        error = AppError(f"The request cannot be answered: {phrase.lower()}.")
        if status >= 500:
            error.error_type = "server_error"
    error.status = status
    return error


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every exception with the envelope."""

    async def on_app_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, AppError)
        return refusal(request.scope, error)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        answer = http_error(error.status_code, method=request.method, path=request.url.path)
        if error.status_code == 400 and error.detail:
            answer.message = f"{error.detail.rstrip('.')}."
        return refusal(request.scope, answer, error.headers)

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        fault = error.errors()[0]
        param = ".".join(str(step) for step in fault["loc"][1:]) or None
        return refusal(request.scope, AppError(f"{param or 'the request'}: {fault['msg']}.", param=param))

    async def on_unexpected(request: Request, error: Exception) -> JSONResponse:
        return refusal(request.scope, unexpected(error, request.url.path))

    app.add_exception_handler(AppError, on_app_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(Exception, on_unexpected)
