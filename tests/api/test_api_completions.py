"""`/v1/completions`, `/tokenize` and `/detokenize` on a live server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

PROMPT = "Once upon a time"


def complete(client: openai.OpenAI, model: str, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(**{"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})


def test_text_and_its_tokens_are_the_same_prompt(client: openai.OpenAI, http: httpx.Client, base_model: str) -> None:
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    by_text, by_tokens = complete(client, base_model, PROMPT), complete(client, base_model, tokens)
    assert by_text.choices[0].text == by_tokens.choices[0].text != ""
    assert by_text.usage.prompt_tokens == len(tokens)
    assert by_text.lora["reason"] == "base"


def test_several_prompts_are_answered_in_order_each_with_n_choices(client: openai.OpenAI) -> None:
    prompts = ["one", "two", "three"]
    alone = [complete(client, "style", prompt).choices[0].text for prompt in prompts]
    answer = complete(client, "style", prompts, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]
    assert answer.usage.prompt_tokens == len("onetwothree")
    assert answer.usage.completion_tokens == 48
    assert answer.lora["name"] == "style"
    tokens = complete(client, "style", [[ord("o") - 33, 1], [2]])
    assert len(tokens.choices) == 2


def test_echo_puts_the_prompt_before_the_answer_whole_and_streamed(
    client: openai.OpenAI, http: httpx.Client, base_model: str
) -> None:
    text = complete(client, base_model, PROMPT).choices[0].text
    assert complete(client, base_model, PROMPT, echo=True).choices[0].text == PROMPT + text
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert complete(client, base_model, [tokens], echo=True).choices[0].text == PROMPT + text
    stream = complete(client, base_model, PROMPT, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == PROMPT + text


def test_a_stream_begins_with_the_receipt_and_adds_up(client: openai.OpenAI) -> None:
    whole = complete(client, "style", ["a", "b"], logprobs=2)
    chunks = list(
        complete(client, "style", ["a", "b"], logprobs=2, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].lora["name"] == "style"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    for index in (0, 1):
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        expected = whole.choices[index]
        assert "".join(part.text for part in parts) == expected.text
        assert parts[-1].finish_reason == expected.finish_reason == "length"
        logprobs = [part.logprobs for part in parts if part.logprobs]
        values = [value for each in logprobs for value in each.token_logprobs]
        assert values == pytest.approx(expected.logprobs.token_logprobs, abs=1e-4)
        assert [start for each in logprobs for start in each.text_offset] == expected.logprobs.text_offset


def test_log_probabilities_name_the_chosen_token_and_its_rivals(client: openai.OpenAI, base_model: str) -> None:
    logprobs = complete(client, base_model, PROMPT, logprobs=3).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 8
    for token, value, rivals in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(rivals.values()) == value  # Greedy: the chosen one is the likeliest.
        assert "\ufffd" in token or rivals[token] == value
    none = complete(client, base_model, PROMPT, logprobs=0).choices[0].logprobs
    assert [len(rivals) for rivals in none.top_logprobs] == [1] * 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"prompt": [999_999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "long " * 500}, "prompt"),
        ({"prompt": ["fine", "long " * 500]}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "prompt"),
        ({"max_tokens": 10**9}, "max_tokens"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_field(
    http: httpx.Client, base_model: str, fields: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/completions", json={"model": base_model, "prompt": "hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_tokens_and_text_are_each_others_inverse(http: httpx.Client, base_model: str) -> None:
    text = "Gr\u00fc\u00dfe \N{SNOWMAN} <|end_of_text|>"
    answer = http.post("/tokenize", json={"model": base_model, "prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert http.post("/tokenize", json={"prompt": "hi"}).json()["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "model"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/detokenize", {"tokens": [999_999]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
def test_token_routes_refuse_by_field(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def chunks_of(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **body}).text
    *lines, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_usage_is_not_in_a_stream_unless_asked_for(http: httpx.Client, base_model: str, options: Any) -> None:
    chunks = chunks_of(http, {"model": base_model, "stream": True, "stream_options": options})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_usage_on_request_is_one_last_chunk_and_counts_what_was_cached(http: httpx.Client) -> None:
    body = {"model": "style", "prompt": PROMPT * 8, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks_of(http, body)
    *chunks, last = chunks_of(http, body)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8
    assert 0 < last["usage"]["prompt_tokens_details"]["cached_tokens"] < last["usage"]["prompt_tokens"]
