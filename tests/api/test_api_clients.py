"""Other people's programs get what they expect after a change of the base URL alone."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from types import ModuleType
from typing import Any

import openai
import pytest

log = logging.getLogger(__name__)
HI = [{"role": "user", "content": "hi"}]


@pytest.mark.asyncio
async def test_the_openai_package_waits_streams_hears_and_parses(
    base_url: str, base_model: str, audio_message: dict[str, Any], wav: bytes
) -> None:
    from pydantic import BaseModel, Field

    class Point(BaseModel):
        x: int = Field(ge=0, le=9)
        y: int = Field(ge=0, le=9)

    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:
        options: Any = {"model": base_model, "temperature": 0, "max_tokens": 8}
        whole = await client.chat.completions.create(messages=HI, **options)
        stream = await client.chat.completions.create(messages=HI, stream=True, **options)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(parts) == whole.choices[0].message.content
        heard = await client.chat.completions.create(messages=[audio_message], **options)
        assert heard.model_extra is not None and heard.model_extra["lora"]["name"] == "speech"
        written = await client.audio.transcriptions.create(model=base_model, file=("a.wav", wav))
        assert isinstance(written.text, str)
        parsed = await client.chat.completions.parse(
            messages=HI, response_format=Point, **{**options, "max_tokens": 300}
        )
        assert isinstance(parsed.choices[0].message.parsed, Point)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nobody", messages=HI)  # type: ignore[arg-type]


def test_litellm_asks_and_streams(base_url: str, litellm: ModuleType) -> None:
    ask: Any = {"model": "openai/style", "messages": HI, "api_base": f"{base_url}/v1", "api_key": "unused"}
    whole = litellm.completion(**ask, temperature=0, max_tokens=6)
    streamed = litellm.completion(**ask, temperature=0, max_tokens=6, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 6


def test_langchain_asks_and_streams(base_url: str, base_model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat: Any = ChatOpenAI(
        model=base_model, base_url=f"{base_url}/v1", api_key="unused", temperature=0, max_tokens=6, max_retries=0
    )
    whole = chat.invoke("hi")
    assert "".join(chunk.content for chunk in chat.stream("hi")) == whole.content
    assert whole.response_metadata["token_usage"]["completion_tokens"] == 6


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_asks_streams_and_uploads(base_url: str, base_model: str, wav: bytes) -> None:
    def curl(*words: str, body: bytes | None = None) -> str:
        ran = subprocess.run(["curl", "-sS", "--fail", "-m", "60", *words], input=body, capture_output=True, check=True)
        return ran.stdout.decode()

    ask = json.dumps({"model": base_model, "messages": HI, "max_tokens": 3, "stream": True, "ignore_eos": True})
    header = ("-H", "Content-Type: application/json")
    streamed = curl("-N", f"{base_url}/v1/chat/completions", *header, "-d", ask)
    assert streamed.startswith("data: {") and streamed.endswith("data: [DONE]\n\n")
    form = ("-F", "file=@-;filename=a.wav", "-F", f"model={base_model}", "-F", "response_format=text")
    curl(f"{base_url}/v1/audio/transcriptions", *form, body=wav)
    assert "switchboard_requests_total" in curl(f"{base_url}/metrics")
    with pytest.raises(subprocess.CalledProcessError):
        curl(f"{base_url}/v1/models/nobody")


def test_generated_requests_are_answered_as_the_server_describes_itself(base_url: str, base_model: str) -> None:
    """Requests made from the server's own description, right and wrong ones; those that change adapters are left out.

    None is a server error; statuses, content types and bodies are the described ones, errors in their envelope. The
    log says how many they were (`pytest --log-cli-level=info`).
    """
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.checks import content_type_conformance, response_schema_conformance, status_code_conformance

    checks = [status_code_conformance, content_type_conformance, response_schema_conformance]

    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json").include(
        path_regex="^/(v1/(models|chat|completions|audio|adapters)|tokenize|detokenize|health|version|metrics)"
    )
    statuses: dict[int, int] = {}
    labels = []
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.method.upper() in ("PATCH", "DELETE") or operation.label == "POST /v1/adapters":
            continue
        strategy = operation.as_strategy()
        labels.append(operation.label)

        def check(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body and sum(statuses.values()) % 2:
                case.body = {**case.body, "model": base_model}  # a made-up name would hide what lies behind it
            answer = case.call(base_url=base_url, timeout=60)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400:
                assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
            case.validate_response(answer, checks=checks)

        run = settings(
            max_examples=8, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        )(given(case=strategy)(check))  # fmt: skip
        run()
    log.info("operations=%d requests=%d statuses=%s", len(labels), sum(statuses.values()), sorted(statuses.items()))
    assert {"GET /metrics", "POST /v1/audio/transcriptions", "POST /v1/completions"} < set(labels)
    assert statuses.get(200, 0) >= 5 and statuses.get(400, 0) > 10, statuses
