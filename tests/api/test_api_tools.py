"""Tools over HTTP: forced calls obey their schemas, streams add up to whole answers, and other people's clients read them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from jsonschema import validate

from api.calls import ChoiceReader
from api.settings import ServerSettings
from engine import Engine, EngineConfig
from engine.tools.hermes import HERMES
from engine.tools.parser import CallParser
from tests.api.conftest import serve
from tests.tool_templates import make_tool_model

HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
TOOLS: Any = [WEATHER, NOW]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = make_tool_model("hermes", tmp_path_factory.mktemp("models") / "caller")
    config = EngineConfig(model=str(folder), adapter_dir=str(tmp_path_factory.mktemp("catalogue")), max_num_seqs=8)
    made = Engine(config, checks_integrity=True)
    yield made
    made.close(drain_s=1.0)
    made.check_integrity()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serve(engine, ServerSettings()) as address:
        yield address


@pytest.fixture(scope="module")
def caller(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def ask(caller: openai.OpenAI, **fields: Any) -> Any:
    options = {"messages": HI, "max_tokens": 200, "temperature": 1.2, "seed": 5, "tools": TOOLS, **fields}
    return caller.chat.completions.create(model="caller", **options)


def check_call(call: Any, *names: str) -> None:
    assert call.function.name in names
    validate(
        json.loads(call.function.arguments), PARAMETERS if call.function.name == "get_weather" else {"maxProperties": 0}
    )


@pytest.mark.parametrize(("choice", "names"), [(NAMED, ["get_weather"]), ("required", ["get_weather", "now"])])
def test_a_forced_call_is_made_by_a_model_that_would_not(caller: openai.OpenAI, choice: Any, names: list[str]) -> None:
    assert not ask(caller, max_tokens=20).choices[0].message.tool_calls
    answer = ask(caller, tool_choice=choice, parallel_tool_calls=False, n=3, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls
        check_call(call, *names)
        told = b"".join(bytes(each.bytes) for each in choice.logprobs.content)
        assert json.loads(call.function.arguments) == json.loads(told.split(b'"arguments": ')[1].split(b"}\n<")[0])
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)


def collect(stream: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    """A stream's choices put together by the rules of the API, and its usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            made = choices.setdefault(part.index, {"content": "", "calls": [], "reason": None})
            assert made["reason"] is None
            made["content"] += part.delta.content or ""
            made["reason"] = part.finish_reason
            for piece in part.delta.tool_calls or []:
                if piece.index == len(made["calls"]):
                    assert piece.id and piece.type == "function" and piece.function.arguments == ""
                    made["calls"].append([piece.function.name, ""])
                else:
                    assert piece.index == len(made["calls"]) - 1 and piece.id is piece.function.name is None
                    made["calls"][-1][1] += piece.function.arguments
    return choices, usage


@pytest.mark.parametrize("fields", [{"tool_choice": NAMED, "n": 2}, {"tool_choice": "required", "max_tokens": 70}])
def test_a_stream_adds_up_to_the_whole_answer(caller: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole = ask(caller, **fields)
    choices, usage = collect(ask(caller, stream=True, stream_options={"include_usage": True}, **fields))
    assert (usage.prompt_tokens, usage.total_tokens) == (whole.usage.prompt_tokens, whole.usage.total_tokens)
    for choice in whole.choices:
        made = choices[choice.index]
        calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        assert calls and made == {"content": "", "calls": calls, "reason": choice.finish_reason}


def test_a_call_that_max_tokens_cuts_off_is_a_beginning(caller: openai.OpenAI) -> None:
    start = ask(caller, tool_choice=NAMED, max_tokens=60).choices[0]
    assert start.finish_reason == "length"
    [call] = start.message.tool_calls
    whole = ask(caller, tool_choice=NAMED).choices[0].message.tool_calls[0].function.arguments
    assert whole.startswith(call.function.arguments) and call.function.arguments != whole


def test_without_a_choice_an_answer_in_a_format_is_that_or_a_call(caller: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"n": 7}}}}
    kinds = set()
    for choice in ask(
        caller, response_format=form, tools=[NOW], n=8, temperature=2.0, parallel_tool_calls=False
    ).choices:
        if choice.finish_reason == "tool_calls":
            check_call(choice.message.tool_calls[0], "now")
        else:
            assert json.loads(choice.message.content) == {"n": 7}
        kinds.add(choice.finish_reason)
    assert kinds == {"tool_calls", "stop"}


