"""`POST /v1/audio/transcriptions`: a recording in, what is said in it out, streamed or whole. Called by `api/app`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from api.body import new_id, service_of
from api.forms import Form
from api.openapi import multipart_request
from api.schema import client_words
from api.service import Service
from api.stream import EventStream, Usage, answer_headers, collect, log_answers, merge, until_disconnect
from engine.answer import Answer
from engine.errors import InvalidRequest
from engine.request import AudioPart, SamplingParams

router = APIRouter()

FORMATS = ("json", "text")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_INTEGERS = ("top_k", "seed")
_TEXTS = ("file", "model", "lora", "language", "prompt", "response_format", "stream", "max_completion_tokens", "user")
_KNOWN: Collection[str] = frozenset({*_TEXTS, *_NUMBERS, *_INTEGERS})
_UNSERVED: Mapping[str, str] = {
    "timestamp_granularities[]": "time stamps are not served",
    "timestamp_granularities": "time stamps are not served",
    "include[]": "log probabilities are not served here; use /v1/chat/completions",
    "include": "log probabilities are not served here; use /v1/chat/completions",
    "chunking_strategy": "a recording is read in one piece",
    "known_speaker_names[]": "speakers are not told apart",
    "known_speaker_references[]": "speakers are not told apart",
    "hotwords": "not served; write the words into prompt",
    "to_language": "translation is not served; ask for it in /v1/chat/completions",
}
_FORM = multipart_request(
    {"file": "file", "model": "string"},
    {
        **dict.fromkeys(("lora", "language", "prompt", "response_format"), "string"),
        **dict.fromkeys(_NUMBERS, "number"),
        **dict.fromkeys((*_INTEGERS, "max_completion_tokens"), "integer"),
        "stream": "boolean",
    },
)


@router.post("/v1/audio/transcriptions", openapi_extra=_FORM)
async def create_transcription(request: Request) -> Response:
    """Write down what is said in a recording; the answer is JSON or plain text."""
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
        model, response_format = form.required_text("model"), _response_format(form)
        request_id = new_id("transcribe")
        audio = AudioPart(await files[0].read(), "file")
    with client_words({"messages": "file", "max_tokens": "max_completion_tokens"}):
        answer = await until_disconnect(request, _start(service, form, audio, model, request_id))
    headers = answer_headers(request_id, answer.receipt)
    if form.switch("stream"):
        return EventStream(_chunks(answer), [answer], headers)
    [collected] = await until_disconnect(request, collect([answer]))
    usage = Usage.of([answer], 1)
    log_answers([answer], "transcriptions", usage)
    if response_format == "text":
        return PlainTextResponse(collected.text, headers=headers)
    body = {"text": collected.text, "usage": _usage(usage), "lora": collected.receipt.to_dict()}
    return JSONResponse(body, headers=headers)


async def _start(service: Service, form: Form, audio: AudioPart, model: str, request_id: str) -> Answer:
    form.switch("stream")
    return await service.start_transcription(
        audio,
        _sampling(form),
        model=model,
        lora=form.text("lora") or None,
        language=form.text("language") or None,
        prompt=form.text("prompt") or None,
        request_id=request_id,
    )


def _response_format(form: Form) -> str:
    wanted = form.text("response_format") or "json"
    if wanted not in FORMATS:
        raise InvalidRequest(
            f"response_format is {wanted[:60]!r}, but only {' and '.join(FORMATS)} are served.", param="response_format"
        )
    if wanted == "text" and form.switch("stream"):
        raise InvalidRequest(
            "A stream is made of JSON events; drop response_format or stream.", param="response_format"
        )
    return wanted


def _sampling(form: Form) -> SamplingParams:
    """Greedy to the end of the context unless the form says otherwise."""
    values: dict[str, Any] = {name: form.number(name) for name in _NUMBERS} | {
        name: form.integer(name) for name in _INTEGERS
    }
    given = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(**{"temperature": 0.0, **given, "max_tokens": form.integer("max_completion_tokens")})


async def _chunks(answer: Answer) -> AsyncGenerator[dict[str, Any], None]:
    """OpenAI's events: deltas (the first is empty and carries the receipt), then the whole text with its usage."""
    texts = []
    async with aclosing(merge([answer])) as events:
        async for event in events:
            delta = event.delta
            if delta.receipt is not None:
                yield {"type": "transcript.text.delta", "delta": "", "lora": delta.receipt.to_dict()}
            if delta.text:
                texts.append(delta.text)
                yield {"type": "transcript.text.delta", "delta": delta.text}
    usage = Usage.of([answer], 1)
    log_answers([answer], "transcriptions", usage)
    yield {"type": "transcript.text.done", "text": "".join(texts), "usage": _usage(usage)}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "type": "tokens",
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
