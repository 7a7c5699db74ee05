"""What a name means, as one process tells it to another that shares its adapter folder.

Plain data that imports nothing, for processes without a model. Made and followed by `following`.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULTS = "(defaults)"
"""What the adapters that answer by themselves have in place of a name, which no adapter can have: all are one state."""


@dataclass(frozen=True)
class NameState:
    """What a name means, or which adapters answer by themselves.

    Attributes:
        name: the name, or `DEFAULTS`.
        generation: digest of its content; None where the name is gone.
        source: where its files come from, as it was given.
        base_model_name: the base model that its loader named.
        is_stored: whether its files lie in the shared adapter folder.
        is_pinned: whether it was pinned by somebody.
        defaults: of `DEFAULTS` alone, in order: pairs of a modality and the name of the adapter that answers it by itself.
    """

    name: str
    generation: str | None = None
    source: str = ""
    base_model_name: str | None = None
    is_stored: bool = False
    is_pinned: bool = False
    defaults: tuple[tuple[str, str], ...] = ()
