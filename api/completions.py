"""`POST /v1/completions`: raw prompts in, continuations out, streamed or whole. Called by `api/app`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api.body import json_body, new_id, service_of
from api.logprobs import TokenTexts
from api.openapi import json_request, other_answers
from api.schema import MAX_CHOICES, SAMPLED_WORDS, CompletionRequest, client_words
from api.service import Service, now
from api.stream import (
    Collected,
    EventStream,
    Usage,
    abort_all,
    answer_headers,
    collect,
    log_answers,
    merge,
    rendered,
    until_disconnect,
    whole_answer,
)
from engine.answer import Answer
from engine.errors import InvalidRequest
from engine.request import Delta, TextPrompt, TokenLogprob, TokenPrompt

router = APIRouter()


@router.post("/v1/completions", openapi_extra=json_request(CompletionRequest) | other_answers("text/event-stream"))
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several, each as text or as token ids."""
    body = await json_body(request, CompletionRequest)
    service = service_of(request)
    request_id = new_id("cmpl")
    with client_words({"messages": "prompt", **SAMPLED_WORDS}):
        answers = await until_disconnect(request, _start_all(service, body, request_id))
    view = CompletionView(
        body, request_id, service.token_texts(answers[0]) if body.logprobs is not None else None, answers
    )
    headers = answer_headers(request_id, answers[0].receipt)
    if body.stream:
        return EventStream(view.chunks(), answers, headers)
    collected = await until_disconnect(request, collect(answers))
    is_long = bool(body.echo) or body.logprobs is not None
    return await whole_answer(lambda: view.whole(collected), headers, is_long=is_long)


async def _start_all(service: Service, body: CompletionRequest, request_id: str) -> list[Answer]:
    """Start every prompt's answers, in order of the prompts; if one is refused, none runs."""
    sampling, prompts = body.sampling(), body.prompts()
    if len(prompts) * body.num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with {body.num_choices} answers each are more than {MAX_CHOICES}; send fewer.",
            param="prompt",
        )
    starting = [
        service.start_completion(
            TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt),
            sampling,
            model=body.model,
            lora=body.lora,
            n=body.num_choices,
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{place}",
            is_let_in=place > 0,
        )
        for place, prompt in enumerate(prompts)
    ]
    tasks = [asyncio.ensure_future(start) for start in starting]
    try:
        return [answer for group in await asyncio.gather(*tasks) for answer in group]
    except BaseException:
        for outcome in await _settle(tasks):
            if isinstance(outcome, list):
                abort_all(outcome)
        raise


async def _settle(tasks: Sequence[asyncio.Future[list[Answer]]]) -> list[list[Answer] | BaseException]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


class CompletionView:
    """One request's answers as JSON, in chunks or whole.

    Args:
        body, request_id: of the request.
        tokens: spells tokens where log probabilities are wanted.
        answers: its answers, in order.
    """

    def __init__(
        self, body: CompletionRequest, request_id: str, tokens: TokenTexts | None, answers: list[Answer]
    ) -> None:
        self._body = body
        self._prompts = body.prompts()
        self._tokens = tokens
        self._scorer = tokens if body.echo else None
        self._answers = answers
        self._head = {"id": request_id, "object": "text_completion", "created": now(), "model": body.model}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """A chunk with the receipt (and the prompt, with `echo`), the text, a finish chunk; then usage if asked for.

        With `echo` and `logprobs` the prompt has a chunk of its own.
        """
        answers = self._answers
        text_start = [0] * len(answers)
        async with aclosing(merge(answers)) as events:
            async for event in events:
                if self._scorer and event.delta.prompt_logprobs:
                    # On another thread, since everyone's streams wait for this one.
                    choice, text_start[event.choice] = await asyncio.to_thread(
                        self._scored_prompt, self._scorer, event.choice, event.delta.prompt_logprobs
                    )
                    yield self._chunk([choice], event.delta)
                for choice in self._choices(event.choice, event.delta, text_start):
                    yield self._chunk([choice], event.delta)
        usage = Usage.of(answers, self._body.num_choices)
        log_answers(answers, "completions", usage)
        if self._body.wants_usage:
            yield {**self._chunk([], Delta()), "usage": usage.to_dict()}

    def whole(self, collected: list[Collected]) -> dict[str, Any]:
        """The answer to a client that does not stream."""
        usage = Usage.of(self._answers, self._body.num_choices)
        log_answers(self._answers, "completions", usage)
        choices = [rendered(self._whole_choice(index, each)) for index, each in enumerate(collected)]
        return {**self._head, "choices": choices, "usage": usage.to_dict(), "lora": collected[0].receipt.to_dict()}

    def _whole_choice(self, index: int, collected: Collected) -> dict[str, Any]:
        echoed = self._echo(index)
        return {
            **_choice(index, echoed + collected.text),
            "logprobs": self._logprobs(index, collected, echoed),
            "finish_reason": collected.finish_reason,
            "stop_reason": collected.stop_reason,
        }

    def _echo(self, choice: int) -> str:
        """The prompt's text where the client wants it back, else nothing."""
        if not self._body.echo:
            return ""
        prompt = self._prompts[choice // self._body.num_choices]
        return prompt if isinstance(prompt, str) else str(self._answers[0].tokenizer.decode(prompt))

    def _logprobs(self, choice: int, collected: Collected, echoed: str) -> dict[str, list[Any]] | None:
        """Those of the whole text that the choice gives back, which begins with `echoed`."""
        if self._tokens is None:
            return None
        answer = self._tokens.completion(collected.logprobs, len(echoed))
        if not self._body.echo:
            return answer
        prompt = self._tokens.prompt(self._answers[choice].prompt_token_ids, collected.prompt_logprobs, echoed)
        return {name: values + answer[name] for name, values in prompt.items()}

    def _scored_prompt(
        self, tokens: TokenTexts, choice: int, logprobs: Collection[TokenLogprob | None]
    ) -> tuple[dict[str, Any], int]:
        """The prompt's own choice in a stream, and the length of its text."""
        echoed = self._echo(choice)
        prompt = tokens.prompt(self._answers[choice].prompt_token_ids, logprobs, echoed)
        return {**_choice(choice, echoed), "logprobs": rendered(prompt)}, len(echoed)

    def _chunk(self, choices: list[dict[str, Any]], delta: Delta) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._body.wants_usage:
            chunk["usage"] = None
        if delta.receipt is not None:
            chunk["lora"] = delta.receipt.to_dict()
        return chunk

    def _choices(self, index: int, delta: Delta, text_start: list[int]) -> list[dict[str, Any]]:
        """What one event of the engine becomes; `text_start` [choices] is kept up to date for log probabilities."""
        found = []
        if delta.receipt is not None:
            found.append(_choice(index, "" if self._scorer else self._echo(index)))
        if delta.text or delta.logprobs:
            logprobs = None
            if self._tokens and delta.logprobs:
                logprobs = self._tokens.completion(delta.logprobs, text_start[index])
                text_start[index] += sum(map(len, logprobs["tokens"]))
            found.append({**_choice(index, delta.text), "logprobs": logprobs})
        if delta.finish_reason is not None:
            finish = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            found.append({**_choice(index, ""), **finish})
        return found


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}
