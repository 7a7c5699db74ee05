"""`/openapi.json` with the JSON bodies that routes read themselves, and a plain page that lists the routes.

Routes parse their bodies off the event loop, so the framework does not see the models; they are described here. The
page needs nothing from another host.
"""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema


def json_request(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads `model` from a JSON body."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def other_answers(*media_types: str) -> dict[str, Any]:
    """The `openapi_extra` of a route that answers in these forms too, or, with a response class of its own, instead of JSON."""
    return {
        "responses": {"200": {"content": {media_type: {"schema": {"type": "string"}} for media_type in media_types}}}
    }


def multipart_request(required: dict[str, str], optional: dict[str, str]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads a form; each field maps to its JSON type, or `file`."""
    properties = {name: _form_field(kind) for name, kind in {**required, **optional}.items()}
    schema = {"type": "object", "required": list(required), "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _form_field(kind: str) -> dict[str, Any]:
    return {"type": "string", "format": "binary"} if kind == "file" else {"type": kind}


_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": _NULLABLE_TEXT,
            },
        }
    },
}
_ERROR_ANSWER = {
    "description": "What is wrong: a field of the request, a credential, a limit, or the server",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


class DescribedApi(FastAPI):
    """A FastAPI application that adds the schemas of `bodies`, and the errors' one form, to its description."""

    bodies: tuple[type[BaseModel], ...] = ()

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made once."""
        if self.openapi_schema is None:
            document = super().openapi()
            _, definitions = models_json_schema(
                [(model, "validation") for model in self.bodies], ref_template="#/components/schemas/{model}"
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"], Error=_ERROR)
            for name in ("HTTPValidationError", "ValidationError"):  # the framework's own, which no route answers
                schemas.pop(name, None)
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    operation["responses"]["default"] = _ERROR_ANSWER
        assert self.openapi_schema is not None
        return self.openapi_schema


def docs_page(document: dict[str, Any]) -> str:
    """An HTML page with every route of an OpenAPI document and what it does."""
    rows = [
        f"<tr><td><code>{escape(method.upper())}</code></td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(operation.get('description', ''))}</td></tr>"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return _PAGE.format(title=escape(document["info"]["title"]), rows="\n".join(rows))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}: routes</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: left; vertical-align: top; padding: .5rem; border-bottom: 1px solid #8884 }}
</style></head><body>
<h1>{title}: routes</h1>
<p>The full description, with every field, is <a href="openapi.json">openapi.json</a>.
Any OpenAI client works with this server's <code>/v1</code> as its base URL.</p>
<table><thead><tr><th>Method</th><th>Path</th><th>What it does</th></tr></thead><tbody>
{rows}
</tbody></table></body></html>
"""
