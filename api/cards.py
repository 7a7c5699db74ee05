"""Model cards, as `/v1/models` shows them: OpenAI's fields, vLLM's, and an adapter's own under `lora`. Used by `service`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EMBEDDED_MODEL

if TYPE_CHECKING:
    from adapters.records import AdapterInfo
    from engine.engine import Engine


def base_card(engine: Engine, name: str) -> dict[str, Any]:
    """The card of the base model under one of its names."""
    model = engine.config.model
    root = engine.model_names[0] if Path(model) == EMBEDDED_MODEL else model
    return _card(engine, name, root=root, parent=None, created=engine.created, lora=None)


def adapter_card(engine: Engine, info: AdapterInfo) -> dict[str, Any]:
    """The card of an adapter, with the `lora` extension."""
    lora = {
        "rank": info.rank,
        "alpha": info.alpha,
        "target_modules": info.target_modules,
        "scale": info.scale,
        "bytes": info.num_bytes,
        "generation": info.generation,
        "state": info.state,
        "pinned": info.pinned,
        "default_for": info.default_for,
        "created": info.created,
    }
    return _card(engine, info.name, root=info.source, parent=parent_of(engine, info), created=info.created, lora=lora)


def parent_of(engine: Engine, info: AdapterInfo) -> str:
    """The model that an adapter stands on: the one named when it was loaded, else the base model."""
    return info.base_model_name or engine.model_names[0]


def _card(
    engine: Engine, name: str, *, root: str, parent: str | None, created: float, lora: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "switchboard",
        "root": root,
        "parent": parent,
        "max_model_len": engine.max_model_len,
        "permission": [_permission(name, int(created))],
        "lora": lora,
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    """The one element of a card's `permission`, as vLLM's server has it."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
