"""What an answer's text turns out to be, piece by piece. Made by `parser`, read by `api/calls`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call of a function; its arguments follow. Calls come one after another."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of the JSON text of the arguments of the call that began last."""

    text: str


@dataclass(frozen=True)
class CallBroken:
    """The call that began last is none: its arguments are no JSON. All that it was written with follows as `Text`."""


Event = Text | CallBegun | Arguments | CallBroken