def test_no_choice_leaves_tools_out_of_the_prompt(caller: openai.OpenAI) -> None:
    with_tools, without, bare = (
        ask(caller, max_tokens=8, temperature=0, **fields)
        for fields in ({}, {"tool_choice": "none"}, {"tools": openai.omit})
    )
    assert without.usage.prompt_tokens == bare.usage.prompt_tokens
    assert without.choices[0].message == bare.choices[0].message
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens


def test_calls_and_results_go_back_into_the_prompt(caller: openai.OpenAI, url: str, engine: Engine) -> None:
    message = ask(caller, tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    turns = [*HI, message.model_dump(exclude_none=True), result]
    answer = ask(caller, messages=turns, max_tokens=4)
    plain = [json.loads(json.dumps(turn)) for turn in turns]
    told = httpx.post(f"{url}/tokenize", json={"messages": plain, "tools": TOOLS}, timeout=60).json()
    assert told["count"] == answer.usage.prompt_tokens
    text = engine.tokenizer.decode(told["tokens"])
    arguments = json.dumps(json.loads(message.tool_calls[0].function.arguments))
    assert f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>' in text
    assert "<tool_response>\nsunny" in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required", "tools": [WEATHER, {"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"a": {"type": "objekt"}}}}}]}, "tools[1].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "properties": {"a": {"$ref": "https://example.com/x"}}}}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "auto", "tools": []}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_field(url: str, fields: dict[str, Any], param: str) -> None:
    body = {"model": "caller", "messages": HI, "max_tokens": 4, "tools": TOOLS, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_model_whose_template_takes_no_tools_says_so(http: httpx.Client, base_model: str) -> None:
    body = {"model": base_model, "messages": HI, "max_tokens": 4, "tools": TOOLS}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    assert "takes no tools" in answer.json()["error"]["message"]
    assert http.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).status_code == 200


def test_a_broken_call_is_content_and_the_stream_says_the_same() -> None:
    answer = 'So: <tool_call>{"name": "now", "arguments": {"a": x}}</tool_call>'
    whole, pieces = ChoiceReader(CallParser(HERMES, {"now"})), ChoiceReader(CallParser(HERMES, {"now"}))
    whole.push(answer)
    deltas = [delta for letter in answer for delta in pieces.push(letter)]
    for reader in (whole, pieces):
        deltas += reader.finish("stop")
        assert reader.message() == {"role": "assistant", "content": answer, "refusal": None}
        assert reader.finish_reason("stop") == "stop"
    assert "".join(delta.get("content", "") for delta in deltas) == answer


def test_text_before_a_call_stays_content() -> None:
    reader = ChoiceReader(CallParser(HERMES, {"now"}))
    deltas = reader.push('I look.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>') + reader.finish("stop")
    assert deltas[0] == {"content": "I look."}
    message = reader.message()
    assert message["content"] == "I look." and message["tool_calls"][0]["function"] == {
        "name": "now",
        "arguments": "{}",
    }
    assert [reader.finish_reason(reason) for reason in ("stop", "length")] == ["tool_calls", "length"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_examples_of_the_documentation_run(caller: openai.OpenAI, url: str) -> None:
    section = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("\n### Tools\n")[1].split("\n## ")[0]
    by_curl, in_python = (
        re.search(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE) for language in ("sh", "python")
    )
    assert by_curl is not None and in_python is not None
    script = by_curl[1].replace("MODEL", "caller").replace("http://127.0.0.1:7860", url)
    ran = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    assert json.loads(ran.stdout)["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    # An answer with two calls for the example to answer, which a model of random weights gives sooner or later.
    answers = (ask(caller, tool_choice="required", max_tokens=400, seed=seed) for seed in range(40))
    answer = next(answer for answer in answers if len(answer.choices[0].message.tool_calls or ()) > 1)
    stub = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=lambda **_: answer)))
    messages = list(HI)
    names = {"client": stub, "messages": messages, "tools": TOOLS, "run": lambda name, arguments: f"{name} {arguments}"}
    exec(in_python[1], names)
    assert [m["role"] if isinstance(m, dict) else m.role for m in messages[:3]] == ["user", "assistant", "tool"]
    assert sum(not isinstance(m, dict) for m in messages) == 1
    assert caller.chat.completions.create(model="caller", messages=messages, tools=TOOLS, max_tokens=2).usage


