"""One choice of a chat answer: its text and its calls of functions, streamed or whole, as the OpenAI API shows them.

Called by `chat`. Where a request gave no tools, all is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.request import FinishReason
from engine.tools.events import Arguments, CallBegun, CallBroken, Event, Text
from engine.tools.parser import CallParser


@dataclass
class _Call:
    """A call so far."""

    call_id: str
    name: str
    arguments: str = ""
    is_broken: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The call as the API shows it."""
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class ChoiceReader:
    """Turns a choice's text into what its deltas or its message hold; one for each choice.

    Args:
        parser: the answer's, None where no tools were given.
    """

    parser: CallParser | None
    _texts: list[str] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)

    def push(self, text: str) -> list[dict[str, Any]]:
        """Take more text; return the deltas that it gives."""
        if self.parser is None:
            self._texts.append(text)
            return [{"content": text}] if text else []
        return self._deltas(self.parser.push(text))

    def finish(self, reason: FinishReason | None) -> list[dict[str, Any]]:
        """The answer is over; return the last deltas."""
        return [] if self.parser is None else self._deltas(self.parser.finish(is_cut=reason == "length"))

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Why the answer is over, in the API's words: an answer that stopped with calls says so."""
        return "tool_calls" if reason == "stop" and self._whole_calls else reason

    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        content, calls = "".join(self._texts), [call.to_dict() for call in self._whole_calls]
        message = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    @property
    def _whole_calls(self) -> list[_Call]:
        return [call for call in self._calls if not call.is_broken]

    def _deltas(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        return [delta for event in events if (delta := self._delta(event))]

    def _delta(self, event: Event) -> dict[str, Any]:
        assert self.parser is not None
        index = len(self._calls) - 1
        if isinstance(event, Text):
            self._texts.append(event.text)
            return {"content": event.text}
        if isinstance(event, CallBegun):
            call = _Call(self.parser.tool_format.new_call_id(), event.name)
            self._calls.append(call)
            return {"tool_calls": [{"index": index + 1, **call.to_dict()}]}
        if isinstance(event, CallBroken):
            self._calls[-1].is_broken = True
            return {}
        assert isinstance(event, Arguments)
        self._calls[-1].arguments += event.text
        return {"tool_calls": [{"index": index, "function": {"arguments": event.text}}]}
