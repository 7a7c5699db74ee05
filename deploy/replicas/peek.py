"""Which adapter a request will be answered by, as far as its body tells; where it is sent follows from it, nothing else.

The replica decides by the routing rule; a wrong guess here costs a load there. Bodies may be large: forms are read piece by
piece. Knows nothing of Ray and of replicas. Called by `ingress`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from python_multipart.multipart import MultipartParser, parse_options_header

from engine.errors import AppError
from engine.routing import RESERVED_NAMES, choose_route

# Longer values are no names.
MAX_NAME_BYTES = 1024
_FIELDS = (b"model", b"lora")
_MODALITY_OF = {"input_audio": "audio", "audio_url": "audio", "image_url": "image"}


@dataclass(frozen=True)
class ModelNames:
    """What names mean on the replicas: the base model's names, and the adapters that answer a modality by themselves."""

    base: Collection[str] = ()
    defaults: Mapping[str, str] = field(default_factory=dict)

    def adapter(self, model: object, lora: object, modalities: Collection[str]) -> str | None:
        """The routing rule, applied to what was read."""
        try:
            return choose_route(
                model=_name(model),
                lora=_name(lora),
                modalities=modalities,
                base_names=self.base,
                defaults=self.defaults,
                is_adapter=lambda name: name not in RESERVED_NAMES,
            ).name
        except AppError:
            return None


def json_adapter(body: bytes, names: ModelNames) -> str | None:
    """The adapter that a JSON body asks for; None where that is the base model, or the body is not understood."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict):
        return None
    return names.adapter(value.get("model"), value.get("lora"), set(_modalities(value.get("messages"))))


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= MAX_NAME_BYTES else None


def _modalities(messages: object) -> Iterator[str]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in _MODALITY_OF:
                yield _MODALITY_OF[part["type"]]


class FormPeek:
    """Reads `model` and `lora` out of a multipart form that passes by; files are not kept."""

    def __init__(self, content_type: str) -> None:
        self._values: dict[bytes, bytearray] = {}
        self._header, self._value = bytearray(), bytearray()
        self._field: bytes | None = None
        kind, options = parse_options_header(content_type)
        callbacks: Any = {
            "on_part_begin": self._on_part_begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._on_header_end,
            "on_part_data": self._on_part_data,
        }
        boundary = options.get(b"boundary")
        is_form = kind == b"multipart/form-data"
        self._parser: MultipartParser | None = None
        if is_form and boundary:
            with contextlib.suppress(ValueError):  # Too long to be one: the replica says so.
                self._parser = MultipartParser(boundary, callbacks)

    @property
    def is_form(self) -> bool:
        """Whether the body is a form, as far as it has been read."""
        return self._parser is not None

    def feed(self, piece: bytes) -> None:
        """The next piece of the body."""
        if self._parser is not None:
            try:
                self._parser.write(piece)
            except ValueError:  # Not a form: the replica says so.
                self._parser = None

    def adapter(self, names: ModelNames) -> str | None:
        """The adapter that the form asks for; a form here is a recording to transcribe."""
        model, lora = (self._text(name) for name in _FIELDS)
        return names.adapter(model, lora, {"audio"})

    def _text(self, name: bytes) -> str | None:
        return self._values[name].decode("utf-8", "replace") if name in self._values else None

    def _on_part_begin(self) -> None:
        self._field = None

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            name = options.get(b"name")
            if name in _FIELDS and b"filename" not in options:
                self._field = name
                self._values[name] = bytearray()
        self._header.clear()
        self._value.clear()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None and len(self._values[self._field]) < MAX_NAME_BYTES:
            self._values[self._field].extend(data[start:end])
