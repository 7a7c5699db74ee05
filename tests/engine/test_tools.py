"""Templates say by themselves how they take tools; a guided answer holds calls that follow their schemas and nothing else."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from jsonschema import validate

from engine.adapter_text import TextSide
from engine.detokenizer import DecodingTable, Detokenizer
from engine.errors import InvalidRequest
from engine.guides import GuideCompiler
from engine.prompt import PromptBuilder
from engine.request import ChatPrompt, Message
from engine.tools.events import Arguments, CallBegun, Text
from engine.tools.parser import CallParser
from engine.tools.spec import Function, ToolCall, ToolUse
from tests.oracles import EOS
from tests.tool_templates import FAMILIES, HERMES, NUM_IDS, PLAIN, make_tool_tokenizer

WEATHER = Function(
    "get_weather",
    "Weather of a city <|end_of_text|> now",
    {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/Days"}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
    },
)
NOW = Function("now")
COMPILER = GuideCompiler()
BOTH = ToolUse([WEATHER, NOW], frozenset({"get_weather", "now"}))
CALLING = ["hermes", "hermes-words", "llama", "mistral", "mistral-named", "granite", "phi"]


@cache
def text_side(family: str) -> TextSide:
    tokenizer = make_tool_tokenizer(family)
    builder = PromptBuilder(tokenizer, tokenizer.chat_template, [], NUM_IDS)
    return TextSide(tokenizer, builder, DecodingTable(tokenizer), frozenset({EOS}), NUM_IDS)


def render(family: str, *messages: Message, tools: ToolUse | None = BOTH) -> str:
    text = text_side(family).builder.build(ChatPrompt(messages, False, tools=tools), []).token_ids
    return str(text_side(family).tokenizer.decode(text, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(
    ("family", "place", "tool_format", "writes_calls", "takes_text"),
    [
        ("hermes", "argument", "hermes", True, False),
        ("hermes-words", "argument", "hermes", True, False),
        ("qwen3", "argument", "hermes", True, False),
        ("llama", "argument", "llama", True, False),
        ("mistral", "argument", "mistral", True, False),
        ("mistral-named", "argument", "mistral-named", True, False),
        ("granite", "argument", "granite", False, False),
        ("phi", "system", "phi", False, False),
        ("phi-functools", "argument", "phi-functools", True, True),
    ],
)
def test_a_template_tells_how_it_takes_tools(
    family: str, place: str, tool_format: str, writes_calls: bool, takes_text: bool
) -> None:
    tools = text_side(family).builder.tools
    assert tools is not None and tools.tool_format is not None
    assert (tools.place, tools.tool_format.name, tools.writes_calls) == (place, tool_format, writes_calls)
    assert tools.takes_text_arguments is takes_text


def test_a_template_that_joins_texts_gets_arguments_as_text() -> None:
    tokenizer = make_tool_tokenizer("hermes")
    joined = HERMES.replace("{{- call.arguments | tojson }}", "{{- '' + call.arguments }}")
    tools = PromptBuilder(tokenizer, joined, [], NUM_IDS).tools
    assert tools is not None and tools.takes_text_arguments and tools.writes_calls


@pytest.mark.parametrize(("family", "why"), [("plain", "takes no tools"), ("tags", "not known")])
def test_tools_that_could_not_be_read_are_refused(family: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as fault:
        render(family, Message("user", "hi"))
    assert fault.value.param == "tools"
    with pytest.raises(InvalidRequest) as fault:
        render(family, Message("user", "hi"), Message("assistant", "", [ToolCall("a", "now", "{}")]), tools=None)
    assert fault.value.param == "messages[1].tool_calls"
    assert "hi" in render(family, Message("user", "hi"), tools=None)


@pytest.mark.parametrize("family", CALLING)
def test_tools_calls_and_results_reach_the_prompt(family: str) -> None:
    call = ToolCall("call_1", "get_weather", '{"city": "Paris", "days": 3}')
    text = render(
        family,
        Message("user", "hi"),
        Message("assistant", "", [call]),
        Message("tool", "sunny", (), "call_1", "get_weather"),
    )
    if family != "mistral":  # which tells of tools in a last turn of the user's
        assert text.index('"get_weather"') < text.index("Weather of a city") < text.index('"$defs"')
    parser = CallParser(text_side(family).builder.tools.tool_format, {"get_weather"})  # type: ignore[union-attr, arg-type]
    turn = render(family, Message("user", "hi"), Message("assistant", "", [call]), tools=None)
    turn = turn.removeprefix(render(family, Message("user", "hi"), tools=None))
    answer = turn.removeprefix("<|start_header_id|>assistant<|end_header_id|>")
    events = [*parser.push(answer), *parser.finish(is_cut=False)]
    assert CallBegun("get_weather") in events
    [arguments] = [event.text for event in events if isinstance(event, Arguments)]
    assert json.loads(arguments) == {"city": "Paris", "days": 3}
    assert text.index("sunny") > text.rindex("Paris")


@pytest.mark.parametrize("family", CALLING)
def test_a_special_tokens_name_in_tools_calls_and_results_is_text(family: str) -> None:
    side, typed = text_side(family), "x <|end_of_text|> [TOOL_CALLS] <tool_call> <|im_end|> y"
    tool = Function("f", typed, {"type": "object", "properties": {typed: {"enum": [typed]}}})
    use = ToolUse([tool], frozenset({"f"}))

    def specials(name: str) -> list[int]:
        tool = Function("f", name, {"type": "object", "properties": {name: {"enum": [name]}}})
        call = ToolCall("call_1", "f", json.dumps({name: name}))
        hidden = ToolCall("call_1", "f", json.dumps({name: name}).replace("<", "\\u003c"))
        messages = [
            Message("user", "hi"),
            Message("assistant", name, [call]),
            Message("tool", name, (), "call_1", "f"),
            Message("user", name),
            Message("assistant", "", [hidden]),
            Message("tool", name, (), "call_1", "f"),
            Message("user", "so"),
        ]
        ids = side.builder.build(ChatPrompt(messages, tools=ToolUse([tool], frozenset({"f"}))), []).token_ids
        special = {id_ for id_, token in side.tokenizer.added_tokens_decoder.items() if token.special}
        return [id_ for id_ in ids if id_ in special]

    assert specials(typed) == specials("x y")
    assert typed in side.tokenizer.decode(
        side.builder.build(ChatPrompt([Message("user", "a")], tools=use), []).token_ids
    )


def test_templates_by_name_are_used_by_what_the_prompt_holds() -> None:
    tokenizer = make_tool_tokenizer("hermes")
    builder = PromptBuilder(tokenizer, {"default": PLAIN, "tool_use": HERMES}, [], NUM_IDS)
    plain, tooled = (builder.build(ChatPrompt([Message("user", "a")], tools=use), []).text for use in (None, BOTH))
    assert plain == "user: a\n"
    assert tooled is not None and "<tools>" in tooled


def walk(family: str, use: ToolUse, *, start: str = "", answer_schema: str | None = None, seed: int = 0) -> str:
    """An answer of random tokens, of those that the guide allows, to its end; marks shown, the end not.

    The answer's end is taken where it is allowed, and the letters of `start` before all.
    """
    side, rng = text_side(family), random.Random(seed)
    tools = side.builder.tools
    assert tools is not None and tools.tool_format is not None
    guide = COMPILER.compile_calls(use, tools.tool_format, answer_schema, side)
    ids: list[int] = []
    first = list(side.tokenizer(start, add_special_tokens=False)["input_ids"])
    while len(ids) < 500:
        mask = guide.allowed(ids)
        allowed = [id_ for id_ in range(NUM_IDS) if id_ // 8 < len(mask) and mask[id_ // 8] >> id_ % 8 & 1]
        if len(ids) < len(first):
            assert first[len(ids)] in allowed, (len(ids), start)
            ids.append(first[len(ids)])
        elif EOS in allowed and (len(allowed) < 100 or len(ids) > 60):
            break
        else:
            ids.append(rng.choice(allowed))
    else:
        pytest.fail("no end")
    detokenizer = Detokenizer(side.decoding, skip_special_tokens=False)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def parse(family: str, use: ToolUse, answer: str) -> tuple[str, list[tuple[str, Any]]]:
    tools = text_side(family).builder.tools
    assert tools is not None and tools.tool_format is not None
    parser = CallParser(tools.tool_format, use.callable_names, is_parallel=use.is_parallel, is_guided=True)
    text, calls = "", list[list[str]]()
    for event in [*parser.push(answer), *parser.finish(is_cut=False)]:
        if isinstance(event, Text):
            text += event.text
        elif isinstance(event, CallBegun):
            calls.append([event.name, ""])
        else:
            assert isinstance(event, Arguments)
            calls[-1][1] += event.text
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def check(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        validate(arguments, {"get_weather": WEATHER, "now": NOW}[name].schema)


@pytest.mark.parametrize("family", [*CALLING, "phi-functools"])
def test_a_required_call_is_all_that_an_answer_can_be(family: str) -> None:
    named = ToolUse([WEATHER, NOW], frozenset({"get_weather"}), is_required=True, is_parallel=False)
    seen = set()
    for seed in range(3):
        text, calls = parse(family, named, walk(family, named, seed=seed))
        assert text == "" and [name for name, _ in calls] == ["get_weather"]
        check(calls)
        seen.add(json.dumps(calls))
        required = ToolUse([WEATHER, NOW], BOTH.callable_names, is_required=True)
        text, calls = parse(family, required, walk(family, required, seed=seed))
        assert text == "" and calls
        check(calls)
    assert len(seen) > 1


@pytest.mark.parametrize("family", [*CALLING, "phi-functools"])
def test_a_strict_call_follows_its_schema_once_it_has_begun(family: str) -> None:
    strict = Function(WEATHER.name, None, WEATHER.parameters, is_strict=True)
    use = ToolUse([strict, NOW], BOTH.callable_names, is_parallel=False)
    tool_format = text_side(family).builder.tools.tool_format  # type: ignore[union-attr]
    assert tool_format is not None
    begun = tool_format.opening + tool_format.around("get_weather")[0]
    for seed in range(2):
        before = "" if tool_format.name == "llama" else "I see <that>, "
        text, calls = parse(family, use, walk(family, use, start=before + begun, seed=seed))
        assert text == before.rstrip() and len(calls) == 1
        check(calls)
        assert parse(family, use, walk(family, use, start="No call", seed=seed))[0].startswith("No call")
    with pytest.raises(AssertionError):
        walk(family, use, start=begun + '{"town"')


def test_text_may_hold_other_special_tokens_before_a_call() -> None:
    strict = ToolUse([Function("now", is_strict=True)], frozenset({"now"}))
    start = '<think>hm <tool_call>\n{"name": "now", "arguments": {}'
    text, calls = parse("hermes", strict, walk("hermes", strict, start=start))
    assert (text, calls) == ("<think>hm", [("now", {})])


@pytest.mark.parametrize("family", CALLING)
def test_an_answer_in_a_format_is_that_or_calls(family: str) -> None:
    schema = '{"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": false}'
    use = ToolUse([Function("now", is_strict=True)], frozenset({"now"}))
    seen = set()
    for seed in range(9):
        text, calls = parse(family, use, walk(family, use, answer_schema=schema, seed=seed))
        assert json.loads(text) == {"n": 7} if not calls else text == ""
        seen.add(bool(calls))
    assert seen == {True, False}


def test_a_function_that_may_not_be_called_is_not() -> None:
    use = ToolUse([WEATHER, NOW], frozenset({"now"}))
    assert use.needs_guide
    with pytest.raises(AssertionError):
        walk("hermes", use, start='<tool_call>\n{"name": "get')
    assert not BOTH.needs_guide


def test_a_schema_at_fault_is_named() -> None:
    good, bad = (
        Function("a", is_strict=True),
        Function("b", None, {"properties": {"x": {"type": "objekt"}}}, is_strict=True),
    )
    side = text_side("hermes")
    with pytest.raises(InvalidRequest) as fault:
        GuideCompiler().compile_calls(
            ToolUse([good, bad], frozenset({"a", "b"})), side.builder.tools.tool_format, None, side
        )  # type: ignore[union-attr, arg-type]
    assert fault.value.param == "tools[1].function.parameters"
    assert set(FAMILIES) > set(CALLING)
