"""From the `messages` of a request to the engine's `Message`s: roles, text, and media that are not decoded yet.

Every fault names its field, such as `messages[0].content[1].input_audio.data`. Pure and possibly slow (base64 of large
files): called in a worker thread. Which adapter the media call for is decided later, from what they decode to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from api.media_urls import MediaUrls
from api.tools import read_calls
from engine.errors import InvalidRequest, MediaError
from engine.media import decode_base64
from engine.request import AudioPart, ImagePart, Message, Part, TextPart

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Fields that clients send back with an assistant's turn; harmless as long as they hold nothing.
_EMPTY_FIELDS = frozenset({"function_call", "refusal", "audio", "annotations", "reasoning", "reasoning_content"})
_LABELS = frozenset({"name", "tool_call_id"})


@dataclass(frozen=True)
class MediaRules:
    """What the model takes, how much, and from where.

    Attributes:
        modalities: of the model.
        max_bytes: of one file.
        urls: says which addresses may be given.
        fetched: what lies at such an address.
        wanted: filled while messages are read: addresses that are not in `fetched`, each with its first field. Their
            parts are empty.
    """

    modalities: Collection[str]
    max_bytes: int
    urls: MediaUrls = field(default_factory=lambda: MediaUrls(()))
    fetched: Mapping[str, bytes] = field(default_factory=dict)
    wanted: dict[str, str] = field(default_factory=dict)


def read_messages(raw: object, rules: MediaRules) -> list[Message]:
    """Read the `messages` field; raises `InvalidRequest` or `MediaError` that names the part at fault."""
    if not isinstance(raw, list):
        raise InvalidRequest(f"messages is {_kind(raw)}, but must be a list of messages.", param="messages")
    if not raw:
        raise InvalidRequest("messages is empty; send at least one message.", param="messages")
    messages: list[Message] = []
    names: dict[str, str] = {}  # of the functions by their calls' ids
    for place, item in enumerate(raw):
        message = _message(item, f"messages[{place}]", rules)
        names |= {call.call_id: call.name for call in message.tool_calls}
        if message.tool_call_id is not None and message.name is None:
            message = replace(message, name=names.get(message.tool_call_id))
        messages.append(message)
    return messages


def _message(raw: object, path: str, rules: MediaRules) -> Message:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{path} is {_kind(raw)}, but must be an object with role and content.", param=path)
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        what = "is missing" if "role" not in raw else f"is {role!r}" if isinstance(role, str) else f"is {_kind(role)}"
        raise InvalidRequest(f"{path}.role {what}; it must be one of {', '.join(ROLES)}.", param=f"{path}.role")
    for name, value in raw.items():
        if name in ("role", "content") or name in _LABELS or (name in _EMPTY_FIELDS and value in (None, [])):
            continue
        if name == "tool_calls" and (value in (None, []) or role == "assistant"):
            continue
        verb = "is not supported; leave it out" if name in _EMPTY_FIELDS else "is not a field of a message; remove it"
        raise InvalidRequest(f"{path}.{name} {verb}.", param=f"{path}.{name}")
    calls = read_calls(raw["tool_calls"], f"{path}.tool_calls") if raw.get("tool_calls") not in (None, []) else ()
    # A turn that is calls alone has no content, or none that is there.
    content = (
        "" if calls and raw.get("content") in (None, []) else _content(raw.get("content"), f"{path}.content", rules)
    )
    if role != "tool":
        return Message(ROLES[role], content, calls)
    labels = {label: _string(raw, label, f"{path}.{label}") for label in _LABELS if raw.get(label) is not None}
    return Message("tool", content, (), labels.get("tool_call_id"), labels.get("name"))


def _content(raw: object, path: str, rules: MediaRules) -> str | list[Part]:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        what = "is missing or null" if raw is None else f"is {_kind(raw)}"
        raise InvalidRequest(f"{path} {what}; it must be text or a list of parts.", param=path)
    if not raw:
        raise InvalidRequest(f"{path} is an empty list; send text or at least one part.", param=path)
    return [_part(item, f"{path}[{place}]", rules) for place, item in enumerate(raw)]


def _part(raw: object, path: str, rules: MediaRules) -> Part:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{path} is {_kind(raw)}, but must be an object with a type.", param=path)
    kind = raw.get("type")
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        what = "has no type" if kind is None else f"has the type {kind!r}"
        raise InvalidRequest(f"{path} {what}; the types served are {', '.join(_READERS)}.", param=f"{path}.type")
    _refuse_others(raw, {"type", str(kind)}, path)
    return reader(raw, path, rules)


def _text(raw: Mapping[str, Any], path: str, _rules: MediaRules) -> Part:
    text = raw.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path}.text is {_kind(text)}, but must be text.", param=f"{path}.text")
    return TextPart(text)


def _input_audio(raw: Mapping[str, Any], path: str, rules: MediaRules) -> Part:
    _require_modality("audio", f"{path}.input_audio", rules)
    # The format is what the client believes; the bytes decide.
    fields = _object(raw, "input_audio", path, {"data", "format"})
    param = f"{path}.input_audio.data"
    return AudioPart(decode_base64(_string(fields, "data", param), param=param, max_bytes=rules.max_bytes), param)


def _audio_url(raw: Mapping[str, Any], path: str, rules: MediaRules) -> Part:
    _require_modality("audio", f"{path}.audio_url", rules)
    source, param = _file(raw, "audio_url", path, rules)
    return AudioPart(source, param)


def _image_url(raw: Mapping[str, Any], path: str, rules: MediaRules) -> Part:
    _require_modality("image", f"{path}.image_url", rules)
    source, param = _file(raw, "image_url", path, rules)
    return ImagePart(source, param)


_READERS: Mapping[str, Callable[[Mapping[str, Any], str, MediaRules], Part]] = {
    "text": _text,
    "input_audio": _input_audio,
    "audio_url": _audio_url,
    "image_url": _image_url,
}


def _file(raw: Mapping[str, Any], kind: str, path: str, rules: MediaRules) -> tuple[bytes, str]:
    param = f"{path}.{kind}.url"
    url = _string(_object(raw, kind, path, {"url", "detail"}), "url", param)
    if url[:5].lower() == "data:":
        return decode_base64(url, param=param, max_bytes=rules.max_bytes), param
    rules.urls.check(url, param)
    if url not in rules.fetched:
        rules.wanted.setdefault(url, param)
    return rules.fetched.get(url, b""), param


def _object(raw: Mapping[str, Any], name: str, path: str, allowed: Collection[str]) -> Mapping[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}.{name} is {_kind(value)}, but must be an object.", param=f"{path}.{name}")
    _refuse_others(value, allowed, f"{path}.{name}")
    return value


def _string(fields: Mapping[str, Any], name: str, param: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} is {_kind(value)}, but must be text.", param=param)
    return value


def _require_modality(modality: str, param: str, rules: MediaRules) -> None:
    if modality not in rules.modalities:
        taken = ", ".join(["text", *sorted(rules.modalities)])
        raise MediaError(f"{param} holds {modality}, but this model takes only {taken}.", param=param)


def _refuse_others(raw: Mapping[str, Any], allowed: Collection[str], path: str) -> None:
    for name, value in raw.items():
        if name not in allowed and value is not None:
            raise InvalidRequest(f"{path}.{name} is not a field of this part; remove it.", param=f"{path}.{name}")


def _kind(value: object) -> str:
    if value is None:
        return "missing or null"
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
