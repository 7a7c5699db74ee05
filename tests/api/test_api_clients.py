"""Other people's programs get what they expect after a change of the base URL alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import httpx
import openai
import pytest

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


def test_litellm_asks_and_streams(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no price list from the network
    import litellm

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


def test_generated_requests_get_no_server_error_and_errors_keep_their_envelope(base_url: str, base_model: str) -> None:
    """Requests made from the server's own description, right and wrong ones; those that change adapters are left out."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json").include(
        path_regex="^/(v1/(models|chat|completions|adapters)|tokenize|detokenize|health|version)"
    )
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=base_url, timeout=60) as http:
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.method.upper() in ("PATCH", "DELETE") or operation.label == "POST /v1/adapters":
                continue
            strategy = operation.as_strategy()

            def check(case: Any) -> None:
                if isinstance(case.body, dict) and "model" in case.body and sum(statuses.values()) % 2:
                    case.body = {**case.body, "model": base_model}  # a made-up name would hide what lies behind it
                words = case.as_transport_kwargs()
                words.pop("cookies", None)
                words["url"] = words["url"].removeprefix("http://localhost")
                answer = http.request(words.pop("method"), words.pop("url"), **words)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                assert answer.status_code < 500, (case.as_curl_command(), answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}

            run = settings(
                max_examples=8, deadline=None, database=None, derandomize=True,
                suppress_health_check=list(HealthCheck), phases=[Phase.generate],
            )(given(case=strategy)(check))  # fmt: skip
            run()
    assert statuses.get(200, 0) >= 5 and statuses.get(400, 0) > 10, statuses
