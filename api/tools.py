"""What clients say about tools: `tools` and `tool_choice`, and the calls in an assistant's earlier turns.

Owns these fields' shapes and the words for what is wrong with them; every fault names its field, such as
`tools[0].function.parameters`. What a model makes of tools is the engine's. Called by `schema` and `messages`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import WithJsonSchema

from engine.errors import InvalidRequest
from engine.tools.spec import Function, ToolCall, ToolUse

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_DEPTH = 64

_NAMED_SCHEMA = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
_TOOLS_SCHEMA = {
    "type": ["array", "null"],
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
                    "description": {"type": "string"},
                    "parameters": {"type": "object"},
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        _NAMED_SCHEMA,
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["mode", "tools"],
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "items": _NAMED_SCHEMA},
                    },
                },
            },
        },
    ]
}
CALLS_SCHEMA = {
    "type": ["array", "null"],
    "items": {
        "type": "object",
        "required": ["id", "type", "function"],
        "properties": {
            "id": {"type": "string"},
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name", "arguments"],
                "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            },
        },
    },
}
# Read by the functions below; here they are only described.
Tools = Annotated[Any, WithJsonSchema(_TOOLS_SCHEMA)]
ToolChoice = Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)]


def read_tools(tools: object, choice: object, *, is_parallel: bool = True) -> ToolUse | None:
    """The tools of a request, None where the model is to know of none; raises `InvalidRequest` with the field at fault."""
    functions = _functions(tools)
    if not functions:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools; send them or leave tool_choice out.", param="tool_choice")
        return None
    names = frozenset(function.name for function in functions)
    if choice in (None, "auto"):
        return ToolUse(functions, names, False, is_parallel)
    if choice == "none":
        return None
    if choice == "required":
        return ToolUse(functions, names, True, is_parallel)
    if not isinstance(choice, dict):
        raise InvalidRequest(
            f"tool_choice is {choice!r:.60}, but must be none, auto, required, or an object that names functions.",
            param="tool_choice",
        )
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, functions, names, is_parallel)
    # A function that is named is called once.
    return ToolUse(functions, frozenset({_named(choice, "tool_choice", names)}), True, False)


def _allowed(
    choice: Mapping[str, Any], functions: Sequence[Function], names: frozenset[str], is_parallel: bool
) -> ToolUse:
    path = "tool_choice.allowed_tools"
    _check_fields(choice, {"type", "allowed_tools"}, "tool_choice")
    fields = _object(choice.get("allowed_tools"), path)
    _check_fields(fields, {"mode", "tools"}, path)
    mode, listed = fields.get("mode"), fields.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{path}.mode is {mode!r:.60}, but must be auto or required.", param=f"{path}.mode")
    if not isinstance(listed, list) or not listed:
        raise InvalidRequest(f"{path}.tools must be a list of at least one tool.", param=f"{path}.tools")
    allowed = frozenset(_named(item, f"{path}.tools[{place}]", names) for place, item in enumerate(listed))
    return ToolUse(functions, allowed, mode == "required", is_parallel)


def _named(raw: object, path: str, names: Collection[str]) -> str:
    """The name in `{"type": "function", "function": {"name": …}}`, which must be that of a tool."""
    fields = _typed_function(raw, path)
    _check_fields(fields, {"name"}, f"{path}.function")
    name = fields.get("name")
    if not isinstance(name, str) or name not in names:
        raise InvalidRequest(
            f"{path}.function.name is {name!r:.60}, but must be the name of one of the tools.",
            param=f"{path}.function.name",
        )
    return name


def _functions(raw: object) -> list[Function]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise InvalidRequest("tools must be a list of tools.", param="tools")
    functions: dict[str, Function] = {}
    for place, item in enumerate(raw):
        function = _function(item, f"tools[{place}]")
        if function.name in functions:
            raise InvalidRequest(
                f"tools[{place}].function.name is {function.name!r}, as that of an earlier tool; give each its own.",
                param=f"tools[{place}].function.name",
            )
        functions[function.name] = function
    return list(functions.values())


def _function(raw: object, path: str) -> Function:
    fields = _typed_function(raw, path)
    path += ".function"
    _check_fields(fields, {"name", "description", "parameters", "strict"}, path)
    name, description, strict = fields.get("name"), fields.get("description"), fields.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.name is {name!r:.80}, but must be 1 to 64 letters, digits, underscores and dashes.",
            param=f"{path}.name",
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{path}.description must be text.", param=f"{path}.description")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{path}.strict must be true or false.", param=f"{path}.strict")
    return Function(name, description, _parameters(fields.get("parameters"), f"{path}.parameters"), strict is True)


def _parameters(raw: object, path: str) -> dict[str, Any] | None:
    if raw is None:
        return None
    fields = _object(raw, path)
    kind = fields.get("type", "object")
    if kind != "object":
        raise InvalidRequest(
            f'{path} is a schema of the type {kind!r:.60}, but arguments are an object; send "type": "object".',
            param=path,
        )
    properties = fields.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(each, (dict, bool)) for each in properties.values()):
        raise InvalidRequest(f"{path}.properties must map names to schemas.", param=path)
    _check_depth(fields, path)
    return fields


def read_calls(raw: object, path: str) -> tuple[ToolCall, ...]:
    """The `tool_calls` of an assistant's turn; raises `InvalidRequest` with the field at fault."""
    if not isinstance(raw, list):
        raise InvalidRequest(f"{path} must be a list of calls.", param=path)
    return tuple(_call(item, f"{path}[{place}]") for place, item in enumerate(raw))


