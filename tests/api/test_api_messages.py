"""Messages: both forms of content, media by data, and the exact place of whatever is wrong."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from api.messages import MediaRules, read_messages
from engine.errors import AppError
from engine.request import AudioPart, ImagePart, Message, TextPart
from engine.tools.spec import ToolCall

RULES = MediaRules(frozenset({"audio"}), 1000)
DATA = b"RIFF, or so it says"
BASE64 = base64.b64encode(DATA).decode()
AUDIO = {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def called(calls: object) -> list[dict[str, Any]]:
    return [*user("hi"), {"role": "assistant", "content": None, "tool_calls": calls}]


def test_calls_and_results_are_read_and_a_result_gets_the_name_of_its_function() -> None:
    empty = {**CALL, "id": "call_2", "function": {"name": "g", "arguments": ""}}
    result = {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "four"}]}
    messages = read_messages([*called([CALL, empty]), result, {"role": "tool", "content": "?"}], RULES)
    assert messages[1] == Message("assistant", "", (ToolCall("call_1", "f", '{"a": 1}'), ToolCall("call_2", "g", "{}")))
    assert messages[2] == Message("tool", [TextPart("four")], (), "call_2", "g")
    assert messages[3] == Message("tool", "?")


def test_text_stays_text_and_parts_keep_their_order() -> None:
    text = {"type": "text", "text": "a"}
    assert read_messages(user("hi"), RULES) == [Message("user", "hi")]
    assert read_messages(user(""), RULES) == [Message("user", "")]
    [message] = read_messages(user([text, AUDIO, {"type": "text", "text": ""}]), RULES)
    audio = AudioPart(DATA, "messages[0].content[1].input_audio.data")
    assert message.content == [TextPart("a"), audio, TextPart("")]


def test_an_assistants_turn_may_come_back_as_the_client_got_it() -> None:
    sent: dict[str, Any] = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "name": "bob",
    }
    assert read_messages([sent], RULES) == [Message("assistant", "a")]
    assert read_messages([{"role": "developer", "content": "a"}], RULES) == [Message("system", "a")]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": BASE64}},
        {"type": "input_audio", "input_audio": {"data": f"data:;base64,{BASE64}", "format": "mp3"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{BASE64}"}},
        {"type": "audio_url", "audio_url": {"url": f"DATA:audio/wav;base64,{BASE64}"}},
    ],
)
def test_audio_is_the_same_however_it_is_sent(part: dict[str, Any]) -> None:
    [message] = read_messages(user([part]), RULES)
    assert isinstance(message.content[0], AudioPart)
    assert message.content[0].source == DATA


def test_an_image_is_read_where_the_model_takes_images() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}", "detail": "low"}}
    [message] = read_messages(user([part]), MediaRules(frozenset({"image"}), 1000))
    assert message.content == [ImagePart(DATA, "messages[0].content[0].image_url.url")]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ({}, "messages"),
        (None, "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (user(None), "messages[0].content"),
        (user(3), "messages[0].content"),
        (user([]), "messages[0].content"),
        (user(["hi"]), "messages[0].content[0]"),
        (user([{"text": "hi"}]), "messages[0].content[0].type"),
        (user([{"type": "text", "text": "a"}, {"type": "video_url"}]), "messages[0].content[1].type"),
        (user([{"type": ["text"], "text": "a"}]), "messages[0].content[0].type"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        (user([{"type": "text", "text": "a", "input_audio": {}}]), "messages[0].content[0].input_audio"),
        (user([{"type": "input_audio"}]), "messages[0].content[0].input_audio"),
        (user([{"type": "input_audio", "input_audio": {}}]), "messages[0].content[0].input_audio.data"),
        (user([{"type": "input_audio", "input_audio": {"data": ""}}]), "messages[0].content[0].input_audio.data"),
        (user([{"type": "input_audio", "input_audio": {"data": "?!"}}]), "messages[0].content[0].input_audio.data"),
        (
            user([{"type": "input_audio", "input_audio": {"data": "A" * 4000}}]),
            "messages[0].content[0].input_audio.data",
        ),
        (user([{"type": "audio_url", "audio_url": {"url": "http://10.0.0.1/a.wav"}}]), "messages[0].content[0].audio_url.url"),
        (user([{"type": "audio_url", "audio_url": {"url": "/etc/passwd"}}]), "messages[0].content[0].audio_url.url"),
        (user([{"type": "audio_url", "audio_url": "data:,"}]), "messages[0].content[0].audio_url"),
        (user([{"type": "image_url", "image_url": {"url": "data:,a"}}]), "messages[0].content[0].image_url"),
        (called("x"), "messages[1].tool_calls"),
        (called([{}]), "messages[1].tool_calls[0].type"),
        (called([{**CALL, "id": None}]), "messages[1].tool_calls[0].id"),
        (called([{**CALL, "type": "custom"}]), "messages[1].tool_calls[0].type"),
        (called([{**CALL, "wibble": 1}]), "messages[1].tool_calls[0].wibble"),
        (called([CALL, {**CALL, "function": None}]), "messages[1].tool_calls[1].function"),
        (called([{**CALL, "function": {"name": "f g", "arguments": ""}}]), "messages[1].tool_calls[0].function.name"),
        (called([{**CALL, "function": {"name": "f"}}]), "messages[1].tool_calls[0].function.arguments"),
        *(
            (called([{**CALL, "function": {"name": "f", "arguments": text}}]), "messages[1].tool_calls[0].function.arguments")
            for text in ("{", "[1]", "null", '{"a": "\\ud800"}', '{"a": ' + "[" * 70 + "]" * 70 + "}", "[" * 100_000)
        ),
        ([{**message, "role": "user"} for message in called([CALL])], "messages[1].tool_calls"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "assistant", "content": "a", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "tool", "content": "a", "tool_call_id": 3}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": None, "tool_call_id": "a"}], "messages[0].content"),
        ([{"role": "user", "content": "hi", "wibble": 1}], "messages[0].wibble"),
    ],
)  # fmt: skip
def test_whatever_is_wrong_is_named_by_its_path(messages: object, param: str) -> None:
    with pytest.raises(AppError) as fault:
        read_messages(messages, RULES)
    assert fault.value.param == param
    assert fault.value.status in (400, 413)


def test_a_kind_of_part_that_is_not_served_is_named() -> None:
    with pytest.raises(AppError, match="'video_url'"):
        read_messages(user([{"type": "video_url", "video_url": {}}]), RULES)
    with pytest.raises(AppError, match="only text, audio"):
        read_messages(user([{"type": "image_url", "image_url": {"url": "data:,a"}}]), RULES)
