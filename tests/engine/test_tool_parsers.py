"""Calls are read back as model families write them, however the text is cut; what is no call stays text."""

from __future__ import annotations

import json

import pytest

from engine.tools.events import Arguments, CallBegun, CallBroken, Event, Text
from engine.tools.format import ToolFormat
from engine.tools.granite import GRANITE
from engine.tools.hermes import HERMES
from engine.tools.llama import LLAMA
from engine.tools.mistral import MISTRAL, MISTRAL_NAMED
from engine.tools.parser import CallParser
from engine.tools.phi import PHI, PHI_FUNCTOOLS
from engine.tools.spec import ToolCall
from engine.tools.template import FORMATS

NAMES = {"get_weather", "add-2", "now"}
PARIS = ("get_weather", '{"city": "Paris"}')
SUM = ("add-2", '{"a": 1, "b": [2.5e-3, {"c": null}]}')
Calls = list[tuple[str, str]]


def read(parser: CallParser, pieces: list[str], *, is_cut: bool = False) -> tuple[str, Calls, list[str]]:
    """Text, whole calls, and the JSON of calls that were broken off."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.finish(is_cut=is_cut)
    text, calls, broken = "", list[tuple[str, str]](), list[str]()
    for event in events:
        if isinstance(event, Text):
            text += event.text
        elif isinstance(event, CallBegun):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            name, arguments = calls.pop()
            calls.append((name, arguments + event.text))
        else:
            assert isinstance(event, CallBroken)
            broken.append(calls.pop()[1])
    return text, calls, broken


def read_all_ways(
    tool_format: ToolFormat, answer: str, *, is_cut: bool = False, is_parallel: bool = True
) -> tuple[str, Calls, list[str]]:
    """What an answer holds; asserts that it is the same in one piece, in characters, and cut in two anywhere."""

    def parse(pieces: list[str]) -> tuple[str, Calls, list[str]]:
        return read(CallParser(tool_format, NAMES, is_parallel=is_parallel), pieces, is_cut=is_cut)

    whole = parse([answer])
    assert parse(list(answer)) == whole
    for place in range(len(answer)):
        assert parse([answer[:place], answer[place:]]) == whole, place
    return whole


@pytest.mark.parametrize(
    ("tool_format", "answer", "text", "calls"),
    [
        # Qwen 2.5, Hermes 2 Pro
        (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
        (
            HERMES,
            'I will look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add-2", "arguments": {"a": 1, "b": [2.5e-3, {"c": null}]}}\n</tool_call>',
            "I will look.",
            [PARIS, SUM],
        ),
        # arguments first, as Hermes' own examples have it
        (HERMES, '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>\n', "", [PARIS]),
        # Qwen 3 thinks aloud; an answer after the call
        (
            HERMES,
            '<think>\nhm, a < b\n</think>\n\n<tool_call>{"name":"now"}</tool_call> Done. ',
            "<think>\nhm, a < b\n</think>Done. ",
            [("now", "{}")],
        ),
        # a small model's slips: no closing brace, no closing mark, arguments as text, null for none
        (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call>', "", [PARIS]),
        (HERMES, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
        (HERMES, '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [PARIS]),
        (HERMES, '<tool_call>{"name": "now", "arguments": null, "why": [1]}</tool_call>', "", [("now", "{}")]),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"x": "</tool_call>"}}</tool_call>', "",
         [("now", '{"x": "</tool_call>"}')]),
        # a mark that begins anew
        (HERMES, '<tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "<tool_call>",
         [("now", "{}")]),
        # Llama 3.1 and 3.2
        (LLAMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        (LLAMA, '\n\n{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        (LLAMA, '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
        (LLAMA, '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Paris"}};', "",
         [("now", "{}"), PARIS]),
        # Mistral, list and named
        (MISTRAL, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "aB3dE6gH9"}]', "", [PARIS]),
        (MISTRAL, '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Paris"}}]',
         "", [("now", "{}"), PARIS]),
        (MISTRAL_NAMED, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [PARIS]),
        (MISTRAL_NAMED, 'Let me see.[TOOL_CALLS]get_weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "Paris"}[TOOL_CALLS]now{}',
         "Let me see.", [PARIS, ("now", "{}")]),
        # Granite 3
        (GRANITE, '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
        (GRANITE, '<tool_call>[{"arguments": {"city": "Paris"}, "name": "get_weather"}, {"name": "now", "arguments": {}}]',
         "", [PARIS, ("now", "{}")]),
        (GRANITE, '<|tool_call|>{"name": "now", "arguments": {}}', "", [("now", "{}")]),
        # Phi-4 mini
        (PHI, '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|/tool_call|>', "", [PARIS]),
        (PHI_FUNCTOOLS, 'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    ],
)  # fmt: skip
def test_real_answers_are_read_in_whatever_pieces_they_come(
    tool_format: ToolFormat, answer: str, text: str, calls: Calls
) -> None:
    assert read_all_ways(tool_format, answer) == (text, calls, [])


@pytest.mark.parametrize(
    ("tool_format", "answer", "broken"),
    [
        (HERMES, "Plain text, {with} [all] <sorts> of \"marks\" <tool and <tool_cal\n", []),
        (HERMES, "<tool_call>\nget_weather(city)\n</tool_call>", []),
        (HERMES, '<tool_call>{"name": "format_disk", "arguments": {}}</tool_call>', []),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "now", "arguments": "no JSON"}</tool_call>', []),
        (HERMES, "<tool_call>", []),
        (HERMES, '<tool_call>{"name": "now", "argu', []),
        (HERMES, "<tool_call>{'name': 'now', 'arguments': {}}</tool_call>", []),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call> so', ['{"a": tru']),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "line\nbreak"}}</tool_call>', ['{"a": "line']),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 01', ['{"a": 01']),
        (LLAMA, '{"answer": 42}', []),
        (LLAMA, 'It is {"name": "now", "parameters": {}}', []),
        (LLAMA, "<|python_tag|>brave_search.call(query=\"x\")", []),
        (LLAMA, '{"name": "Ann", "parameters": {}}', []),
        (MISTRAL, "[TOOL_CALLS] []", []),
        (MISTRAL, "[TOOL_CALLS] I cannot " + "x" * 300 + " {", []),
        (MISTRAL_NAMED, "[TOOL_CALLS]nothing[ARGS]{}", []),
        (GRANITE, "<|tool_call|>none", []),
        (PHI_FUNCTOOLS, "import functools\nfunctools.wraps", []),
    ],
)  # fmt: skip
def test_what_is_no_call_is_given_back_letter_by_letter(
    tool_format: ToolFormat, answer: str, broken: list[str]
) -> None:
    text, calls, broken_off = read_all_ways(tool_format, answer)
    assert text == answer
    assert calls == []
    assert [each.rstrip() for each in broken_off] == [each.rstrip() for each in broken]


def test_good_calls_before_a_broken_one_stay() -> None:
    answer = '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {]'
    assert read_all_ways(GRANITE, answer) == (' {"name": "now", "arguments": {]', [("now", "{}")], ["{"])


def test_no_piece_of_a_mark_is_shown_before_it_is_text() -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.push("so <tool_") == [Text("so")]
    assert parser.push("call>{") == []
    parser = CallParser(HERMES, NAMES)
    assert [event for piece in ("so <tool_", "x") for event in parser.push(piece)] == [Text("so"), Text(" <tool_x")]


def test_arguments_come_as_they_are_written() -> None:
    parser = CallParser(HERMES, NAMES)
    assert parser.push('<tool_call>\n{"name": "get_weather", "arguments": ') == []
    assert parser.push('{"ci') == [CallBegun("get_weather"), Arguments('{"ci')]
    assert parser.push('ty": "Par') == [Arguments('ty": "Par')]
    assert parser.push('is"}}') == [Arguments('is"}')]


def test_an_answer_that_was_cut_keeps_the_half_of_its_call() -> None:
    answer = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa'
    assert read_all_ways(HERMES, answer, is_cut=True) == ("", [("get_weather", '{"city": "Pa')], [])
    assert read_all_ways(HERMES, answer) == (answer, [], ['{"city": "Pa'])


@pytest.mark.parametrize(
    ("tool_format", "answer", "text"),
    [
        (HERMES, 'So.\n<tool_call>\n{"name": "get_wea', "So."),
        (HERMES, "So.\n<tool_call>", "So."),
        (HERMES, "a <", "a <"),
        (GRANITE, '<|tool_call|>[{"arguments": {"city": "Par', ""),
        (MISTRAL_NAMED, "[TOOL_CALLS]get_weather[AR", ""),
        (MISTRAL_NAMED, "[TOOL_CALLS]I would rather", "[TOOL_CALLS]I would rather"),
        (LLAMA, '{"name": "now", "param', ""),
        (LLAMA, '{"na', '{"na'),
    ],
)
def test_half_a_call_without_arguments_is_not_shown_where_the_answer_was_cut(
    tool_format: ToolFormat, answer: str, text: str
) -> None:
    assert read_all_ways(tool_format, answer, is_cut=True) == (text, [], [])


def test_without_parallel_calls_the_first_ends_the_answer() -> None:
    answer = HERMES.write([ToolCall("a", *PARIS), ToolCall("b", *SUM)]) + " and more"
    assert read_all_ways(HERMES, answer, is_parallel=False) == ("", [PARIS], [])
    assert read_all_ways(HERMES, answer) == ("and more", [PARIS, SUM], [])


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda each: each.name)
def test_what_a_format_writes_it_reads(tool_format: ToolFormat) -> None:
    calls = [("add-2", json.dumps({"text": 'a "b" \\ {[<tool_call>]} é\n'})), PARIS][: 2 if tool_format.repeats else 1]
    written = tool_format.write([ToolCall("id", *call) for call in calls])
    assert read_all_ways(tool_format, written) == ("", calls, [])


def test_ids_are_what_templates_take() -> None:
    assert len({MISTRAL.new_call_id() for _ in range(50)}) == 50
    assert all(len(each) == 9 and each.isalnum() for each in (MISTRAL.new_call_id(), MISTRAL.template_id("call_1")))
    assert MISTRAL.template_id("aB3dE6gH9") == "aB3dE6gH9"
    assert MISTRAL.template_id("call_1") == MISTRAL.template_id("call_1") != MISTRAL.template_id("call_2")
    assert HERMES.new_call_id().startswith("call_") and HERMES.template_id("x") == "x"
