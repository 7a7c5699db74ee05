"""Reads one call: an object with a name and arguments, in any order, or arguments whose name is known. Used by `parser`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from engine.tools.events import Arguments, CallBegun, Event
from engine.tools.json_value import SPACE, JsonValue, Step

_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id")


class CallItem:
    """One call under way.

    Args:
        names: functions that may be called.
        emit: takes the events as they become certain.
        takes_any_key: whether the object may have keys that calls do not have.

    Attributes:
        has_begun: whether it has been announced.
        is_whole: whether name and arguments are there, whatever is still missing around them.
        is_over: whether its object is closed too.
    """

    def __init__(self, names: Collection[str], emit: Callable[[Event], None], *, takes_any_key: bool) -> None:
        self.has_begun = False
        self.is_whole = False
        self.is_over = False
        self._names = names
        self._emit = emit
        self._takes_any_key = takes_any_key
        self._name: str | None = None
        self._arguments: str | None = None  # held back until the name is known
        self._key = ""
        self._place = self._before_key
        self._value = JsonValue()
        self._text = ""
        self._is_streaming = False

    @property
    def has_name(self) -> bool:
        """Whether it is known which function is called."""
        return self._name is not None

    def begin_named(self, name: str) -> bool:
        """The arguments of a function follow, through `feed_arguments`; False where it may not be called."""
        if not self._take_name(name):
            return False
        self._stream_arguments()
        return True

    def feed_arguments(self, character: str) -> Step:
        """Take the next character of the arguments after `begin_named`."""
        step = self._feed_value(character)
        if step is Step.LAST:
            self._end_value()
        return step

    def feed(self, character: str) -> bool:
        """Take the next character after the object's `{`; False where it cannot be a call."""
        return self._place(character)

    def _take_name(self, name: object) -> bool:
        if not isinstance(name, str) or name not in self._names or self._name is not None:
            return False
        self._name = name
        return True

    def _stream_arguments(self) -> None:
        self._value, self._text = JsonValue(), ""
        self._announce()
        self._is_streaming = True

    def _announce(self) -> None:
        assert self._name is not None
        self.has_begun = True
        self._emit(CallBegun(self._name))

    def _feed_value(self, character: str) -> Step:
        step = self._value.feed(character)
        if step in (Step.INSIDE, Step.LAST):
            self._text += character
            if self._is_streaming:
                self._emit(Arguments(character))
        return step

    def _end_value(self) -> bool:
        """A value has ended; False where it is not what its key asks for."""
        if self._is_streaming:
            self._is_streaming, self.is_whole = False, True
            return True
        if self._key in _ARGUMENT_KEYS:
            return self._take_arguments()
        return self._key not in _NAME_KEYS or (self._take_name(_loaded(self._text)) and self._catch_up())

    def _take_arguments(self) -> bool:
        text, value = self._text, _loaded(self._text)
        if isinstance(value, str):  # JSON inside a string
            text, value = value.strip(), _loaded(value)
        elif self._text == "null":
            text, value = "{}", {}
        if not isinstance(value, dict) or self._arguments is not None or self.has_begun:
            return False
        self._arguments = text
        return self._name is None or self._catch_up()

    def _catch_up(self) -> bool:
        """Pass on arguments that were held back, now that the name is known."""
        if self._arguments is not None and not self.has_begun:
            self._announce()
            self._emit(Arguments(self._arguments))
            self.is_whole = True
        return True

    # Places in the object

    def _before_key(self, character: str) -> bool:
        if character in SPACE:
            return True
        if character != '"':
            return False
        self._value, self._text = JsonValue(), ""
        self._place = self._in_key
        return self._in_key(character)

    def _in_key(self, character: str) -> bool:
        step = self._feed_value(character)
        if step is Step.LAST:
            self._key = str(_loaded(self._text))
            self._place = self._before_colon
            return self._takes_any_key or self._key in (*_NAME_KEYS, *_ARGUMENT_KEYS, *_OTHER_KEYS)
        return step is Step.INSIDE

    def _before_colon(self, character: str) -> bool:
        if character == ":":
            self._value, self._text = JsonValue(), ""
            self._place = self._before_value
        return character == ":" or character in SPACE

    def _before_value(self, character: str) -> bool:
        if character in SPACE:
            return True
        if character == "{" and self._key in _ARGUMENT_KEYS and self._name is not None:
            if self.has_begun:
                return False
            self._stream_arguments()
        self._place = self._in_value
        return self._in_value(character)

    def _in_value(self, character: str) -> bool:
        step = self._feed_value(character)
        if step is Step.INSIDE:
            return True
        if step is Step.WRONG or not self._end_value():
            return False
        self._place = self._after_value
        return step is Step.LAST or self._after_value(character)

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._place = self._before_key
        elif character == "}":
            return self._end()
        return character == "," or character in SPACE

    def _end(self) -> bool:
        self.is_over = True
        if not self.is_whole and self._name is not None:
            self._arguments = "{}"
            self._catch_up()
        return self.is_whole


def _loaded(text: str) -> object:
    """A value of JSON text; None where it is none, or nested too deeply."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value
