"""Reads calls out of an answer's text as it comes, however it is cut into pieces.

What is no call, or begins as one and is none in the end, comes out as text; nothing of a mark comes out before it is certain
that it is text. Knows how calls are written from a `ToolFormat` alone. One for each answer, made by `engine/intake` and fed
by `api/calls`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from engine.detokenizer import StopMatcher
from engine.tools.events import Arguments, CallBroken, Event, Text
from engine.tools.format import ToolFormat
from engine.tools.item import CallItem
from engine.tools.json_value import SPACE, Step

_NAMED_HEAD = re.compile(r"([A-Za-z0-9_-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]*\s*)?(?:\[ARGS\])?\s*")
_HALF_HEAD = re.compile(r"[A-Za-z0-9_-]{1,64}\s*(?:\[[A-Za-z_\[\]0-9]*\s*)?")
_MAX_HEAD = 200


class CallParser:
    """A state machine over an answer's characters.

    Args:
        tool_format: how the model writes calls.
        names: functions that may be called; a call of another is text.
        is_parallel: whether calls after the first count; else they are dropped.
        is_guided: whether a grammar watches over the answer, which knows the first of the format's marks alone.
    """

    def __init__(
        self, tool_format: ToolFormat, names: Collection[str], *, is_parallel: bool = True, is_guided: bool = False
    ) -> None:
        self.tool_format = tool_format
        self._names = names
        self._is_parallel = is_parallel
        self._is_guided = is_guided
        self._is_bare = not tool_format.starts  # an object at the answer's beginning is a call
        bare = (tool_format.optional_start,) if tool_format.optional_start else ()
        self._starts = bare or (tool_format.starts[:1] if is_guided else tool_format.starts)
        self._first_characters = {start[0] for start in self._starts}
        self._state: Callable[[str], None] = self._in_text
        self._events: list[Event] = []
        self._matcher = StopMatcher(self._starts)
        self._num_matching = 0  # characters that the matcher holds back
        self._held = ""  # white space that is dropped where a call follows
        self._has_text = False
        self._raw = ""  # all since the mark, or since the last whole call
        self._head = ""  # a name before its arguments
        self._is_list = False
        self._ending = ""
        self._item = self._new_item()

    def push(self, text: str) -> list[Event]:
        """Take more of the answer; return what is certain now."""
        if self._state == self._in_text and self._is_plain(text):
            self._add_text(text)
        else:
            for character in text:
                self._state(character)
        return self._take()

    def finish(self, *, is_cut: bool) -> list[Event]:
        """The answer is over; `is_cut` where its length was, so that a call under way is half a call and no text.

        Of half a call nothing is shown before its arguments begin.
        """
        if self._state == self._in_text:
            self._add_text(self._matcher.flush())
        elif self._state == self._in_ending:
            self._add_text(self._ending)
        elif self._is_open and not (is_cut and self._is_likely):
            self._give_back()
        self._add(Text(self._held))
        self._held = ""
        return self._take()

    @property
    def _is_open(self) -> bool:
        """Whether something that should become a call is under way."""
        has_begun = self._raw.strip() not in ("", *self.tool_format.ends)
        return self._state != self._dropping and not self._item.is_whole and has_begun

    @property
    def _is_likely(self) -> bool:
        """Whether what is under way is half a call rather than text that looks like one."""
        if self._state == self._in_head:
            return _HALF_HEAD.fullmatch(self._head) is not None
        return not self._is_bare or self._is_guided or self._item.has_name

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _add(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if event == Text(""):
            return
        if isinstance(event, Text) and isinstance(last, Text):
            self._events[-1] = Text(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            self._events[-1] = Arguments(last.text + event.text)
        else:
            self._events.append(event)

    # Text

    def _is_plain(self, text: str) -> bool:
        """Whether nothing in it can begin a call."""
        may_be_object = self._is_bare and not self._has_text and "{" in text
        return not self._num_matching and not may_be_object and self._first_characters.isdisjoint(text)

    def _in_text(self, character: str) -> None:
        if character == "{" and self._is_bare and not self._has_text and not self._num_matching:
            self._begin(self._held)
            self._state(character)
            return
        text, start = self._matcher.push(character)
        self._num_matching += 1 - len(text)
        self._add_text(text)
        if start is not None:
            self._begin(self._held + start)

    def _add_text(self, text: str) -> None:
        """Text goes out up to the white space at its end."""
        kept = text.rstrip(SPACE)
        if not kept:
            self._held += text
            return
        self._has_text = True
        self._add(Text(self._held + kept))
        self._held = text[len(kept) :]

    def _to_text(self) -> None:
        self._matcher, self._num_matching = StopMatcher(self._starts), 0
        self._state = self._in_text

    def _give_back(self, num_unread: int = 0) -> None:
        """What began as a call is text; its last `num_unread` characters have not been looked at as text."""
        if self._item.has_begun:
            self._add(CallBroken())
        end = len(self._raw) - num_unread
        given, unread, self._raw = self._raw[:end], self._raw[end:], ""
        self._to_text()
        self._add_text(given)
        for character in unread:
            self._state(character)

    # Calls

    def _new_item(self) -> CallItem:
        return CallItem(self._names, self._add, takes_any_key=not self._is_bare)

    def _begin(self, raw: str) -> None:
        self._held = ""
        self._raw = raw
        self._is_list = False
        self._item = self._new_item()
        self._state = self._at_start

    def _at_start(self, character: str) -> None:
        """After the mark: a list, an object, or a name."""
        self._raw += character
        if character in SPACE:
            return
        if character == "[" and not self._is_bare and not self._is_list:
            self._is_list = True
        elif character == "{":
            self._state = self._in_object
        elif self.tool_format.reads_names and not self._is_list and (character.isalnum() or character in "_-"):
            self._head = character
            self._state = self._in_head
        else:
            self._give_back(1)

    def _in_head(self, character: str) -> None:
        """A function's name before its arguments."""
        if character != "{":
            self._raw += character
            self._head += character
            if len(self._head) > _MAX_HEAD:
                self._give_back()
            return
        match = _NAMED_HEAD.fullmatch(self._head)
        if match is None or not self._item.begin_named(match[1]):
            self._raw += character
            self._give_back(1)
            return
        self._state = self._in_named_arguments
        self._state(character)

    def _in_named_arguments(self, character: str) -> None:
        self._raw += character
        step = self._item.feed_arguments(character)
        if step is Step.WRONG:
            self._give_back(1)
        elif step is Step.LAST:
            self._end_item()

    def _in_object(self, character: str) -> None:
        self._raw += character
        if self._item.feed(character):
            if self._item.is_over:
                self._end_item()
        elif self._item.is_whole:
            # The arguments are there; what should have closed the object is another mark, or text.
            self._end_item()
            self._state(character)
        else:
            self._give_back(1)

    def _end_item(self) -> None:
        self._raw = ""
        if self._is_parallel:
            self._state = self._between_items if self._is_list else self._after_calls
        else:
            self._state = self._dropping

    def _between_items(self, character: str) -> None:
        if character in SPACE:
            return
        if character == ",":
            self._item = self._new_item()
            self._state = self._at_start
            return
        self._is_list = False
        self._state = self._after_calls
        if character != "]":
            self._state(character)

    def _after_calls(self, character: str) -> None:
        """After the last item: marks that end calls, then text."""
        if character in SPACE:
            return
        self._ending = ""
        self._state = self._in_ending
        self._state(character)

    def _in_ending(self, character: str) -> None:
        self._ending += character
        ends = self.tool_format.ends
        if self._ending in ends:
            self._state = self._after_calls
            if self._is_bare:  # objects follow one another
                self._begin(self._ending)
        elif not any(end.startswith(self._ending) for end in ends):
            self._to_text()
            for each in self._ending:
                self._state(each)

    def _dropping(self, _character: str) -> None:
        """After the one call that counts."""
