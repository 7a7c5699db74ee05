"""Recordings longer than the model's window: in pieces, in order, in every format, by one version of one adapter."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from api.service import Service
from api.settings import ServerSettings
from api.transcript import TranscriptDelta, TranscriptEvent, TranscriptSegment, TranscriptStart
from engine import Engine
from engine.errors import InvalidRequest, MediaError, Overloaded, RequestTimeout
from engine.recording import Joint
from engine.request import AudioPart, SamplingParams
from engine.transcription import TranscriptPrompts
from engine.wordings import Wording
from tests.api.test_api_chat import eventually
from tests.engine.test_media import FILES
from tests.oracles import tone
from tests.pace import held_after, held_before

RATE = 16_000
GREEDY = SamplingParams(temperature=0, max_tokens=6)
PAUSES = (0.3, 0.8, 0.9, 0.7, 1.0)
BURSTS = (0.7, 1.1, 0.5, 0.9)
WINDOW = 2.0


def clips() -> tuple[np.ndarray, list[tuple[float, float]]]:
    """[S] float32 of four tones with silence around them, and when each sounds."""
    parts, times, now = [], [], 0.0
    for index, (pause, burst) in enumerate(zip(PAUSES, (*BURSTS, 0.0), strict=True)):
        parts += [np.zeros(round(pause * RATE), np.float32), tone(burst, pitch=220 + 110 * index)]
        if burst:
            times.append((now + pause, now + pause + burst))
        now += pause + burst
    return np.concatenate(parts), times


SAMPLES, TIMES = clips()


@pytest.fixture(scope="module")
def wav_file() -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, SAMPLES, RATE, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def short_window(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_engine.recordings.__dict__, "window_seconds", WINDOW)


@pytest.fixture
def texts(tiny_engine: Engine) -> list[str]:
    """What the engine itself makes of each piece."""
    read = tiny_engine.recordings.read(AudioPart((SAMPLES, RATE)))
    assert len(read.pieces) == len(BURSTS)
    found = []
    for piece in read.pieces:
        [answer] = tiny_engine.start_sync(tiny_engine.transcription_prompt(read.part(piece)), GREEDY)
        found.append("".join(delta.text for delta in answer))
    assert len(set(found)) > 1
    return found


def joined(texts: list[str]) -> str:
    joint = Joint()
    return "".join(joint.before(index, text) + text for index, text in enumerate(texts) if text)


def transcribe(client: openai.OpenAI, model: str, file: bytes, **fields: Any) -> Any:
    extra = {"max_completion_tokens": 6, **fields.pop("extra_body", {})}
    return client.audio.transcriptions.create(model=model, file=("a.wav", file), extra_body=extra, **fields)


def test_the_text_is_that_of_its_pieces(
    client: openai.OpenAI, base_model: str, wav_file: bytes, texts: list[str]
) -> None:
    answer = transcribe(client, base_model, wav_file)
    assert answer.text == joined(texts)
    assert (answer.lora["name"], answer.lora["reason"]) == ("speech", "default:audio")
    assert answer.usage.output_tokens == 6 * len(texts)
    assert transcribe(client, base_model, wav_file, response_format="text") == joined(texts)


def test_verbose_json_has_segments_with_times(
    client: openai.OpenAI, base_model: str, wav_file: bytes, texts: list[str], tiny_engine: Engine
) -> None:
    answer = transcribe(
        client, base_model, wav_file, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (answer.task, answer.language, answer.text) == ("transcribe", "unknown", joined(texts))
    assert answer.duration == answer.usage.seconds == pytest.approx(SAMPLES.size / RATE, abs=0.001)
    assert [segment.text for segment in answer.segments] == texts
    assert [segment.id for segment in answer.segments] == [0, 1, 2, 3]
    found = [(segment.start, segment.end) for segment in answer.segments]
    assert np.abs(np.subtract(found, TIMES)).max() <= 0.03
    first = answer.segments[0]
    read = tiny_engine.recordings.read(AudioPart((SAMPLES, RATE)))
    prompt = tiny_engine.transcription_prompt(read.part(read.pieces[0]))
    [alone] = tiny_engine.start_sync(prompt, SamplingParams(temperature=0, max_tokens=6, logprobs=0))
    deltas = list(alone)
    assert first.tokens == [token for delta in deltas for token in delta.token_ids]
    logprobs = [token.logprob for delta in deltas for token in delta.logprobs]
    assert first.avg_logprob == pytest.approx(np.mean(logprobs), abs=1e-3) and first.avg_logprob < -0.01
    assert first.compression_ratio > 0 and first.temperature == 0 and 0 <= first.no_speech_prob < 0.1


@pytest.mark.parametrize(
    ("response_format", "kind", "mark"), [("srt", "application/x-subrip", ","), ("vtt", "text/vtt", r"\.")]
)
def test_subtitles_have_a_cue_for_each_segment(
    client: openai.OpenAI,
    http: httpx.Client,
    base_model: str,
    wav_file: bytes,
    response_format: Any,
    kind: str,
    mark: str,
) -> None:
    written = transcribe(client, base_model, wav_file, response_format=response_format)
    assert isinstance(written, str)
    number = rf"00:00:(\d\d){mark}(\d\d\d)"
    cues = re.findall(f"{number} --> {number}", written)
    found = [(int(a) + int(b) / 1000, int(c) + int(d) / 1000) for a, b, c, d in cues]
    assert np.abs(np.subtract(found, TIMES)).max() <= 0.03
    data = {"model": base_model, "response_format": response_format, "max_completion_tokens": "6"}
    answer = http.post("/v1/audio/transcriptions", data=data, files={"file": wav_file})
    assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
    assert answer.text == written
    assert answer.headers["x-lora-reason"] == "default:audio"


@pytest.mark.parametrize("response_format", ["json", "verbose_json"])
def test_a_stream_tells_segments_and_progress(
    client: openai.OpenAI, base_model: str, wav_file: bytes, texts: list[str], response_format: Any
) -> None:
    events = list(transcribe(client, base_model, wav_file, stream=True, response_format=response_format))
    *deltas, done = events
    assert {event.type for event in deltas} == {"transcript.text.delta"} and done.type == "transcript.text.done"
    assert deltas[0].lora["name"] == "speech" and deltas[0].progress["segments"] == 0
    assert [event for event in deltas[1:] if hasattr(event, "lora")] == []
    assert "".join(event.delta for event in deltas) == done.text == joined(texts)
    ends = [event for event in deltas[1:] if hasattr(event, "progress")]
    assert [event.segment["text"] for event in ends] == texts
    assert [event.progress["segments"] for event in ends] == [1, 2, 3, 4]
    assert all(event.progress["total"] == 4 and event.progress["duration"] == 6.9 for event in ends)
    assert [event.progress["seconds"] for event in ends] == [event.segment["end"] for event in ends]
    assert done.usage.output_tokens == 24
    assert hasattr(done, "segments") == (response_format == "verbose_json")


@pytest.mark.asyncio
async def test_the_async_client_streams_too(base_url: str, base_model: str, wav_file: bytes, texts: list[str]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0) as client:
        stream = await client.audio.transcriptions.create(
            model=base_model, file=("a.wav", wav_file), stream=True, extra_body={"max_completion_tokens": 6}
        )
        events = [event async for event in stream]
    assert events[-1].type == "transcript.text.done" and events[-1].text == joined(texts)


def test_times_of_words_are_refused_by_name(client: openai.OpenAI, base_model: str, wav_file: bytes) -> None:
    for granularities in (["word"], ["segment", "word"]):
        with pytest.raises(openai.BadRequestError) as caught:
            transcribe(
                client, base_model, wav_file, response_format="verbose_json", timestamp_granularities=granularities
            )
        assert caught.value.param == "timestamp_granularities[]"


@pytest.mark.parametrize("seconds", [0.2, 5.0])
def test_a_silent_recording_has_an_empty_transcript(client: openai.OpenAI, base_model: str, seconds: float) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(round(seconds * RATE), np.float32), RATE, format="WAV")
    answer = transcribe(client, base_model, buffer.getvalue(), response_format="verbose_json")
    assert (answer.text, answer.segments, answer.lora["reason"]) == ("", [], "default:audio")
    assert transcribe(client, base_model, buffer.getvalue(), response_format="vtt").strip() == "WEBVTT"
    events = list(transcribe(client, base_model, buffer.getvalue(), stream=True))
    assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]


@pytest.mark.parametrize("kind", FILES)
def test_every_container_is_cut_alike_under_any_name(http: httpx.Client, base_model: str, kind: str) -> None:
    at_48k = np.repeat(SAMPLES, 3)  # not band-limited, which does not matter to loudness
    data = {"model": base_model, "response_format": "verbose_json", "max_completion_tokens": "1"}
    wrong = "clip.wav" if kind != "wav" else "clip.mp3"
    answer = http.post("/v1/audio/transcriptions", data=data, files={"file": (wrong, FILES[kind](at_48k))})
    assert answer.status_code == 200, answer.text
    found = [(segment["start"], segment["end"]) for segment in answer.json()["segments"]]
    assert np.abs(np.subtract(found, TIMES)).max() <= 0.08  # lossy codecs smear and shift


def test_a_recording_over_the_limit_is_refused_before_the_stream_begins(
    http: httpx.Client, base_model: str, wav_file: bytes, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_engine.recordings, "_max_seconds", 3.0)
    answer = http.post(
        "/v1/audio/transcriptions", data={"model": base_model, "stream": "true"}, files={"file": wav_file}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert "longer than 3 seconds" in answer.json()["error"]["message"]


# The service, as the browser app calls it


@pytest.fixture
def service(tiny_engine: Engine) -> Service:
    return Service(tiny_engine, ServerSettings().resolve())


@pytest.fixture
def scratch(tiny_engine: Engine, speech_adapters: dict[str, Path]) -> Iterator[str]:
    """An adapter that a test may replace."""
    tiny_engine.adapters.load("scratch", str(speech_adapters["style"]))
    yield "scratch"
    if tiny_engine.adapters.contains("scratch"):
        tiny_engine.adapters.unload("scratch")


def listen(service: Service, **asked: Any) -> AsyncGenerator[TranscriptEvent, None]:
    return service.transcribe(AudioPart((SAMPLES, RATE), "file"), GREEDY, **asked)


async def wait_until_idle(engine: Engine) -> None:
    for _ in range(6000):
        stats = engine.stats()
        if stats.num_running == stats.num_waiting == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests are left")


@pytest.mark.asyncio
async def test_events_come_in_order_and_the_receipt_once(service: Service, texts: list[str]) -> None:
    events = [event async for event in listen(service)]
    start, *rest = events
    assert isinstance(start, TranscriptStart) and (start.total, start.receipt.name) == (4, "speech")
    assert start.duration == pytest.approx(SAMPLES.size / RATE)
    segments = [event for event in rest if isinstance(event, TranscriptSegment)]
    assert [(segment.index, segment.total, segment.text) for segment in segments] == [
        (index, 4, text) for index, text in enumerate(texts)
    ]
    indices = [event.index for event in rest if not isinstance(event, TranscriptStart)]
    assert len(indices) == len(rest) and indices == sorted(indices)
    assert "".join(event.text for event in rest if isinstance(event, TranscriptDelta)) == joined(texts)


@pytest.mark.asyncio
async def test_pieces_share_batches(service: Service, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiny_engine.stats().num_steps
    with held_before(tiny_engine, len(BURSTS)):
        _ = [event async for event in listen(service)]
    shared = tiny_engine.stats().num_steps - before
    monkeypatch.setattr(tiny_engine, "config", replace(tiny_engine.config, max_num_seqs=2))  # one at a time
    before = tiny_engine.stats().num_steps
    _ = [event async for event in listen(service)]
    alone = tiny_engine.stats().num_steps - before
    assert alone >= 4 * 6 and shared < 0.7 * alone


@pytest.mark.asyncio
async def test_one_version_answers_a_whole_recording(
    service: Service,
    tiny_engine: Engine,
    scratch: str,
    speech_adapters: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [event.text async for event in listen(service, lora=scratch) if isinstance(event, TranscriptSegment)]
    tiny_engine.adapters.load(scratch, str(speech_adapters["tower"]), load_inplace=True)
    other = [event.text async for event in listen(service, lora=scratch) if isinstance(event, TranscriptSegment)]
    assert other != expected
    tiny_engine.adapters.load(scratch, str(speech_adapters["style"]), load_inplace=True)
    monkeypatch.setattr(tiny_engine, "config", replace(tiny_engine.config, max_num_seqs=2))  # one at a time
    found = []
    async for event in listen(service, lora=scratch):
        if isinstance(event, TranscriptStart):
            tiny_engine.adapters.unload(scratch)
        elif isinstance(event, TranscriptSegment):
            found.append(event.text)
    assert found == expected
    await wait_until_idle(tiny_engine)
    tiny_engine.adapters.check_integrity()


@pytest.mark.asyncio
@pytest.mark.parametrize("num_events", [0, 1, 4])
async def test_whoever_stops_listening_leaves_nothing_behind(
    service: Service, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, num_events: int
) -> None:
    monkeypatch.setattr(tiny_engine, "config", replace(tiny_engine.config, max_num_seqs=2))  # one at a time
    held, started = [], []
    hold, start = tiny_engine.hold, tiny_engine.start

    async def note_hold(*args: Any, **kwargs: Any) -> Any:
        held.append(await hold(*args, **kwargs))
        return held[-1]

    async def note_start(*args: Any, **kwargs: Any) -> Any:
        started.append(kwargs["request_id"])
        return await start(*args, **kwargs)

    monkeypatch.setattr(tiny_engine, "hold", note_hold)
    monkeypatch.setattr(tiny_engine, "start", note_start)
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with held_after(tiny_engine, num_tokens=20):
        async with aclosing(service.transcribe(AudioPart((SAMPLES, RATE)), sampling)) as events:
            for _ in range(num_events):
                await anext(events)
    begun = list(started)
    assert len(begun) <= 1  # the other three never begin
    assert [route.handle is not None and route.handle._is_released for route in held] == [True] * min(num_events, 1)
    await wait_until_idle(tiny_engine)
    assert started == begun  # the others never begin
    listening = asyncio.ensure_future(anext(listen(service)))
    await asyncio.sleep(0)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await wait_until_idle(tiny_engine)
    tiny_engine.check_integrity()
    assert service._admission._num_starting == 0


@pytest.mark.asyncio
async def test_a_recording_waits_for_room_once_it_has_begun(tiny_engine: Engine, texts: list[str]) -> None:
    service = Service(tiny_engine, ServerSettings(max_queued_requests=1).resolve())
    segments = [event async for event in listen(service) if isinstance(event, TranscriptSegment)]
    assert [segment.text for segment in segments] == texts
    full = Service(tiny_engine, ServerSettings(max_queued_requests=1).resolve())
    full._admission._num_starting = 1
    with pytest.raises(Overloaded):
        await anext(listen(full))


@pytest.mark.asyncio
async def test_a_piece_that_fails_ends_the_recording_in_its_turn(
    service: Service, tiny_engine: Engine, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tiny_engine.start

    async def fail_third(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["request_id"].endswith("-2"):
            kwargs["held"].release()
            raise MediaError("broken", param="file")
        return await start(prompt, *args, **kwargs)

    monkeypatch.setattr(tiny_engine, "start", fail_third)
    found: list[TranscriptEvent] = []

    async def listen_on() -> None:
        async for event in listen(service):
            found.append(event)

    with pytest.raises(MediaError, match="broken"):
        await listen_on()
    assert [event.text for event in found if isinstance(event, TranscriptSegment)] == texts[:2]
    await wait_until_idle(tiny_engine)
    tiny_engine.check_integrity()


@pytest.mark.asyncio
@pytest.mark.parametrize("field", ["language", "prompt"])
async def test_what_the_model_does_not_take_is_refused_before_the_recording_is_read(
    service: Service, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(tiny_engine.recordings, "read", None)
    with pytest.raises(InvalidRequest, match=f"does not use {field}") as caught:
        await anext(listen(service, **{field: "en"}))
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"language": "en"}, "Write the English."),
        ({"language": "pt-BR"}, "Write the Portuguese."),
        ({"language": "german"}, "Write the German."),
        ({"prompt": "Lisbon {x}"}, "Write it. Words: Lisbon {x}"),
        ({"language": "zh", "prompt": "Lisbon"}, "Write the Chinese. Words: Lisbon"),
        ({"language": "xx"}, "language"),
    ],
)
def test_language_and_prompt_reach_models_that_take_them(
    http: httpx.Client,
    base_model: str,
    tiny_engine: Engine,
    wav_file: bytes,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, str],
    expected: str,
) -> None:
    wording = Wording("Write it.", language="Write the {language}.", context="{request} Words: {prompt}")
    monkeypatch.setattr(tiny_engine, "transcripts", TranscriptPrompts([wording], base_model, ()))
    asked = []
    start = tiny_engine.start

    async def listen_in(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(prompt.messages[0].content[1].text)
        return await start(prompt, *args, **kwargs)

    monkeypatch.setattr(tiny_engine, "start", listen_in)
    data = {"model": base_model, "max_completion_tokens": "1", **fields}
    answer = http.post("/v1/audio/transcriptions", data=data, files={"file": wav_file})
    if answer.status_code == 200:
        assert asked == [expected] * 4
    else:
        assert (answer.status_code, answer.json()["error"]["param"], asked) == (400, expected, [])


def test_texts_are_joined_by_a_space_where_the_script_has_one() -> None:
    assert joined(["one", "two ", "three", " four"]) == "one two three four"
    assert joined(["你好", "再见", "yes"]) == "你好再见 yes"
    assert joined(["", "one", "", "two"]) == "one two"


@pytest.mark.asyncio
async def test_the_time_that_a_request_may_take_is_for_the_whole_recording(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four pieces one after the other, each well within the time."""
    start = tiny_engine.start

    async def slow(*args: Any, **named: Any) -> Any:
        await asyncio.sleep(0.2)
        return await start(*args, **named)

    monkeypatch.setattr(tiny_engine, "start", slow)
    monkeypatch.setattr(tiny_engine, "config", replace(tiny_engine.config, max_num_seqs=2))
    service, seen = Service(tiny_engine, ServerSettings(request_timeout=0.6).resolve()), list[TranscriptEvent]()

    async def read() -> None:
        async with aclosing(service.transcribe(AudioPart((SAMPLES, RATE)), GREEDY)) as events:
            async for event in events:
                seen.append(event)

    with pytest.raises(RequestTimeout):
        await read()
    assert len([event for event in seen if isinstance(event, TranscriptSegment)]) < len(BURSTS)
    assert await asyncio.to_thread(eventually, lambda: tiny_engine.stats().num_running == 0)
