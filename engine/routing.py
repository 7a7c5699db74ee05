"""Which adapter answers a prompt, and why: one rule for every route, the offline API and the browser.

A pure function of what the request names and which media the prompt holds. Media are those that were decoded, wherever
they stand in the prompt; their labels do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from engine.errors import InvalidRequest, ModelNotFound

AUTO = "auto"
NONE = "none"
RESERVED_NAMES = frozenset({AUTO, NONE})


@dataclass(frozen=True)
class Route:
    """The decision: an adapter's name (None for the base model) and the reason, as the receipt shows it."""

    name: str | None
    reason: str


def choose_route(
    *,
    model: str | None,
    lora: str | None,
    modalities: Collection[str],
    base_names: Collection[str],
    defaults: Mapping[str, str],
    is_adapter: Callable[[str], bool],
) -> Route:
    """Apply the routing rule.

    Args:
        model: the request's `model`; None means the base model.
        lora: the request's `lora`: None or "auto", "none", or an adapter's name.
        modalities: media that the prompt holds.
        base_names: names of the base model.
        defaults: modality -> adapter that applies by itself.
        is_adapter: whether a name is that of an adapter.

    Raises:
        ModelNotFound: a name is neither the base model's nor an adapter's.
        InvalidRequest: `model` and `lora` name different adapters.
    """
    named_by_model = None
    if model is not None and model not in base_names:
        if not is_adapter(model):
            raise ModelNotFound(f"The model {model!r} does not exist; GET /v1/models lists what does.", param="model")
        named_by_model = model
    if lora == NONE or (lora is not None and lora in base_names):
        return Route(None, "opt-out")
    if lora is not None and lora != AUTO:
        if not is_adapter(lora):
            raise ModelNotFound(f"The adapter {lora!r} does not exist; GET /v1/models lists what does.", param="lora")
        if named_by_model not in (None, lora):
            raise InvalidRequest(
                f"model names the adapter {named_by_model!r} and lora names {lora!r}; one prompt takes one adapter.",
                param="lora",
            )
        return Route(lora, "explicit")
    if named_by_model is not None:
        return Route(named_by_model, "explicit")
    matching = {modality: defaults[modality] for modality in sorted(modalities) if modality in defaults}
    names = set(matching.values())
    if not names:
        return Route(None, "base")
    if len(names) > 1:
        return Route(None, "conflict:" + ",".join(f"{modality}={name}" for modality, name in matching.items()))
    return Route(names.pop(), "default:" + "+".join(matching))
