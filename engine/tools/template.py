"""What a chat template does with tools: whether and where it takes them, and how it writes calls.

Found out by rendering a conversation with a made-up function and reading the call back, so that any template of a known
family is served, whatever the model is called; what a template writes no call for is told by its text and vocabulary. Called
by `engine/prompt`, once for each template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.tools.events import Arguments, CallBegun
from engine.tools.format import ToolFormat
from engine.tools.granite import GRANITE
from engine.tools.hermes import HERMES
from engine.tools.llama import LLAMA
from engine.tools.mistral import MISTRAL, MISTRAL_NAMED
from engine.tools.parser import CallParser
from engine.tools.phi import PHI, PHI_FUNCTOOLS
from engine.tools.spec import Function, ToolCall

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, bool], str]
"""The text of messages, with tools or None, and with or without the assistant's turn opened; raises what it likes."""

# Those with more marks first: their calls would be read as the others' too.
FORMATS = (HERMES, MISTRAL_NAMED, MISTRAL, PHI, GRANITE, PHI_FUNCTOOLS, LLAMA)
_PARAMETERS = {
    "type": "object",
    "properties": {"key": {"type": "string", "description": "A key."}},
    "required": ["key"],
}
_PROBE = Function(
    "probe_of_tools", "Tries the template.", {"type": "object", "properties": {"key": {"type": "string"}}}
)
_ARGUMENTS = {"key": "probe value"}
_PROBE_ID = "probe0000"


@dataclass(frozen=True)
class TemplateTools:
    """How one template takes tools.

    Attributes:
        place: given to the template as `tools`, or as text in the system message's `tools`.
        tool_format: how the model writes calls; None where it is none that is known.
        writes_calls: whether it writes the calls of earlier turns; else they are put into the turn's text.
        takes_text_arguments: whether it wants arguments of earlier calls as JSON text rather than as an object.
    """

    place: Literal["argument", "system"]
    tool_format: ToolFormat | None
    writes_calls: bool = False
    takes_text_arguments: bool = False

    def call(self, call: ToolCall) -> dict[str, Any]:
        """An earlier call as the template takes it."""
        arguments = call.arguments if self.takes_text_arguments else json.loads(call.arguments)
        call_id = self.template_id(call.call_id)
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def template_id(self, call_id: str) -> str:
        """A call's id as the template takes it."""
        return call_id if self.tool_format is None else self.tool_format.template_id(call_id)

    def place_tools(
        self, messages: list[dict[str, Any]], definitions: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Messages and `tools` for the template; a definition is the inner object of an OpenAI tool."""
        if self.place == "argument":
            return messages, [{"type": "function", "function": definition} for definition in definitions]
        text = json.dumps(list(definitions), ensure_ascii=False)
        if messages and messages[0]["role"] == "system":
            return [{**messages[0], "tools": text}, *messages[1:]], None
        return [{"role": "system", "content": "", "tools": text}, *messages], None


def probe_tools(
    render: Render, source: str, vocabulary: Collection[str], as_content: Callable[[str], Any]
) -> TemplateTools | None:
    """How a template takes tools, None where it does not.

    Args:
        render: renders with the template.
        source: the template's text.
        vocabulary: the tokenizer's tokens.
        as_content: a message's content as the template wants it.
    """
    place = _find_place(render, as_content)
    if place is None:
        return None
    fallback = _told_by_text(source, vocabulary)
    for takes_text in (False, True):
        tools = TemplateTools(place, fallback, True, takes_text)
        written = _written_call(render, tools, as_content)
        tool_format = next((each for each in FORMATS if _reads(each, written)), None)
        if tool_format is not None:
            # An object without marks may be short for a format that the template's instructions show in full.
            is_short = not tool_format.starts and fallback is not None
            return TemplateTools(place, fallback if is_short else _known(tool_format, source), True, takes_text)
    return TemplateTools(place, fallback)


def _find_place(render: Render, as_content: Callable[[str], Any]) -> Literal["argument", "system"] | None:
    user = {"role": "user", "content": as_content("hi")}
    places: tuple[Literal["argument", "system"], ...] = ("argument", "system")
    for place in places:
        messages, tools = TemplateTools(place, None).place_tools([user], [_PROBE.definition])
        messages = [{**each, "content": as_content("")} if each["content"] == "" else each for each in messages]
        if _PROBE.name in _tried(render, messages, tools, True):
            return place
    return None


def _written_call(render: Render, tools: TemplateTools, as_content: Callable[[str], Any]) -> str:
    """What the template writes for an assistant's turn that is a call and nothing else."""
    asked = [{"role": "user", "content": as_content("hi")}]
    call = tools.call(ToolCall(_PROBE_ID, _PROBE.name, json.dumps(_ARGUMENTS)))
    called = [*asked, {"role": "assistant", "content": as_content(""), "tool_calls": [call]}]
    opened = _tried(render, asked, None, True)
    whole = _tried(render, called, None, False)
    while not whole.startswith(opened):
        opened = opened[:-1]
    return whole[len(opened) :]


def _tried(render: Render, messages: Any, tools: Any, opens_answer: bool) -> str:
    try:
        return render(messages, tools, opens_answer)
    except Exception:  # noqa: BLE001 - templates are programs that ship with models: they raise what they like
        return ""


def _reads(tool_format: ToolFormat, written: str) -> bool:
    """Whether a text holds the probe's call as the format has it."""
    marks = [mark for mark in tool_format.marks if mark in tool_format.opening + tool_format.arguments_mark]
    if not all(mark in written for mark in marks) or not all(end in written for end in tool_format.ends if end != ";"):
        return False
    parser = CallParser(tool_format, {_PROBE.name})
    events = [*parser.push(written), *parser.finish(is_cut=False)]
    begun = [event for event in events if isinstance(event, CallBegun)]
    arguments = "".join(event.text for event in events if isinstance(event, Arguments))
    return len(begun) == 1 and json.loads(arguments) == _ARGUMENTS


def _known(tool_format: ToolFormat, source: str) -> ToolFormat | None:
    """The format, unless the template asks for another that only looks like it."""
    return None if tool_format is HERMES and "<function=" in source else tool_format


def _told_by_text(source: str, vocabulary: Collection[str]) -> ToolFormat | None:
    """The format of a template that writes no calls, by what it tells the model and by the tokenizer's marks."""
    signs: tuple[tuple[ToolFormat | None, bool], ...] = (
        (None, "<function=" in source or "<start_function_call>" in source),
        (HERMES, "</tool_call>" in source),
        (MISTRAL_NAMED, "[ARGS]" in source),
        (MISTRAL, "[TOOL_CALLS]" in source),
        (PHI_FUNCTOOLS, "functools" in source),
        (PHI, "<|/tool_call|>" in vocabulary),
        (GRANITE, "<|tool_call|>" in source or "<|tool_call|>" in vocabulary or "<tool_call>" in source),
        (MISTRAL_NAMED, "[ARGS]" in vocabulary),
        (MISTRAL, "[TOOL_CALLS]" in vocabulary),
        (LLAMA, "<|python_tag|>" in source or "ipython" in source),
    )
    return next((tool_format for tool_format, is_there in signs if is_there), None)
