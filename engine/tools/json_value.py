"""Reads one JSON value character by character and says where it ends or where it stops being JSON (RFC 8259).

Keeps nothing but what it needs to go on: depth costs a list, not recursion. Used by `parser`.
"""

from __future__ import annotations

import enum
import re

SPACE = " \t\r\n"
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SCALAR_CHARACTERS = frozenset("truefalsn0123456789+-.eE")


class Step(enum.Enum):
    """What a character did to a value."""

    INSIDE = "inside"
    LAST = "last"
    """The value ends with this character."""
    BEYOND = "beyond"
    """The value ended before this character: a number or a word, which only their neighbour ends."""
    WRONG = "wrong"


class _Wants(enum.Enum):
    VALUE = "a value"
    VALUE_OR_END = "a value or ]"
    KEY = "a key"
    KEY_OR_END = "a key or }"
    COLON = "a colon"
    COMMA_OR_END = "a comma or the end"


class JsonValue:
    """One value; white space before it belongs to it."""

    def __init__(self) -> None:
        self._open: list[str] = []  # the brackets that will close
        self._wants = _Wants.VALUE
        self._scalar = ""
        self._is_string = False
        self._is_key = False
        self._escape = 0  # characters of an escape that are still to come; -1 for the one that says which

    def feed(self, character: str) -> Step:
        """Take the next character; not to be called after the value's end."""
        if self._is_string:
            return self._in_string(character)
        if self._scalar:
            if character in _SCALAR_CHARACTERS:
                self._scalar += character
                return Step.INSIDE if len(self._scalar) < 400 else Step.WRONG
            if _SCALAR.fullmatch(self._scalar) is None:
                return Step.WRONG
            self._scalar = ""
            if not self._open:
                return Step.BEYOND
            self._wants = _Wants.COMMA_OR_END
        if character in SPACE:
            return Step.INSIDE
        return self._between(character)

    def _in_string(self, character: str) -> Step:
        if self._escape == -1:
            self._escape = 4 if character == "u" else 0
            return Step.INSIDE if character == "u" or character in _ESCAPES else Step.WRONG
        if self._escape:
            self._escape -= 1
            return Step.INSIDE if character in _HEX else Step.WRONG
        if character == "\\":
            self._escape = -1
        elif character == '"':
            self._is_string = False
            if not self._is_key:
                return self._end_value()
            self._wants = _Wants.COLON
        elif character < " ":
            return Step.WRONG
        return Step.INSIDE

    def _between(self, character: str) -> Step:
        wants = self._wants
        if wants in (_Wants.KEY, _Wants.KEY_OR_END) and character == '"':
            self._is_string = self._is_key = True
            return Step.INSIDE
        if wants is _Wants.COLON and character == ":":
            self._wants = _Wants.VALUE
            return Step.INSIDE
        if wants is _Wants.COMMA_OR_END and character == ",":
            self._wants = _Wants.KEY if self._open[-1] == "}" else _Wants.VALUE
            return Step.INSIDE
        may_end = wants in (_Wants.COMMA_OR_END, _Wants.KEY_OR_END, _Wants.VALUE_OR_END)
        if may_end and character == self._open[-1]:
            self._open.pop()
            return self._end_value()
        if wants in (_Wants.VALUE, _Wants.VALUE_OR_END):
            return self._begin_value(character)
        return Step.WRONG

    def _begin_value(self, character: str) -> Step:
        if character == "{":
            self._open.append("}")
            self._wants = _Wants.KEY_OR_END
        elif character == "[":
            self._open.append("]")
            self._wants = _Wants.VALUE_OR_END
        elif character == '"':
            self._is_string, self._is_key = True, False
        elif character in "tfn-0123456789":
            self._scalar = character
        else:
            return Step.WRONG
        return Step.INSIDE

    def _end_value(self) -> Step:
        self._wants = _Wants.COMMA_OR_END
        return Step.INSIDE if self._open else Step.LAST
