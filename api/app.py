"""The FastAPI application: routes, guards and error handlers put together around one engine.

Owns the order of things: guards outside, API routes before whatever is mounted at `/` later, and answers in the error
envelope for wrong methods and unknown paths under `/v1`. Called by `app.py` and by tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import api
from api import adapters, chat, completions, models, schema, tokens, transcriptions
from api.auth import Guard, LimitBody
from api.body import service_of
from api.errors import PermissionDenied, error_response, http_error, install_error_handlers
from api.openapi import DescribedApi, docs_page
from api.service import Service
from api.settings import ServerSettings
from api.stream import ClientLeft, DirectSend

if TYPE_CHECKING:
    from engine.engine import Engine

router = APIRouter()

# nginx's number for a client that closed the connection; nobody reads it.
CLIENT_CLOSED_REQUEST = 499
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE"]


def create_app(
    engine: Engine, settings: ServerSettings, *, service: Service | None = None, routers: Sequence[APIRouter] = ()
) -> FastAPI:
    """The application, ready for a server or for the browser app to be mounted at `/`.

    Its `state.service` is the `Service` that routes use: a new one unless one is given. `settings` must be resolved.
    `routers` are routes beside the usual ones.
    """
    service = service or Service(engine, settings)
    app = DescribedApi(
        title="Switchboard",
        version=api.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    # Set here, because the argument of that name is deprecated in favour of the server's own, which rewrites paths.
    app.root_path = settings.root_path
    app.bodies = (
        schema.ChatRequest,
        schema.CompletionRequest,
        schema.LoadAdapterRequest,
        schema.UnloadAdapterRequest,
        schema.PatchAdapterRequest,
        schema.TokenizeRequest,
        schema.DetokenizeRequest,
    )
    app.state.service = service
    parts = (*_PARTS, *routers)
    for part in parts:
        app.include_router(part)
    _answer_other_methods(app, parts)
    for path in ("/v1", "/v1/{path:path}"):
        app.add_api_route(path, _no_such_route, methods=_METHODS, include_in_schema=False)
    install_error_handlers(app)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(ClientDisconnect, _on_client_left)
    app.add_middleware(DirectSend)
    app.add_middleware(LimitBody, max_bytes=engine.config.max_upload_mb << 20)
    app.add_middleware(Guard, policy=service.policy, root_path=settings.root_path)
    if settings.allowed_origins:
        # Outside the guard: a browser asks for leave without a credential.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "HEAD", "POST", "PATCH", "DELETE"],
            # Clients send headers of their own about themselves; whoever may call may send them.
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id", "X-LoRA-Name", "X-LoRA-Reason"],
        )
    return app


@router.get("/health", responses={503: {"description": "The engine has stopped"}})
async def health(request: Request) -> Response:
    """200 while the engine's thread lives, even when it only ends what is under way, else 503; needs no credential."""
    is_running = service_of(request).stats().is_running
    return JSONResponse({"status": "ok" if is_running else "down"}, status_code=200 if is_running else 503)


@router.get("/health/ready", responses={503: {"description": "The server is stopping, or its queue is full"}})
async def ready(request: Request) -> Response:
    """200 where a request would be taken now, 503 where the server is stopping or its queue is full; needs no credential."""
    state = service_of(request).readiness()
    headers = {} if state == "ready" else {"Retry-After": "1"}
    return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503, headers=headers)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counts, latencies and residency in Prometheus' text form."""
    service = service_of(request)
    if not service.caller.sees_all:
        raise PermissionDenied("Metrics tell of every adapter; this key is for some of them.")
    return Response(await asyncio.to_thread(service.metrics.render), media_type=service.metrics.content_type)


@router.get("/version")
async def version() -> dict[str, str]:
    """The program's version."""
    return {"version": api.__version__}


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """A page that lists the routes; it needs nothing from another host."""
    return HTMLResponse(docs_page(request.app.openapi()))


_PARTS = (
    router,
    models.router,
    chat.router,
    completions.router,
    transcriptions.router,
    adapters.router,
    adapters.admin,
    tokens.router,
)


def answer_unknown_paths(app: FastAPI) -> None:
    """Let the browser app, once it is mounted, answer paths that nobody knows with the error envelope too."""

    async def on_not_found(request: Request, error: Exception) -> Response:
        if "/gradio_api/" in request.url.path:
            return JSONResponse({"detail": getattr(error, "detail", "Not Found")}, status_code=404)
        return error_response(http_error(404, method=request.method, path=request.url.path))

    for route in app.routes:
        mounted = getattr(route, "app", None)
        if isinstance(mounted, FastAPI):
            mounted.add_exception_handler(404, on_not_found)


def _answer_other_methods(app: FastAPI, parts: Sequence[APIRouter]) -> None:
    """Answer methods that a path does not take with 405 here, before a page mounted at `/` takes them for its own."""
    taken: dict[str, set[str]] = {}
    for route in [route for part in parts for route in part.routes]:
        assert isinstance(route, APIRoute) and route.methods
        taken.setdefault(route.path, set()).update(route.methods)
        if "GET" in route.methods:  # HEAD is GET without the body, which the server leaves out.
            taken[route.path].add("HEAD")
            app.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                dependencies=route.dependencies,
                response_model=None,
                include_in_schema=False,
            )
    for path, methods in taken.items():
        others = [method for method in _METHODS if method not in methods]
        app.add_api_route(path, _refuse_method(methods), methods=others, include_in_schema=False)


def _refuse_method(allowed: set[str]) -> Any:
    async def refuse() -> None:
        raise HTTPException(405, headers={"Allow": ", ".join(sorted(allowed))})

    return refuse


async def _no_such_route() -> None:
    raise HTTPException(404)


async def _on_client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
