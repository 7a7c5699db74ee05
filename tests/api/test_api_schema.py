"""Request bodies: every field is used, known to be harmless, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.schema import ChatRequest, CompletionRequest, read_body
from engine.errors import InvalidRequest
from engine.request import SamplingParams
from engine.tools.spec import Function, ToolUse

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return read_body(ChatRequest, json.dumps({**CHAT, **fields}).encode())


def use_chat(fields: dict[str, Any]) -> None:
    """All that a route does with a body before anything runs."""
    body = chat(**fields)
    body.sampling()
    body.tool_use()
    assert body.opens_answer is not None


def use_completion(fields: dict[str, Any]) -> None:
    body = read_body(CompletionRequest, json.dumps({**COMPLETION, **fields}).encode())
    body.sampling()
    body.prompts()


def tool(name: object, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> dict[str, Any]:
    return {"not": nested(depth - 1)} if depth else {}


def allow(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


def test_a_tool_choice_says_which_functions_may_or_must_be_called() -> None:
    tools = [tool("f", description="F", parameters={"properties": {}}, strict=True), tool("g", strict=None)]

    def use(**fields: Any) -> Any:
        return chat(tools=tools, **fields).tool_use()

    f, g = Function("f", "F", {"properties": {}}, is_strict=True), Function("g")
    both, only = frozenset({"f", "g"}), frozenset({"g"})
    assert use() == use(tool_choice="auto") == use(tool_choice=None) == ToolUse([f, g], both)
    assert use(tool_choice="none") is None
    assert use(tool_choice="required", parallel_tool_calls=False) == ToolUse([f, g], both, True, False)
    assert use(tool_choice=tool("g")) == ToolUse([f, g], only, True, False)
    assert use(tool_choice=allow("auto", "g")) == ToolUse([f, g], only)
    assert use(tool_choice=allow("required", "g", "f"), parallel_tool_calls=True) == ToolUse([f, g], both, True)
    assert chat(tools=[]).tool_use() is chat(tool_choice="none").tool_use() is None


def test_the_old_fields_are_refused_with_the_new_ones_names() -> None:
    for fields in ({"functions": [{"name": "f"}]}, {"function_call": {"name": "f"}}):
        assert "tools" in refusal(**fields).message


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as fault:
        use_chat(fields)
    return fault.value


def test_every_sampling_field_reaches_the_engine() -> None:
    values = {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    sampling = chat(**values, max_tokens=9, logprobs=True, top_logprobs=2, logit_bias={"4": -100}).sampling()
    assert sampling == SamplingParams(**values, max_tokens=9, logprobs=2, logit_bias={4: -100.0})  # type: ignore[arg-type]


def test_absent_and_null_fields_are_the_defaults() -> None:
    names = ("temperature", "top_p", "seed", "stop", "max_tokens", "logprobs", "tools", "response_format", "n", "lora")
    plain = chat()
    assert plain.sampling() == SamplingParams(max_tokens=None)
    assert chat(**dict.fromkeys(names)).sampling() == plain.sampling()
    assert read_body(CompletionRequest, json.dumps(COMPLETION).encode()).sampling().max_tokens == 16


def test_fields_that_change_nothing_are_accepted() -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    defaults = {"reasoning_effort": "none", "verbosity": "medium", "prompt_cache_options": {"ttl": "30m"}}
    assert chat(**fields, **neutral, **defaults).sampling() == chat().sampling()


def test_every_field_of_the_openai_package_is_known() -> None:
    from openai.types import completion_create_params as of_completions
    from openai.types.chat import completion_create_params as of_chat

    for params, model in (
        (of_chat.CompletionCreateParamsNonStreaming, ChatRequest),
        (of_completions.CompletionCreateParamsNonStreaming, CompletionRequest),
    ):
        known = model.model_fields.keys() | model.accepted | model.unserved.keys()
        assert len(params.__annotations__) > 10
        assert params.__annotations__.keys() <= known


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [tool("f"), {**tool("g"), "strict": True}]}, "tools[1].strict"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [tool("f g")]}, "tools[0].function.name"),
        ({"tools": [tool("f" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(None)]}, "tools[0].function.name"),
        ({"tools": [tool("f", description=3)]}, "tools[0].function.description"),
        ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool("f", wibble=1)]}, "tools[0].function.wibble"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"properties": ["a"]})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"properties": {"a": 1}})]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", parameters={"not": nested(70)})]}, "tools[0].function.parameters"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "auto", "tools": []}, "tool_choice"),
        ({"tool_choice": "any", "tools": [tool("f")]}, "tool_choice"),
        ({"tool_choice": 3, "tools": [tool("f")]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [tool("f")]}, "tool_choice.function"),
        ({"tool_choice": tool("g"), "tools": [tool("f")]}, "tool_choice.function.name"),
        ({"tool_choice": allow("auto", "g"), "tools": [tool("f")]}, "tool_choice.allowed_tools.tools[0].function.name"),
        ({"tool_choice": allow("auto"), "tools": [tool("f")]}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allow("some", "f"), "tools": [tool("f")]}, "tool_choice.allowed_tools.mode"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template": "{{x}}"}, "chat_template"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 2}, "best_of"),
        ({"wibble": 1}, "wibble"),
        ({"wibble": None}, "wibble"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": "2"}, "n"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"7": 200}}, "logit_bias.7"),
        ({"logit_bias": {"7": "much"}}, "logit_bias.7"),
        ({"logit_bias": [7]}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"wibble": 1}}, "stream_options.wibble"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": "yes"}, "stream"),
        ({"lora": 3}, "lora"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    fault = refusal(**fields)
    assert fault.param == param
    assert param.partition("[")[0].partition(".")[0] in fault.message


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(InvalidRequest, match="missing") as fault:
        read_body(ChatRequest, json.dumps({k: v for k, v in CHAT.items() if k != missing}).encode())
    assert fault.value.param == missing


def test_a_misspelt_field_is_answered_with_the_right_spelling() -> None:
    assert "did you mean temperature?" in refusal(temprature=1).message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'"text"',
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_body(ChatRequest, raw)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_a_list_of_either(prompt: Any, prompts: list[Any]) -> None:
    assert read_body(CompletionRequest, json.dumps({**COMPLETION, "prompt": prompt}).encode()).prompts() == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"suffix": ""}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1, "echo": False}, "max_tokens"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_completion_field_that_cannot_be_honoured_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as fault:
        use_completion(fields)
    assert fault.value.param == param


@pytest.mark.parametrize(
    "raw", [b'{"model": "m", "prompt": "\xed\xa0\x80"}', '{"model": "m", "prompt": "x"}'.encode("utf-16")]
)
def test_bodies_that_are_not_utf8_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_body(CompletionRequest, raw)


def test_scoring_is_refused_with_what_can_be_done_on_that_route() -> None:
    with pytest.raises(InvalidRequest, match=r"POST /tokenize .* /v1/completions") as fault:
        use_chat({"prompt_logprobs": 1})
    assert fault.value.param == "prompt_logprobs"
    with pytest.raises(InvalidRequest, match="use echo with logprobs"):
        use_completion({"prompt_logprobs": 1})


def test_a_token_id_of_thousands_of_digits_is_refused() -> None:
    body = read_body(ChatRequest, json.dumps({"model": "m", "messages": [], "logit_bias": {"1" * 5000: 1}}).encode())
    with pytest.raises(InvalidRequest, match="is not a token id"):
        body.sampling()
