"""`POST /v1/audio/transcriptions`: a recording of any length in, what is said in it out, streamed or whole, in five formats.

Called by `api/app`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from api.body import new_id, service_of
from api.forms import Form
from api.openapi import multipart_request, other_answers
from api.schema import client_words
from api.service import Service
from api.stream import EventStream, answer_headers, until_disconnect
from api.subtitles import write_srt, write_vtt
from api.transcript import TranscriptDelta, TranscriptEvent, TranscriptSegment, TranscriptStart
from engine.errors import InvalidRequest
from engine.request import AudioPart, SamplingParams

log = logging.getLogger("switchboard.api")

router = APIRouter()

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
STREAMED_FORMATS = ("json", "verbose_json")
GRANULARITIES = ("timestamp_granularities[]", "timestamp_granularities")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_INTEGERS = ("top_k", "seed")
_TEXTS = (
    "file", "model", "lora", "language", "prompt", "response_format", "stream", "max_completion_tokens", "user",
    "chunking_strategy", *GRANULARITIES,
)  # fmt: skip
_KNOWN: Collection[str] = frozenset({*_TEXTS, *_NUMBERS, *_INTEGERS})
_UNSERVED: Mapping[str, str] = {
    "include[]": "log probabilities are not served here; use /v1/chat/completions",
    "include": "log probabilities are not served here; use /v1/chat/completions",
    "known_speaker_names[]": "speakers are not told apart",
    "known_speaker_references[]": "speakers are not told apart",
    "hotwords": "not served; write the words into prompt",
    "to_language": "translation is not served; ask for it in /v1/chat/completions",
}
_SRT, _VTT = "application/x-subrip", "text/vtt"
_FORM = multipart_request(
    {"file": "file", "model": "string"},
    {
        **dict.fromkeys(("lora", "language", "prompt", "response_format", "timestamp_granularities[]"), "string"),
        **dict.fromkeys(_NUMBERS, "number"),
        **dict.fromkeys((*_INTEGERS, "max_completion_tokens"), "integer"),
        "stream": "boolean",
    },
)


def known_fields() -> set[str]:
    """Fields of the form that are served, each by one name."""
    return set(_KNOWN) - {"timestamp_granularities"}


@dataclass
class _Transcript:
    """A recording's events so far.

    Attributes:
        language: what the client said is spoken.
        temperature: of the sampling.
    """

    start: TranscriptStart
    language: str | None
    temperature: float
    texts: list[str] = field(default_factory=list)
    segments: list[TranscriptSegment] = field(default_factory=list)

    def add(self, event: TranscriptEvent) -> None:
        """Take the next event in."""
        if isinstance(event, TranscriptDelta):
            self.texts.append(event.text)
        elif isinstance(event, TranscriptSegment):
            self.segments.append(event)

    @property
    def text(self) -> str:
        """The whole transcript."""
        return "".join(self.texts)

    def usage(self) -> dict[str, Any]:
        """Tokens of all pieces."""
        num_prompt = sum(segment.num_prompt_tokens for segment in self.segments)
        num_output = sum(len(segment.token_ids) for segment in self.segments)
        return {
            "type": "tokens",
            "input_tokens": num_prompt,
            "output_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }

    def verbose(self) -> dict[str, Any]:
        """What `verbose_json` has beside the text."""
        return {
            "task": "transcribe",
            "language": self.language or "unknown",
            "duration": round(self.start.duration, 3),
            "segments": [segment_json(segment, self.temperature) for segment in self.segments],
        }


@router.post(
    "/v1/audio/transcriptions",
    openapi_extra=_FORM | other_answers("text/plain", _SRT, _VTT, "text/event-stream"),
)
async def create_transcription(request: Request) -> Response:
    """Write down what is said in a recording; the answer is JSON, plain text or subtitles."""
    service = service_of(request)
    async with request.form(max_files=1, max_fields=64) as data:
        form = Form(data)
        form.check_fields(_KNOWN, _UNSERVED)
        files = form.files(["file"])
        if not files:
            raise InvalidRequest(
                "file is missing; send the recording as a file in a multipart form.",
                param="file",
                code="missing_required_parameter",
            )
        response_format = _response_format(form)
        _check_times(form, response_format)
        request_id = new_id("transcribe")
        audio = AudioPart(await files[0].read(), "file")
    is_verbose = response_format == "verbose_json"
    with client_words({"messages": "file", "max_tokens": "max_completion_tokens"}):
        sampling = _sampling(form, has_logprobs=is_verbose)
        events = _start(service, form, audio, sampling, request_id)
        try:
            first = await until_disconnect(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
    assert isinstance(first, TranscriptStart)
    transcript = _Transcript(first, form.text("language"), sampling.temperature)
    headers = answer_headers(request_id, first.receipt)
    if form.switch("stream"):
        return EventStream(_chunks(events, transcript, request_id, is_verbose=is_verbose), [], headers)
    await until_disconnect(request, _collect(events, transcript))
    _log(transcript, request_id)
    return _answer(transcript, response_format, headers)


def segment_json(segment: TranscriptSegment, temperature: float) -> dict[str, Any]:
    """A segment in OpenAI's form. `compression_ratio` is Whisper's: bytes of the text over its bytes under zlib."""
    text = segment.text.encode()
    return {
        "id": segment.index,
        "seek": round(100 * segment.start),
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": temperature,
        "avg_logprob": round(segment.avg_logprob or 0.0, 6),
        "compression_ratio": round(len(text) / len(zlib.compress(text)), 4),
        "no_speech_prob": round(segment.quiet_share, 4),
    }


def _start(
    service: Service, form: Form, audio: AudioPart, sampling: SamplingParams, request_id: str
) -> AsyncGenerator[TranscriptEvent, None]:
    form.switch("stream")
    return service.transcribe(
        audio,
        sampling,
        model=form.required_text("model"),
        lora=form.text("lora") or None,
        language=form.text("language") or None,
        prompt=form.text("prompt") or None,
        request_id=request_id,
    )


def _response_format(form: Form) -> str:
    wanted = form.text("response_format") or "json"
    if wanted not in FORMATS:
        raise InvalidRequest(
            f"response_format is {wanted[:60]!r}, but only {', '.join(FORMATS)} are served.", param="response_format"
        )
    if wanted not in STREAMED_FORMATS and form.switch("stream"):
        raise InvalidRequest(
            "A stream is made of JSON events; drop response_format or stream.", param="response_format"
        )
    return wanted


def _check_times(form: Form, response_format: str) -> None:
    """Refuse times of words, and times where the format has none; a recording is cut at silence by itself alone."""
    for name in GRANULARITIES:
        wanted = form.texts(name)
        other = next((value for value in wanted if value != "segment"), None)
        if other is not None:
            raise InvalidRequest(
                f"{name} is {other[:60]!r}, but only 'segment' is served; the models give no times of words.",
                param=name,
            )
        if wanted and response_format != "verbose_json":
            raise InvalidRequest(f"{name} needs response_format verbose_json.", param=name)
    strategy = form.text("chunking_strategy") or "auto"
    if strategy != "auto":
        raise InvalidRequest(
            f"chunking_strategy is {strategy[:60]!r}, but only 'auto' is served: a recording is cut at silence.",
            param="chunking_strategy",
        )


def _sampling(form: Form, *, has_logprobs: bool) -> SamplingParams:
    """Greedy to a bound that follows the audio unless the form says otherwise."""
    values: dict[str, Any] = {name: form.number(name) for name in _NUMBERS} | {
        name: form.integer(name) for name in _INTEGERS
    }
    given = {name: value for name, value in values.items() if value is not None}
    logprobs = {"logprobs": 0} if has_logprobs else {}
    max_tokens = form.integer("max_completion_tokens")
    return SamplingParams(**{"temperature": 0.0, **given, **logprobs, "max_tokens": max_tokens})


async def _collect(events: AsyncGenerator[TranscriptEvent, None], transcript: _Transcript) -> None:
    async with aclosing(events):
        async for event in events:
            transcript.add(event)


def _answer(transcript: _Transcript, response_format: str, headers: Mapping[str, str]) -> Response:
    if response_format == "text":
        return PlainTextResponse(transcript.text, headers=headers)
    if response_format == "srt":
        return Response(write_srt(transcript.segments), media_type=f"{_SRT}; charset=utf-8", headers=headers)
    if response_format == "vtt":
        return Response(write_vtt(transcript.segments), media_type=f"{_VTT}; charset=utf-8", headers=headers)
    body: dict[str, Any] = {"text": transcript.text}
    if response_format == "verbose_json":
        seconds = round(transcript.start.duration, 3)
        body |= {**transcript.verbose(), "usage": {"type": "duration", "seconds": seconds}}
    else:
        body["usage"] = transcript.usage()
    return JSONResponse({**body, "lora": transcript.start.receipt.to_dict()}, headers=headers)


async def _chunks(
    events: AsyncGenerator[TranscriptEvent, None], transcript: _Transcript, request_id: str, *, is_verbose: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """OpenAI's events: deltas (the first is empty and carries the receipt), then the whole text with its usage.

    An empty delta with `segment` and `progress` follows each segment.
    """
    start = transcript.start
    progress = {"segments": 0, "total": start.total, "seconds": 0.0, "duration": round(start.duration, 3)}
    yield _delta("", lora=start.receipt.to_dict(), progress=progress)
    async with aclosing(events):
        async for event in events:
            transcript.add(event)
            if isinstance(event, TranscriptDelta):
                yield _delta(event.text)
            elif isinstance(event, TranscriptSegment):
                progress = {**progress, "segments": event.index + 1, "seconds": round(event.end, 3)}
                times = {"id": event.index, "start": round(event.start, 3), "end": round(event.end, 3)}
                yield _delta("", segment={**times, "text": event.text}, progress=progress)
    _log(transcript, request_id)
    extra = transcript.verbose() if is_verbose else {}
    yield {"type": "transcript.text.done", "text": transcript.text, "usage": transcript.usage(), **extra}


def _delta(text: str, **extra: Any) -> dict[str, Any]:
    return {"type": "transcript.text.delta", "delta": text, **extra}


def _log(transcript: _Transcript, request_id: str) -> None:
    """One line for a recording that was answered."""
    receipt, usage = transcript.start.receipt, transcript.usage()
    log.info(
        "event=answered route=transcriptions request=%s adapter=%s reason=%s seconds=%.1f segments=%d prompt_tokens=%d "
        "output_tokens=%d",
        request_id,
        receipt.name or "none",
        receipt.reason,
        transcript.start.duration,
        transcript.start.total,
        usage["input_tokens"],
        usage["output_tokens"],
    )