def _call(raw: object, path: str) -> ToolCall:
    fields = _typed_function(raw, path, {"id", "index"})
    assert isinstance(raw, dict)
    call_id = raw.get("id")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(
            f"{path}.id is missing or no text; send the id that the call came with.", param=f"{path}.id"
        )
    _check_fields(fields, {"name", "arguments"}, f"{path}.function")
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        param = f"{path}.function.name"
        raise InvalidRequest(f"{param} is {name!r:.80}, which is no function's name.", param=param)
    return ToolCall(call_id, name, _arguments(arguments, f"{path}.function.arguments"))


def _arguments(raw: object, path: str) -> str:
    """JSON text of an object; some clients send nothing for no arguments."""
    if not isinstance(raw, str):
        raise InvalidRequest(f"{path} is missing or no text; send the JSON text that the call came with.", param=path)
    try:
        value = json.loads(raw) if raw.strip() else {}
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is not the JSON text of an object; send it as the call came.", param=path)
    _check_depth(value, path)
    return raw if raw.strip() else "{}"


def _typed_function(raw: object, path: str, others: Collection[str] = ()) -> dict[str, Any]:
    """The inner object of `{"type": "function", "function": {…}}`."""
    fields = _object(raw, path)
    kind = fields.get("type")
    if kind != "function":
        raise InvalidRequest(f"{path}.type is {kind!r:.60}; the one type served is function.", param=f"{path}.type")
    _check_fields(fields, {"type", "function", *others}, path)
    return _object(fields.get("function"), f"{path}.function")


def _object(raw: object, path: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        what = "is missing" if raw is None else f"is a {type(raw).__name__}"
        raise InvalidRequest(f"{path} {what}; it must be an object.", param=path)
    return raw


def _check_fields(fields: Mapping[str, Any], known: Collection[str], path: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not None:
            raise InvalidRequest(
                f"{path}.{name} is not a field here; remove it.", param=f"{path}.{name}", code="unknown_parameter"
            )


def _check_depth(value: object, path: str) -> None:
    """Refuse what is nested too deeply for templates."""
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            part
            for each in level
            if isinstance(each, (dict, list))
            for part in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise InvalidRequest(f"{path} is nested more than {_MAX_DEPTH} levels deep; make it flatter.", param=path)
