"""`GET /v1/models` and `GET /v1/models/{id}`: cards of the base model and of the adapters. Called by `api/app`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from api.body import service_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The base model under each of its names, and every adapter."""
    return {"object": "list", "data": await service_of(request).model_cards()}


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> dict[str, Any]:
    """The card of one model or adapter."""
    return await service_of(request).model_card(model_id)