def test_langchain_binds_tools(url: str) -> None:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(
        model="caller", base_url=f"{url}/v1", api_key="unused", temperature=1, seed=3, max_tokens=200, max_retries=0
    )
    bound = chat.bind_tools(TOOLS, tool_choice="get_weather")
    answer = bound.invoke("hi")
    [call] = answer.tool_calls
    assert call["name"] == "get_weather"
    validate(call["args"], PARAMETERS)
    from functools import reduce
    from operator import add

    streamed = reduce(add, bound.stream("hi"))
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [(call["name"], call["args"])]
    from langchain_core.messages import HumanMessage, ToolMessage

    after = [HumanMessage("hi"), answer, ToolMessage("sunny", tool_call_id=call["id"])]
    assert isinstance(chat.bind_tools(TOOLS, parallel_tool_calls=False).invoke(after, max_tokens=5).content, str)


def test_litellm_gets_and_streams_calls(url: str, litellm: ModuleType) -> None:
    words: Any = {
        "model": "openai/caller",
        "messages": HI,
        "api_base": f"{url}/v1",
        "api_key": "unused",
        "tools": TOOLS,
    }
    words |= {"tool_choice": "required", "parallel_tool_calls": False, "seed": 4, "max_tokens": 200}
    whole = litellm.completion(**words)
    assert whole.choices[0].finish_reason == "tool_calls"
    [call] = whole.choices[0].message.tool_calls
    check_call(call, "get_weather", "now")
    built = litellm.stream_chunk_builder(list(litellm.completion(**words, stream=True)))
    assert built.choices[0].message.tool_calls[0].function == call.function


def test_the_openai_packages_own_stream_helper_reads_calls(caller: openai.OpenAI) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    words: Any = {"model": "caller", "messages": HI, "tools": [strict], "tool_choice": "required", "seed": 6}
    with caller.chat.completions.stream(**words, parallel_tool_calls=False, max_tokens=200) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    [call] = final.choices[0].message.tool_calls or []
    validate(call.function.parsed_arguments, PARAMETERS)


@pytest.mark.asyncio
async def test_the_asynchronous_client_reads_calls_of_several_answers_at_once(url: str) -> None:
    choices = (NAMED, "required", "auto")
    options: Any = {"model": "caller", "messages": HI, "max_tokens": 200, "temperature": 1.2, "seed": 5, "tools": TOOLS}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as client:

        async def streamed(choice: Any) -> list[Any]:
            stream = await client.chat.completions.create(**options, tool_choice=choice, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
            parts = [part.function for delta in deltas for part in delta.tool_calls or []]
            return ["".join(delta.content or "" for delta in deltas), "".join(part.arguments or "" for part in parts)]

        whole = asyncio.gather(*[client.chat.completions.create(**options, tool_choice=choice) for choice in choices])
        answers, streams = await asyncio.gather(whole, asyncio.gather(*[streamed(choice) for choice in choices]))
    for answer, stream in zip(answers, streams, strict=True):
        message = answer.choices[0].message
        calls = message.tool_calls or []
        assert stream == [message.content or "", "".join(call.function.arguments for call in calls)]
        for call in calls:
            check_call(call, "get_weather", "now")
    assert answers[0].choices[0].message.tool_calls and not answers[2].choices[0].message.tool_calls


@pytest.mark.parametrize("family", ["mistral", "granite"])
def test_other_families_call_too(family: str, tmp_path: Path) -> None:
    """Marks that are special tokens are read although an answer's text does not show special tokens."""
    architecture = {"mistral": "MistralForCausalLM", "granite": "GraniteForCausalLM"}[family]
    folder = make_tool_model(family, tmp_path / "caller", architecture)
    engine = Engine(EngineConfig(model=str(folder), adapter_dir=str(tmp_path / "catalogue")), checks_integrity=True)
    try:
        with serve(engine, ServerSettings()) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
            message = ask(client, tool_choice=NAMED).choices[0].message
            [call] = message.tool_calls
            check_call(call, "get_weather")
            turns = [*HI, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
            turns += [{"role": "assistant", "content": "Sunny."}, *HI] if family == "mistral" else []
            choices, _ = collect(
                ask(client, messages=turns, tool_choice="required", parallel_tool_calls=False, stream=True)
            )
            assert choices[0]["reason"] == "tool_calls" and choices[0]["content"] == ""
            called = {**NAMED, "id": "call_of_another", "function": {"name": "now", "arguments": "{}"}}
            result = {"role": "tool", "tool_call_id": "call_of_another", "content": "1"}
            foreign = [*HI, {"role": "assistant", "tool_calls": [called]}, result]
            assert ask(client, messages=foreign, max_tokens=2).usage.completion_tokens == 2
    finally:
        engine.close()
