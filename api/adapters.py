"""Routes that load, unload, upload, list, change and delete adapters; changing anything needs the administrator's role.

The texts of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` are vLLM's. Called by `api/app`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.background import BackgroundTask
from starlette.datastructures import FormData

from adapters.errors import AdapterNotFound
from adapters.storage import storage_faults
from api.auth import require_admin
from api.body import json_body, service_of
from api.cards import parent_of
from api.forms import Form
from api.openapi import json_request, multipart_request, other_answers
from api.schema import LoadAdapterRequest, PatchAdapterRequest, UnloadAdapterRequest, client_words
from api.service import Service
from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from adapters.records import AdapterInfo
    from engine.engine import Engine, EngineStats

router = APIRouter()
admin = APIRouter(dependencies=[Depends(require_admin)])

_FILE_FIELDS = frozenset({"file", "files", "file[]", "files[]"})
_UPLOAD_FIELDS = frozenset({"name", "dry_run", "load_inplace"})
MAX_FILES = 256


@admin.post("/v1/load_lora_adapter", openapi_extra=json_request(LoadAdapterRequest), response_class=PlainTextResponse)
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter from a folder on the server, or replace one in place."""
    service = service_of(request)
    service.require_updates()
    body = await json_body(request, LoadAdapterRequest)
    for param, value in (("lora_name", body.lora_name), ("lora_path", body.lora_path)):
        if not value.strip():
            raise InvalidRequest(f"Both 'lora_name' and 'lora_path' must be provided; {param} is empty.", param=param)
    await service.load_adapter(
        body.lora_name, body.lora_path, load_inplace=bool(body.load_inplace), base_model_name=body.base_model_name
    )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@admin.post(
    "/v1/unload_lora_adapter", openapi_extra=json_request(UnloadAdapterRequest), response_class=PlainTextResponse
)
async def unload_lora_adapter(request: Request) -> Response:
    """Unload an adapter by its name or its number; answers under way end on it."""
    service = service_of(request)
    service.require_updates()
    body = await json_body(request, UnloadAdapterRequest)
    name = await _named(service, body)
    with _missing_is("lora_name" if body.lora_name else "lora_int_id"):
        await service.unload_adapter(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


@contextmanager
def _missing_is(param: str) -> Iterator[None]:
    """Let the error of an unknown adapter blame what the client gave it by."""
    try:
        yield
    except AdapterNotFound as error:
        if error.param == "model":
            error.param, error.message = param, error.message.replace("model", "adapter", 1)
        raise


async def _named(service: Service, body: UnloadAdapterRequest) -> str:
    """The adapter that an unload request means; raises `InvalidRequest` or `AdapterNotFound`."""
    if not body.lora_name and body.lora_int_id is None:
        raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
    if body.lora_int_id is None:
        assert body.lora_name is not None
        return body.lora_name
    by_number = {info.lora_int_id: info.name for info in await service.list_adapters()}
    name = by_number.get(body.lora_int_id)
    if name is None:
        raise AdapterNotFound(f"No adapter has the number {body.lora_int_id}.", param="lora_int_id")
    if body.lora_name not in (None, "", name):
        raise InvalidRequest(
            f"lora_int_id {body.lora_int_id} is {name!r}, not {body.lora_name!r}; send one of the two.",
            param="lora_int_id",
        )
    return name


_UPLOAD_FORM = multipart_request({"files": "file"}, {"name": "string", "dry_run": "boolean", "load_inplace": "boolean"})


@admin.post("/v1/adapters", openapi_extra=_UPLOAD_FORM)
async def upload_adapter(request: Request) -> Response:
    """Check an uploaded zip, or an adapter's files; store and list it unless dry_run."""
    service = service_of(request)
    async with _spooled(request) as data:
        form = Form(data)
        form.check_fields(_UPLOAD_FIELDS | _FILE_FIELDS, {})
        uploads = form.files(_FILE_FIELDS)
        if not uploads:
            raise InvalidRequest(
                "files is missing; send a zip, or adapter_config.json with its safetensors files, in a multipart form.",
                param="files",
                code="missing_required_parameter",
            )
        names = [upload.filename or "" for upload in uploads]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidRequest(f"Two files are called {twice!r}; send each once.", param="files")
        files = {upload.filename or "": upload.file for upload in uploads}
        if form.switch("dry_run"):
            report = await service.inspect_upload(files)
            return JSONResponse({**report.to_dict(), "dry_run": True})
        service.require_updates()
        with client_words({"lora_name": "name"}):
            info = await service.install_upload(
                form.required_text("name"), files, load_inplace=form.switch("load_inplace")
            )
    probe = await service.probe_adapter(info.name)
    found = {"is_ok": True, "errors": [], "code": None, "report": info.report}
    found["probe"] = None if probe is None else probe.to_dict()
    return JSONResponse({**found, "dry_run": False, "adapter": adapter_json(service.engine, info)})


@asynccontextmanager
async def _spooled(request: Request) -> AsyncIterator[FormData]:
    """The form, its files on disk. Raises `StorageFull` where they find no room."""
    with storage_faults("uploads"):
        data = await request.form(max_files=MAX_FILES, max_fields=64)
    try:
        yield data
    finally:
        await data.close()


@router.get("/v1/adapters")
async def list_adapters(request: Request) -> dict[str, Any]:
    """Every adapter with where it lies, its size, and how it is used; what all of them take; and the downloads under way."""
    service = service_of(request)
    adapters = [adapter_json(service.engine, info) for info in await service.list_adapters()]
    if not service.caller.sees_all:
        return {"object": "list", "data": adapters}  # The rest would tell of adapters that this caller does not have.
    downloads = [download.to_dict() for download in service.downloads()]
    return {"object": "list", "data": adapters, "stats": stats_json(service.stats()), "downloads": downloads}


# Before the route below, whose path takes in this one's.
@router.get(
    "/v1/adapters/{name:path}/download",
    dependencies=[Depends(require_admin)],
    response_class=FileResponse,
    openapi_extra=other_answers("application/zip"),
)
async def download_adapter(request: Request, name: str) -> FileResponse:
    """The adapter's files as a zip that can be uploaded again."""
    with _missing_is("name"):
        path = await service_of(request).export_adapter(name)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "adapter"
    return FileResponse(
        path, media_type="application/zip", filename=f"{stem}.zip", background=BackgroundTask(path.unlink)
    )


@router.get("/v1/adapters/{name:path}")
async def get_adapter(request: Request, name: str) -> dict[str, Any]:
    """One adapter, with its versions."""
    service = service_of(request)
    with _missing_is("name"):
        versions = [asdict(version) for version in await service.adapter_versions(name)]
        info = await service.get_adapter(name)
    return {**adapter_json(service.engine, info), "versions": versions}


@admin.patch("/v1/adapters/{name:path}", openapi_extra=json_request(PatchAdapterRequest))
async def patch_adapter(request: Request, name: str) -> dict[str, Any]:
    """Go back to a version, answer modalities by itself, stay in memory: what is named is done, in this order."""
    service = service_of(request)
    service.require_updates()
    body = await json_body(request, PatchAdapterRequest)
    if body.pinned is None and body.generation is None and body.default_for is None:
        raise InvalidRequest("Nothing is to be changed; send pinned, generation or default_for.", param="pinned")
    service.engine.check_modalities(body.default_for or ())
    with _missing_is("name"):
        if body.generation is not None:
            await service.roll_back_adapter(name, body.generation)
        if body.default_for is not None:
            await service.set_default_for(name, body.default_for)
        if body.pinned is not None:
            await service.pin_adapter(name, body.pinned)
        return adapter_json(service.engine, await service.get_adapter(name))


@admin.delete("/v1/adapters/{name:path}")
async def delete_adapter(request: Request, name: str) -> dict[str, Any]:
    """Unload an adapter; the files of an upload are deleted."""
    with _missing_is("name"):
        await service_of(request).delete_adapter(name)
    return {"id": name, "object": "adapter", "deleted": True}


def adapter_json(engine: Engine, info: AdapterInfo) -> dict[str, Any]:
    """An adapter as `/v1/adapters` shows it."""
    return {
        "id": info.name,
        "object": "adapter",
        "name": info.name,
        "root": info.source,
        "revision": info.revision,
        "parent": parent_of(engine, info),
        "lora_int_id": info.lora_int_id,
        "generation": info.generation,
        "rank": info.rank,
        "alpha": info.alpha,
        "scale": info.scale,
        "target_modules": info.target_modules,
        "num_modules": info.num_modules,
        "bytes": info.num_bytes,
        "state": info.state,
        "pinned": info.pinned,
        "default_for": info.default_for,
        "created": int(info.created),
        "num_requests": info.num_requests,
        "last_used": info.last_used,
        "num_loads": info.num_loads,
        "load_ms": info.load_ms,
        "prefix_query_tokens": info.prefix_query_tokens,
        "prefix_hit_tokens": info.prefix_hit_tokens,
        "is_stored": info.is_stored,
        "error": info.error,
        "warnings": info.warnings,
        "report": info.report,
    }


def stats_json(stats: EngineStats) -> dict[str, Any]:
    """What all adapters take, as the list of `/v1/adapters` shows it; bytes are those of A and B."""
    adapters = stats.adapters
    return {
        "num_adapters": adapters.num_adapters,
        "num_failed": adapters.num_failed,
        "num_pinned": adapters.num_pinned,
        "cpu": {
            "count": adapters.num_cpu,
            "bytes": adapters.cpu_bytes,
            "max_count": adapters.max_cpu_loras,
            "max_bytes": adapters.max_cpu_bytes,
            "evictions": adapters.evictions,
        },
        "rows": {
            "count": stats.lora_rows_used,
            "max_count": stats.lora_rows_total,
            "loads": stats.lora_row_loads,
            "evictions": stats.lora_row_evictions,
        },
        "loads": adapters.loads,
        "load_seconds": adapters.load_seconds,
        "refusals": adapters.refusals,
    }
