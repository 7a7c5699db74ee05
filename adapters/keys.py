"""From a tensor's name in an adapter file to a linear layer of the running model.

Trainers, wrappers and library versions write the same layer under many names. `split_key` takes a name apart;
`KeyResolver` finds the one layer that it can mean, or says that there is none or more than one. Knows nothing of
tensors' contents. Called by `weights`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from adapters.surface import ModelSurface

Kind = Literal["A", "B", "bias", "magnitude", "embedding", "token", "full", "diag", "other"]

# Wrapper modules that trainers leave in names; the layer is the same without them.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
# Levels that differ between library versions and between a language model alone and inside a speech or vision model.
ROLES = frozenset({"model", "language_model"})

_PEFT_PREFIX = "base_model.model."
_LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))??(?P<leaf>\.weight|\.bias)?")
_OTHER_KEYS: tuple[tuple[str, Kind], ...] = (
    (r"(?P<module>.+)\.lora_magnitude_vector(?:\.[^.]+)*", "magnitude"),
    (r"(?P<module>.+)\.lora_embedding_[AB](?:\.[^.]+)*", "embedding"),
    (r"(?P<module>.+?)\.(?:token_adapter\.)?trainable_tokens_(?:delta|indices|original)(?:\.[^.]+)*", "token"),
    (r"(?P<module>.+)\.(?:lora_diag|lora_E|ranknum)(?:\.[^.]+)*", "diag"),
    (r"(?P<module>.+)\.bias", "bias"),
    (r"(?P<module>.+?)(?:\.(?:modules_to_save(?:\.[^.]+)?|base_layer|original_module))?\.weight", "full"),
)


@dataclass(frozen=True)
class TensorKey:
    """A tensor's name taken apart: its module (without wrappers and PEFT's prefix), and what the tensor is."""

    raw: str
    module: str
    kind: Kind
    adapter: str | None = None


def split_key(raw: str) -> TensorKey:
    """Take a tensor's name apart; anything that is not a LoRA half gets the kind that says what it is."""
    match = _LORA_KEY.fullmatch(raw)
    if match is not None and match["leaf"] != ".bias":
        return TensorKey(raw, clean_module(match["module"]), "A" if match["half"] == "A" else "B", match["adapter"])
    if match is not None:
        return TensorKey(raw, clean_module(match["module"]), "bias")
    for pattern, kind in _OTHER_KEYS:
        match = re.fullmatch(pattern, raw)
        if match is not None:
            return TensorKey(raw, clean_module(match["module"]), kind)
    return TensorKey(raw, clean_module(raw), "other")


def clean_module(name: str) -> str:
    """Drop wrapper levels and PEFT's own prefix, however often they occur."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    name = name.removeprefix("module.")
    while name.startswith(_PEFT_PREFIX):
        name = name[len(_PEFT_PREFIX) :]
    return name


@dataclass(frozen=True)
class Landing:
    """Where a module name leads: `name` is the layer, or None with the layers that it might mean in `candidates`."""

    name: str | None
    candidates: tuple[str, ...] = ()


class KeyResolver:
    """Finds the layer that a cleaned module name means.

    Tried in this order, and the first that hits decides: the name itself, the name after the model's own checkpoint
    renames, then equality of both names without the levels in `ROLES`. The last one must leave exactly one layer.
    """

    def __init__(self, surface: ModelSurface) -> None:
        self._surface = surface
        self._known = {*surface.linears, *surface.unsupported}
        self._by_core: dict[str, list[str]] = {}
        for name in sorted(self._known):
            self._by_core.setdefault(_core(name), []).append(name)

    def resolve(self, module: str) -> Landing:
        """The layer (or the unsupported module) of the running model that `module` means."""
        renamed = self._surface.rename_key(module)
        for name in (module, renamed):
            if name in self._known:
                return Landing(name)
        candidates = {name for spelling in (module, renamed) for name in self._by_core.get(_core(spelling), ())}
        if len(candidates) == 1:
            return Landing(candidates.pop())
        return Landing(None, tuple(sorted(candidates)))

    def why_unsupported(self, module: str) -> str | None:
        """Why LoRA on this module, or on a module that holds it, is not served; None where nothing is known."""
        landing = self.resolve(module)
        if landing.name is not None and landing.name not in self._surface.linears:
            return self._surface.unsupported[landing.name]
        levels = module.split(".")
        for depth in range(len(levels) - 1, 0, -1):
            parent = self.resolve(".".join(levels[:depth])).name
            if parent is not None and parent in self._surface.unsupported:
                return self._surface.unsupported[parent]
        return None


def _core(name: str) -> str:
    """A name without the levels that differ between versions and wrappings of one model."""
    parts = name.split(".")
    kept = [
        part
        for position, part in enumerate(parts)
        if part not in ROLES and not (part == "vision_model" and position and parts[position - 1] == "vision_tower")
    ]
    return ".".join(kept)
