"""The engine: one base model, many LoRA adapters, one batch.

`Engine` serves programs that stream; `LLM` is the offline API. Names are imported when first used, so that a part of the
package can be imported without loading the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapters.resolvers import LoRAResolver, LoRAResolverRegistry
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.llm import LLM
    from engine.request import LoRARequest, RequestOutput, SamplingParams, TranscriptOutput

__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "LoRARequest",
    "LoRAResolver",
    "LoRAResolverRegistry",
    "RequestOutput",
    "SamplingParams",
    "TranscriptOutput",
]

_HOMES = {
    "LLM": "engine.llm",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "LoRARequest": "engine.request",
    "LoRAResolver": "adapters.resolvers",
    "LoRAResolverRegistry": "adapters.resolvers",
    "RequestOutput": "engine.request",
    "SamplingParams": "engine.request",
    "TranscriptOutput": "engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
