"""`/v1/audio/transcriptions` on a live server."""

from __future__ import annotations

import io
from typing import Any

import httpx
import openai
import pytest
import soundfile

from engine import Engine
from engine.request import AudioPart, SamplingParams
from tests.oracles import tone


@pytest.fixture
def text(tiny_engine: Engine, wav: bytes) -> str:
    """What the engine itself makes of the recording."""
    prompt = tiny_engine.transcription_prompt(AudioPart(wav))
    [answer] = tiny_engine.start_sync(prompt, SamplingParams(temperature=0, max_tokens=12))
    return "".join(delta.text for delta in answer)


def transcribe(client: openai.OpenAI, model: str, file: bytes, **fields: Any) -> Any:
    extra = {"max_completion_tokens": 12, **fields.pop("extra_body", {})}
    return client.audio.transcriptions.create(model=model, file=("a.wav", file), extra_body=extra, **fields)


def test_a_recording_goes_to_the_default_adapter(client: openai.OpenAI, base_model: str, wav: bytes, text: str) -> None:
    answer = transcribe(client, base_model, wav)
    assert answer.text == text != ""
    assert (answer.lora["name"], answer.lora["reason"]) == ("speech", "default:audio")
    assert answer.usage.type == "tokens"
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    named = transcribe(client, "tower", wav)
    assert (named.lora["name"], named.lora["reason"]) == ("tower", "explicit")
    assert transcribe(client, base_model, wav, extra_body={"lora": "none"}).lora["reason"] == "opt-out"


def test_the_container_does_not_matter_and_its_name_neither(client: openai.OpenAI, base_model: str, text: str) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(0.5), 16_000, format="FLAC", subtype="PCM_16")
    assert transcribe(client, base_model, buffer.getvalue()).text == text


def test_plain_text_is_the_text_alone(http: httpx.Client, base_model: str, wav: bytes, text: str) -> None:
    fields = {"model": base_model, "response_format": "text", "max_completion_tokens": "12"}
    answer = http.post("/v1/audio/transcriptions", data=fields, files={"file": wav})
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == text
    assert answer.headers["x-lora-name"] == "speech"
    assert answer.headers["x-lora-reason"] == "default:audio"


def test_a_stream_adds_up_and_ends_with_the_whole_text(
    client: openai.OpenAI, base_model: str, wav: bytes, text: str
) -> None:
    events = list(transcribe(client, base_model, wav, stream=True))
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[0].lora["name"] == "speech"
    assert "".join(event.delta for event in events[:-1]) == text
    assert (events[-1].type, events[-1].text) == ("transcript.text.done", text)
    assert events[-1].usage.output_tokens == 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"response_format": "srt", "stream": "true"}, "response_format"),
        ({"response_format": "text", "stream": "true"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[]"),
        ({"include[]": "logprobs"}, "include[]"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities[]"),
        ({"timestamp_granularities": "word", "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
        ({"language": "en"}, "language"),
        ({"prompt": "Lisbon"}, "prompt"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "-1"}, "temperature"),
        ({"seed": "1.5"}, "seed"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens"),
        ({"max_completion_tokens": "100000"}, "max_completion_tokens"),
        ({"stream": "perhaps"}, "stream"),
        ({"wibble": "1"}, "wibble"),
        ({"model": ""}, "model"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(
    http: httpx.Client, base_model: str, wav: bytes, fields: dict[str, str], param: str
) -> None:
    answer = http.post("/v1/audio/transcriptions", data={"model": base_model, **fields}, files={"file": wav})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("file", [b"", b"not audio at all", b"RIFF\xff\xff\xff\xffWAVE"])
def test_a_file_that_holds_no_audio_is_refused(http: httpx.Client, base_model: str, file: bytes) -> None:
    answer = http.post("/v1/audio/transcriptions", data={"model": base_model}, files={"file": ("a.wav", file)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file"), answer.text


def test_a_form_without_a_file_is_refused(http: httpx.Client, base_model: str, wav: bytes) -> None:
    for answer in (
        http.post("/v1/audio/transcriptions", data={"model": base_model}),
        http.post("/v1/audio/transcriptions", json={"model": base_model}),
        http.post("/v1/audio/transcriptions", data={"model": base_model, "file": "text"}, files={}),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file"), answer.text


def test_an_unknown_model_is_not_found(client: openai.OpenAI, wav: bytes) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        transcribe(client, "nobody", wav)
