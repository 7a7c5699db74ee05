"""`POST /tokenize` and `POST /detokenize`, as vLLM's server has them. Called by `api/app`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from api.body import json_body, service_of
from api.conversation import read_conversation
from api.openapi import json_request
from api.schema import DetokenizeRequest, TokenizeRequest
from api.service import Service
from api.tools import read_tools
from engine.errors import InvalidRequest
from engine.request import ChatPrompt, TextPrompt

router = APIRouter()


@router.post("/tokenize", openapi_extra=json_request(TokenizeRequest))
async def tokenize(request: Request) -> dict[str, Any]:
    """Token ids of a text, or of messages as the chat template renders them."""
    body = await json_body(request, TokenizeRequest)
    service = service_of(request)
    await service.find_model(body.model)
    token_ids = await _token_ids(service, body)
    tokenizer = await service.tokenizer(body.model)
    strings = tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": service.engine.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }


async def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either prompt or messages.", param="prompt")
    if body.prompt is None:
        messages = await read_conversation(body.messages, service)
        is_continued = bool(body.continue_final_message)
        opens_answer = body.add_generation_prompt is not False and not is_continued
        kwargs = body.chat_template_kwargs or {}
        tools = read_tools(body.tools, None)
        prompt = ChatPrompt(messages, opens_answer, is_continued, kwargs, tools=tools)
        return await service.tokenize(prompt, body.model)
    if body.tools:
        raise InvalidRequest("tools need messages; send them instead of prompt.", param="tools")
    if body.add_special_tokens is False:
        return list((await service.tokenizer(body.model)).encode(body.prompt, add_special_tokens=False))
    return await service.tokenize(TextPrompt(body.prompt), body.model)


@router.post("/detokenize", openapi_extra=json_request(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of token ids, special tokens included."""
    body = await json_body(request, DetokenizeRequest)
    service = service_of(request)
    await service.find_model(body.model)
    service.check_token_ids(body.tokens, "tokens")
    return {"prompt": (await service.tokenizer(body.model)).decode(body.tokens)}
