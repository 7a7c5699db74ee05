"""`response_format`: whatever the model would rather say, the answer is JSON of the schema; a schema that is wrong is a 400."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from jsonschema import validate

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def as_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 3, "n": 3},
        {"temperature": 1.0, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.5, "model": "style", "stream": True},
    ],
)
def test_an_answer_follows_its_schema_however_it_is_sampled(
    http: httpx.Client, base_model: str, fields: dict[str, Any]
) -> None:
    body = {"model": base_model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, **fields}
    plain = http.post("/v1/chat/completions", json={**body, "stream": False, "max_tokens": 20}).json()
    with pytest.raises(ValueError):  # so it is not the model's own doing
        json.loads(plain["choices"][0]["message"]["content"])
    answer = http.post("/v1/chat/completions", json={**body, "response_format": as_format(PERSON)})
    assert answer.status_code == 200, answer.text
    if fields.get("stream"):
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        texts = ["".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)]
        reasons = [chunks[-1]["choices"][0]["finish_reason"]]
    else:
        texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
        reasons = [choice["finish_reason"] for choice in answer.json()["choices"]]
    assert set(reasons) == {"stop"}
    for text in texts:
        validate(json.loads(text), PERSON)


def test_a_guided_answer_shares_batches_with_others_and_changes_none(client: openai.OpenAI, base_model: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(is_guided: bool) -> str:
        extra: Any = {"response_format": as_format(PERSON)} if is_guided else {}
        answer = client.chat.completions.create(
            model=base_model, messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=120, **extra
        )
        return str(answer.choices[0].message.content)

    alone = [ask(True), ask(False)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, [True, False] * 3))
    assert together == alone * 3


def test_json_object_is_an_object_and_text_is_anything(http: httpx.Client, base_model: str) -> None:
    body = {"model": base_model, "prompt": "a", "temperature": 0, "max_tokens": 30}
    start = http.post("/v1/completions", json={**body, "response_format": {"type": "json_object"}}).json()
    assert start["choices"][0]["text"].lstrip().startswith("{")
    plain, text = (
        http.post("/v1/completions", json={**body, **extra}).json()["choices"][0]["text"]
        for extra in ({}, {"response_format": {"type": "text"}})
    )
    assert plain == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.type"),
        ({"response_format": as_format({"type": "objekt"})}, "response_format.json_schema.schema"),
        ({"response_format": as_format({"$ref": "https://example.com/x"})}, "response_format.json_schema.schema"),
        ({"response_format": as_format({"enum": ["x" * 300_000]})}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "text", "grammar": "x"}}, "response_format.grammar"),
    ],
)
def test_a_format_that_cannot_be_served_is_refused_by_field(
    http: httpx.Client, base_model: str, fields: dict[str, Any], param: str
) -> None:
    for route, prompt in (
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("completions", {"prompt": "a"}),
    ):
        answer = http.post(f"/v1/{route}", json={"model": base_model, **prompt, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
