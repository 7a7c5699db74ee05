"""`/v1/chat/completions` on a live server: routing, streams, sampling fields, usage, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from engine import Engine
from tests.oracles import EOS, VOCAB_SIZE
from tests.pace import held_after

HI: list[Any] = [{"role": "user", "content": "Say something long, please."}]
ASCII_ONLY = {
    str(token): -100 for token in range(94, VOCAB_SIZE)
}  # The alphabet is sorted: printable ASCII comes first.


def ask(client: openai.OpenAI, model: str, messages: list[Any], **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 12, **fields}
    return client.chat.completions.create(model=model, messages=messages, **fields)


def sse(http: httpx.Client, **fields: Any) -> list[Any]:
    """The events of a raw stream; `[DONE]` as text."""
    body = {"messages": HI, "temperature": 0, "max_tokens": 6, "stream": True, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == index)


def eventually(is_true: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether something that another thread brings about comes true."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not is_true() and time.monotonic() < deadline:
        pause.wait(0.005)
    return is_true()


# Routing and the receipt


def test_text_is_answered_by_the_base_model(client: openai.OpenAI, base_model: str) -> None:
    answer = ask(client, base_model, HI)
    assert answer.lora == {
        "name": None, "generation": None, "reason": "base", "load_ms": 0.0,
        "queue_ms": answer.lora["queue_ms"], "cached_tokens": answer.usage.prompt_tokens_details.cached_tokens,
    }  # fmt: skip
    assert answer.model == base_model
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"


def test_an_adapter_is_asked_for_by_model_or_by_lora_and_changes_the_answer(
    client: openai.OpenAI, base_model: str, tiny_engine: Engine
) -> None:
    by_model = ask(client, "style", HI)
    by_lora = ask(client, base_model, HI, extra_body={"lora": "style"})
    base = ask(client, base_model, HI)
    digest = tiny_engine.adapters.get("style").generation
    for answer in (by_model, by_lora):
        assert (answer.lora["name"], answer.lora["reason"], answer.lora["generation"]) == ("style", "explicit", digest)
        assert answer.choices[0].message.content == by_model.choices[0].message.content
    assert (by_model.model, by_lora.model) == ("style", base_model)
    assert base.choices[0].message.content != by_model.choices[0].message.content


def audio_forms(wav: bytes) -> list[dict[str, Any]]:
    data = base64.b64encode(wav).decode()
    return [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{data}", "format": "mp3"}},
        {"type": "input_audio", "input_audio": {"data": data.rstrip("=")}},
        {"type": "input_audio", "input_audio": {"data": "\n".join(data[i : i + 76] for i in range(0, len(data), 76))}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ]


def test_audio_in_every_form_goes_to_the_default_adapter_with_the_same_answer(
    client: openai.OpenAI, base_model: str, wav: bytes
) -> None:
    answers = [ask(client, base_model, [{"role": "user", "content": [part]}]) for part in audio_forms(wav)]
    assert {answer.lora["name"] for answer in answers} == {"speech"}
    assert {answer.lora["reason"] for answer in answers} == {"default:audio"}
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_audio_of_an_earlier_turn_counts(client: openai.OpenAI, base_model: str, audio_message: dict[str, Any]) -> None:
    turns = [audio_message, {"role": "assistant", "content": "A tone."}, {"role": "user", "content": "Sure?"}]
    assert ask(client, base_model, turns).lora["reason"] == "default:audio"


def test_the_base_model_answers_audio_only_on_request_and_a_named_adapter_wins(
    client: openai.OpenAI, base_model: str, audio_message: dict[str, Any]
) -> None:
    default = ask(client, base_model, [audio_message])
    opted_out = ask(client, base_model, [audio_message], extra_body={"lora": "none"})
    explicit = ask(client, "tower", [audio_message])
    assert (opted_out.lora["name"], opted_out.lora["reason"]) == (None, "opt-out")
    assert (explicit.lora["name"], explicit.lora["reason"]) == ("tower", "explicit")
    assert len({each.choices[0].message.content for each in (default, opted_out, explicit)}) == 3


def test_a_default_adapter_that_is_gone_is_an_error_and_not_the_base_model(
    client: openai.OpenAI, base_model: str, audio_message: dict[str, Any], tiny_engine: Engine
) -> None:
    speech = tiny_engine.adapters.get("speech")
    tiny_engine.adapters.unload("speech")
    try:
        with pytest.raises(openai.NotFoundError, match="speech"):
            ask(client, base_model, [audio_message])
        assert ask(client, base_model, HI).lora["reason"] == "base"
    finally:
        tiny_engine.adapters.load("speech", speech.source, pinned=True)
    assert ask(client, base_model, [audio_message]).lora["name"] == "speech"


@pytest.mark.parametrize("fields", [{"model": "nobody"}, {"extra_body": {"lora": "nobody"}}])
def test_an_unknown_name_is_not_found(client: openai.OpenAI, base_model: str, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody") as fault:
        client.chat.completions.create(**{"model": base_model, "messages": HI, **fields})
    assert fault.value.code == "model_not_found"
    assert fault.value.param == ("model" if "model" in fields else "lora")


def test_headers_say_the_same_as_the_receipt(http: httpx.Client, base_model: str) -> None:
    body = {"messages": HI, "max_tokens": 1}
    for stream in (False, True):
        base = http.post("/v1/chat/completions", json={**body, "model": base_model, "stream": stream})
        named = http.post("/v1/chat/completions", json={**body, "model": "style", "stream": stream})
        assert (base.headers["x-lora-name"], base.headers["x-lora-reason"]) == ("none", "base")
        assert (named.headers["x-lora-name"], named.headers["x-lora-reason"]) == ("style", "explicit")
        assert base.headers["x-request-id"].startswith("chatcmpl-")


# Streams


def test_a_stream_is_role_with_receipt_then_text_then_finish_then_done(http: httpx.Client) -> None:
    *chunks, done = sse(http, model="style")
    assert done == "[DONE]"
    first, *middle, last = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["lora"]["name"] == "style"
    assert first["lora"].keys() == {"name", "generation", "reason", "load_ms", "queue_ms", "cached_tokens"}
    assert all("lora" not in chunk for chunk in [*middle, last])
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in middle)
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks} == {
        (first["id"], first["created"], "style", "chat.completion.chunk")
    }
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_not_in_a_stream_unless_asked_for(http: httpx.Client, base_model: str, options: Any) -> None:
    chunks = sse(http, model=base_model, stream_options=options)[:-1]
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_on_request_is_one_last_chunk_without_choices(http: httpx.Client, base_model: str) -> None:
    *chunks, usage, done = sse(http, model=base_model, n=2, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 12
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


TOUGH = [
    {},
    {"max_tokens": 30, "ignore_eos": True},
    {"temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 20},
    {"logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "seed": 1, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    {"presence_penalty": 1, "frequency_penalty": 0.5, "max_tokens": 25},
]


@pytest.mark.parametrize("fields", TOUGH)
def test_a_stream_adds_up_to_the_whole_answer(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"model": "style", "messages": HI, "temperature": 0, "max_tokens": 6, **fields}
    whole = http.post("/v1/chat/completions", json=body).json()
    chunks = sse(http, **body, stream_options={"include_usage": True})
    assert len(whole["choices"]) == fields.get("n", 1)
    for choice in whole["choices"]:
        index = choice["index"]
        parts = [each for chunk in chunks[:-1] for each in chunk["choices"] if each["index"] == index]
        assert joined(chunks, index) == choice["message"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        streamed = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        expected = choice["logprobs"]["content"] if choice["logprobs"] else []
        assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in expected]
        values = [entry["logprob"] for entry in expected]
        # What was cached and what shared the batch may move the last bits.
        assert [entry["logprob"] for entry in streamed] == pytest.approx(values, abs=1e-4)
    usage = copy.deepcopy(whole["usage"])
    for each in (usage, chunks[-2]["usage"]):
        del each["prompt_tokens_details"]  # The second of the two found its prompt in the cache.
    assert chunks[-2]["usage"] == usage


def test_stop_strings_end_a_stream_and_a_whole_answer_at_the_same_character(
    http: httpx.Client, base_model: str
) -> None:
    body = {"model": base_model, "messages": HI, "temperature": 0, "max_tokens": 24, "logit_bias": ASCII_ONLY}

    def whole(**fields: Any) -> dict[str, Any]:
        choice: dict[str, Any] = http.post("/v1/chat/completions", json={**body, **fields}).json()["choices"][0]
        return choice

    text = whole()["message"]["content"]
    assert len(text) == 24 and text.isascii()
    snow = "\N{SNOWMAN}"
    cases = [[text[5:9]], [text[5], text[5:7]], [text[0]], [text[-2:] + snow], [snow, text[9:12], "zz", text[20:]]]
    for stop in cases:
        found = [text.find(each) for each in stop if each in text]
        expected = text[: min(found)] if found else text
        answer = whole(stop=stop)
        assert answer["message"]["content"] == expected, stop
        assert answer["finish_reason"] == ("stop" if found else "length")
        assert joined(sse(http, **body, stop=stop)) == expected
    assert whole(stop=text[5:9])["stop_reason"] == text[5:9]


@pytest.mark.asyncio
async def test_async_clients_get_their_own_answers_when_they_share_batches(base_url: str, base_model: str) -> None:
    names = [base_model, "speech", "style", "tower"] * 3
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:

        async def whole(name: str) -> str:
            answer = await client.chat.completions.create(model=name, messages=HI, temperature=0, max_tokens=16)
            return answer.choices[0].message.content or ""

        async def streamed(name: str) -> str:
            stream = await client.chat.completions.create(
                model=name, messages=HI, temperature=0, max_tokens=16, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        alone = {name: await whole(name) for name in names[:4]}
        assert len(set(alone.values())) == 4
        together = await asyncio.gather(*[streamed(name) for name in names], *[whole(name) for name in names])
    assert together == [alone[name] for name in names] * 2


# Sampling fields


def test_n_answers_differ_and_a_seed_repeats_them(client: openai.OpenAI, base_model: str) -> None:
    def texts(**fields: Any) -> list[str]:
        answer = ask(client, base_model, HI, temperature=1.0, n=3, **fields)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == 36
        return [choice.message.content for choice in answer.choices]

    first = texts(seed=5, extra_body={"ignore_eos": True})
    assert len(set(first)) == 3
    assert texts(seed=5, extra_body={"ignore_eos": True}) == first
    assert texts(seed=6, extra_body={"ignore_eos": True}) != first


def test_logit_bias_forces_a_token(client: openai.OpenAI, base_model: str) -> None:
    [token] = tokenize(client, prompt="Q")["tokens"]
    answer = ask(client, base_model, HI, max_tokens=4, logit_bias={str(token): 100})
    assert answer.choices[0].message.content == "QQQQ"


def test_log_probabilities_spell_the_answer_byte_by_byte(client: openai.OpenAI, base_model: str) -> None:
    no_specials = {str(token): -100 for token in range(EOS, VOCAB_SIZE)}
    answer = ask(
        client, base_model, HI, max_tokens=40, logprobs=True, top_logprobs=3, logit_bias=no_specials
    )  # fmt: skip
    content = answer.choices[0].logprobs.content
    assert len(content) == 40
    spelt = bytes(byte for entry in content for byte in entry.bytes)
    assert spelt.decode("utf-8", "replace") == answer.choices[0].message.content
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert [rival.logprob for rival in entry.top_logprobs] == sorted(
            (rival.logprob for rival in entry.top_logprobs), reverse=True
        )
    assert ask(client, base_model, HI, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert ask(client, base_model, HI).choices[0].logprobs is None


def tokenize(client: openai.OpenAI, **body: Any) -> dict[str, Any]:
    answer = httpx.post(str(client.base_url).removesuffix("/v1/") + "/tokenize", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_usage_counts_the_prompt_that_the_template_makes(client: openai.OpenAI, base_model: str) -> None:
    opened = tokenize(client, messages=HI)
    closed = tokenize(client, messages=HI, add_generation_prompt=False)
    assert ask(client, base_model, HI).usage.prompt_tokens == opened["count"] == len(opened["tokens"])
    bare = ask(client, base_model, HI, extra_body={"add_generation_prompt": False})
    assert bare.usage.prompt_tokens == closed["count"] < opened["count"]


def test_a_final_message_is_continued(client: openai.OpenAI, base_model: str) -> None:
    turns = [*HI, {"role": "assistant", "content": "Once upon"}]
    tokens = tokenize(client, messages=turns, continue_final_message=True)["tokens"]
    prompt = client.completions.create(model=base_model, prompt=tokens, temperature=0, max_tokens=8)
    answer = ask(client, base_model, turns, max_tokens=8, extra_body={"continue_final_message": True})
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.choices[0].message.content == prompt.choices[0].text


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI, base_model: str) -> None:
    turn = [{"role": "user", "content": "A prompt of some length that nobody has sent before. " * 2}]
    first, second = ask(client, base_model, turn), ask(client, base_model, turn)
    assert first.usage.prompt_tokens_details.cached_tokens < 16
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= 64
    assert second.lora["cached_tokens"] == cached
    assert second.choices[0].message == first.choices[0].message
    assert ask(client, "style", turn).usage.prompt_tokens_details.cached_tokens == 0


def test_content_as_text_and_as_parts_is_the_same_prompt(client: openai.OpenAI, base_model: str) -> None:
    text = ask(client, base_model, HI)
    parts = ask(client, base_model, [{"role": "user", "content": [{"type": "text", "text": HI[0]["content"]}]}])
    assert parts.choices == text.choices
    assert parts.usage.prompt_tokens == text.usage.prompt_tokens


# Faults


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
         "response_format.json_schema.schema"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "long " * 500}]}, "messages"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}]}]},
         "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "bm8="}}]}]},
         "messages[0].content[0].input_audio.data"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_served_is_refused_before_anything_streams(
    http: httpx.Client, base_model: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = http.post("/v1/chat/completions", json={"model": base_model, "messages": HI, "stream": stream, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json()["error"]["param"] == param


# Clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_what_its_request_holds(
    base_url: str, base_model: str, tiny_engine: Engine, stream: bool
) -> None:
    body = {"model": base_model, "messages": HI, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    num_aborted = tiny_engine.stats().num_finished.get("abort", 0)
    with held_after(tiny_engine), httpx.Client(base_url=base_url, timeout=60) as client:
        request = client.build_request("POST", "/v1/chat/completions", json=body)
        if stream:
            answer = client.send(request, stream=True)
            next(answer.iter_lines())
            answer.close()
        else:
            with socket.create_connection((request.url.host, request.url.port or 80)) as connection:
                lines = [b"POST /v1/chat/completions HTTP/1.1", *(b"%s: %s" % line for line in request.headers.raw)]
                connection.sendall(b"\r\n".join([*lines, b"", request.content]))
                assert eventually(lambda: tiny_engine.stats().num_running == 1)
        assert eventually(lambda: tiny_engine.stats().num_finished.get("abort", 0) == num_aborted + 1)
    assert eventually(lambda: tiny_engine.stats().num_running == 0)
