"""Multipart forms: every field is known, and each value has its type. Called by `transcriptions` and `adapters`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from starlette.datastructures import FormData, UploadFile

from engine.errors import InvalidRequest

Number = TypeVar("Number", int, float)

_SWITCH = {"true": True, "1": True, "false": False, "0": False, "": False}


class Form:
    """The fields of a form, each readable once by type; values are text or files."""

    def __init__(self, data: FormData) -> None:
        self._items = data.multi_items()

    def check_fields(self, known: Collection[str], unserved: Mapping[str, str]) -> None:
        """Raise `InvalidRequest` for a field that is not known, or that is known but not served, with why."""
        for name, value in self._items:
            if name in unserved and value != "":
                raise InvalidRequest(
                    f"{name} is not supported: {unserved[name]}.", param=name, code="unsupported_parameter"
                )
            if name not in known and name not in unserved:
                raise InvalidRequest(
                    f"{name} is not a field of this form; remove it.", param=name, code="unknown_parameter"
                )

    def text(self, name: str) -> str | None:
        """A field's last value, None where it is absent; raises `InvalidRequest` for a file."""
        values = [value for key, value in self._items if key == name]
        if not values:
            return None
        if not isinstance(values[-1], str):
            raise InvalidRequest(f"{name} is a file, but must be text.", param=name)
        return values[-1]

    def texts(self, name: str) -> list[str]:
        """All values of a field that may be there several times, empty ones left out; files count as their names."""
        values = [value if isinstance(value, str) else str(value.filename) for key, value in self._items if key == name]
        return [value for value in values if value]

    def required_text(self, name: str) -> str:
        """A field that must be there and not empty."""
        value = self.text(name)
        if not value:
            raise InvalidRequest(f"{name} is missing; it is required.", param=name, code="missing_required_parameter")
        return value

    def number(self, name: str) -> float | None:
        """A field as a number."""
        return self._parsed(name, float, "a number")

    def integer(self, name: str) -> int | None:
        """A field as a whole number."""
        return self._parsed(name, int, "a whole number")

    def switch(self, name: str) -> bool:
        """A field that is true or false; false where it is absent."""
        value = (self.text(name) or "").strip().lower()
        if value not in _SWITCH:
            raise InvalidRequest(f"{name} is {value[:60]!r}, but must be true or false.", param=name)
        return _SWITCH[value]

    def files(self, names: Collection[str] | None = None) -> list[UploadFile]:
        """The files, of the fields `names` or of all."""
        return [
            value for name, value in self._items if isinstance(value, UploadFile) and (names is None or name in names)
        ]

    def _parsed(self, name: str, parse: Callable[[str], Number], what: str) -> Number | None:
        value = self.text(name)
        if value is None or value == "":
            return None
        try:
            return parse(value)
        except ValueError:
            raise InvalidRequest(f"{name} is {value[:60]!r}, but must be {what}.", param=name) from None
