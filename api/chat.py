"""`POST /v1/chat/completions`: a conversation in, an answer out, streamed or whole.

The whole answer is the collected stream: both are made from the same events. Called by `api/app`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api.body import json_body, new_id, service_of
from api.calls import ChoiceReader
from api.conversation import read_conversation
from api.logprobs import TokenTexts
from api.openapi import json_request, other_answers
from api.schema import ChatRequest, client_words
from api.service import now
from api.stream import (
    Collected,
    EventStream,
    Usage,
    answer_headers,
    collect,
    log_answers,
    merge,
    rendered,
    until_disconnect,
    whole_answer,
)
from engine.answer import Answer
from engine.request import Delta

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=json_request(ChatRequest) | other_answers("text/event-stream"))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation of text and audio."""
    body = await json_body(request, ChatRequest)
    service = service_of(request)
    sampling, opens_answer, tools = body.sampling(), body.opens_answer, body.tool_use()
    messages = await until_disconnect(request, read_conversation(body.messages, service))
    request_id = new_id("chatcmpl")
    starting = service.start_chat(
        messages,
        sampling,
        model=body.model,
        lora=body.lora,
        n=body.num_choices,
        add_generation_prompt=opens_answer,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs,
        tools=tools,
        request_id=request_id,
    )
    with client_words(body.words):
        answers = await until_disconnect(request, starting)
    view = _View(body, request_id, service.token_texts(answers[0]) if body.logprobs else None)
    headers = answer_headers(request_id, answers[0].receipt)
    if body.stream:
        return EventStream(view.chunks(answers), answers, headers)
    collected = await until_disconnect(request, collect(answers))
    return await whole_answer(lambda: view.whole(answers, collected), headers, is_long=bool(body.logprobs))


class _View:
    """One request's answers as JSON, in chunks or whole."""

    def __init__(self, body: ChatRequest, request_id: str, tokens: TokenTexts | None) -> None:
        self._body = body
        self._tokens = tokens
        self._head = {"id": request_id, "created": now(), "model": body.model}

    async def chunks(self, answers: list[Answer]) -> AsyncGenerator[dict[str, Any], None]:
        """A role chunk with the receipt, the text, a finish chunk for each choice; then usage if it was asked for."""
        readers = [ChoiceReader(answer.call_parser) for answer in answers]
        async with aclosing(merge(answers)) as events:
            async for event in events:
                for choice in self._choices(event.choice, event.delta, readers[event.choice]):
                    chunk = self._chunk([choice])
                    if event.delta.receipt is not None and "role" in choice["delta"]:
                        chunk["lora"] = event.delta.receipt.to_dict()
                    yield chunk
        usage = Usage.of(answers, self._body.num_choices)
        log_answers(answers, "chat", usage)
        if self._body.wants_usage:
            yield {**self._chunk([]), "usage": usage.to_dict()}

    def whole(self, answers: list[Answer], collected: list[Collected]) -> dict[str, Any]:
        """The answer to a client that does not stream."""
        usage = Usage.of(answers, self._body.num_choices)
        log_answers(answers, "chat", usage)
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [rendered(self._whole_choice(*each)) for each in zip(answers, collected, strict=True)],
            "usage": usage.to_dict(),
            "lora": collected[0].receipt.to_dict(),
        }

    def _whole_choice(self, answer: Answer, collected: Collected) -> dict[str, Any]:
        reader = ChoiceReader(answer.call_parser)
        reader.push(collected.text)
        reader.finish(collected.finish_reason)
        return {
            "index": answer.index,
            "message": reader.message(),
            "logprobs": self._tokens.chat(collected.logprobs) if self._tokens else None,
            "finish_reason": reader.finish_reason(collected.finish_reason),
            "stop_reason": collected.stop_reason,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        return {**chunk, "usage": None} if self._body.wants_usage else chunk

    def _choices(self, index: int, delta: Delta, reader: ChoiceReader) -> list[dict[str, Any]]:
        """What one event of the engine becomes: none, one or several chunks' choices."""
        found = []
        if delta.receipt is not None:
            found.append(_choice(index, {"role": "assistant", "content": ""}))
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += reader.finish(delta.finish_reason)
        if delta.logprobs and not parts:
            parts = [{"content": ""}]
        for place, part in enumerate(parts):
            logprobs = self._tokens.chat(delta.logprobs) if self._tokens and delta.logprobs and not place else None
            found.append({**_choice(index, part), "logprobs": logprobs})
        if delta.finish_reason is not None:
            reason = reader.finish_reason(delta.finish_reason)
            found.append({**_choice(index, {}), "finish_reason": reason, "stop_reason": delta.stop_reason})
        return found


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
