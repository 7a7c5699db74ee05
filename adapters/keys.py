"""From a tensor's name in an adapter file to a linear layer of the running model.

Trainers, wrappers and library versions write the same layer under many names. `split_key` takes a name apart;
`KeyResolver` finds the one layer that it can mean, or says that there is none or more than one. Knows nothing of
tensors' contents. Called by `weights`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from adapters.surface import ModelSurface

Kind = Literal[
    "A", "B", "lora_bias", "bias", "magnitude", "embedding_a", "embedding_b", "rows", "full", "diag", "kohya", "mlx_vlm",
    "other",
]  # fmt: skip

# Wrapper modules that trainers leave in names; the layer is the same without them.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
# Levels that differ between library versions and between a language model alone and inside a speech or vision model.
ROLES = frozenset({"model", "language_model"})

_PEFT_PREFIX = "base_model.model."
_FULL_LEVEL = r"(?:\.token_adapter)?(?:\.(?:modules_to_save(?:\.[^.]+)?|base_layer|original_module))?"
# First match decides. `half` says which half of a pair, `adapter` is the name that PEFT gave in memory.
_KEYS: tuple[tuple[str, Kind], ...] = (
    (r"(?P<module>.+)\.lora_(?P<half>A)(?:\.(?P<adapter>[^.]+))??(?:\.weight)?", "A"),
    (r"(?P<module>.+)\.lora_(?P<half>B)(?:\.(?P<adapter>[^.]+))??\.bias", "lora_bias"),
    (r"(?P<module>.+)\.lora_(?P<half>B)(?:\.(?P<adapter>[^.]+))??(?:\.weight)?", "B"),
    (r"(?P<module>.+)\.lora_(?P<mlx>a)", "A"),
    (r"(?P<module>.+)\.lora_(?P<mlx>b)", "B"),
    (r"(?P<module>.+)\.lora_magnitude_vector(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?", "magnitude"),
    (r"(?P<module>.+)\.(?P<mlx>m)", "magnitude"),
    (r"(?P<module>.+)\.lora_embedding_A(?:\.(?P<adapter>[^.]+))?", "embedding_a"),
    (r"(?P<module>.+)\.lora_embedding_B(?:\.(?P<adapter>[^.]+))?", "embedding_b"),
    (r"(?P<module>.+?)\.(?:token_adapter\.)?trainable_tokens_delta(?:\.(?P<adapter>[^.]+))?", "rows"),
    (r"(?P<module>.+)\.(?:lora_diag|lora_E|ranknum)(?:\.[^.]+)*", "diag"),
    (r"(?P<module>.+)\.(?:lora_(?:up|down)\.weight|lora\.(?:up|down)\.weight|alpha|dora_scale)", "kohya"),
    (r"(?P<module>.+)\.(?:A|B)", "mlx_vlm"),
    (rf"(?P<module>.+?){_FULL_LEVEL}\.bias", "bias"),
    (rf"(?P<module>.+?){_FULL_LEVEL}\.weight", "full"),
)


_COMPILED = tuple((re.compile(pattern), kind) for pattern, kind in _KEYS)
_NUM_REMEMBERED = 1 << 14
"""Names whose meaning is remembered: adapters of one model have the same ones, and working them out is much of a load."""
_MAX_REMEMBERED_LEN = 512


@dataclass(frozen=True)
class TensorKey:
    """A tensor's name taken apart.

    Attributes:
        raw: the name as the file has it.
        module: the module, without wrappers and PEFT's prefix.
        kind: what the tensor is.
        adapter: the adapter's name in the key, where it has one.
        is_mlx: written by mlx-lm, which stores both halves transposed.
    """

    raw: str
    module: str
    kind: Kind
    adapter: str | None = None
    is_mlx: bool = False


@functools.lru_cache(_NUM_REMEMBERED)
def split_key(raw: str) -> TensorKey:
    """Take a tensor's name apart; anything that is not a LoRA half gets the kind that says what it is."""
    for pattern, kind in _COMPILED:
        match = pattern.fullmatch(raw)
        if match is not None:
            groups = match.groupdict()
            return TensorKey(raw, clean_module(match["module"]), kind, groups.get("adapter"), bool(groups.get("mlx")))
    return TensorKey(raw, clean_module(raw), "other")


def clean_module(name: str) -> str:
    """Drop wrapper levels and PEFT's own prefix, however often they occur."""
    name = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    while True:
        # torch's DataParallel and DeepSpeed put `module.` in front, PEFT its own; both can be nested
        shorter = name.removeprefix("module.").removeprefix(_PEFT_PREFIX)
        if shorter == name:
            return name
        name = shorter


@dataclass(frozen=True)
class Landing:
    """Where a module name leads: `name` is the layer, or None with the layers that it might mean in `candidates`."""

    name: str | None
    candidates: tuple[str, ...] = ()


class NameResolver:
    """Finds the one of the model's `names` that a name in an adapter's files means.

    Tried in this order, and the first that hits decides: the name itself, the name after the model's own checkpoint
    renames, then equality of both names without the levels in `ROLES`. The last one must leave exactly one name.
    Thread-safe; what was found is remembered.
    """

    def __init__(self, names: Collection[str], rename: Callable[[str], str]) -> None:
        self._known = frozenset(names)
        self._rename = rename
        self._by_core: dict[str, list[str]] = {}
        for name in sorted(self._known):
            self._by_core.setdefault(_core(name), []).append(name)
        self._found: dict[str, Landing] = {}

    def resolve(self, written: str) -> Landing:
        """The running model's name that `written` means."""
        landing = self._found.get(written)
        if landing is None:
            landing = self._find(written)
            if len(self._found) < _NUM_REMEMBERED and len(written) <= _MAX_REMEMBERED_LEN:
                self._found[written] = landing
        return landing

    def _find(self, written: str) -> Landing:
        renamed = self._rename(written)
        for name in (written, renamed):
            if name in self._known:
                return Landing(name)
        candidates = {name for spelling in (written, renamed) for name in self._by_core.get(_core(spelling), ())}
        if len(candidates) == 1:
            return Landing(candidates.pop())
        return Landing(None, tuple(sorted(candidates)))


class KeyResolver(NameResolver):
    """Finds the layer that a cleaned module name means."""

    def __init__(self, surface: ModelSurface) -> None:
        super().__init__({*surface.linears, *surface.embeddings, *surface.unsupported}, surface.rename_key)
        self._surface = surface

    def why_unsupported(self, module: str) -> str | None:
        """Why LoRA on this module, or on a module that holds it, is not served; None where nothing is known."""
        name = self.resolve(module).name
        if name is not None and name in self._surface.unsupported:
            return self._surface.unsupported[name]
        if name is not None:
            return None
        levels = module.split(".")
        for depth in range(len(levels) - 1, 0, -1):
            parent = self.resolve(".".join(levels[:depth])).name
            if parent is not None and parent in self._surface.unsupported:
                return self._surface.unsupported[parent]
        return None


class SurfaceNames:
    """What names in adapters' files mean on one model.

    Attributes:
        modules: everything that LoRA could be meant for, served or not.
        linears: linear layers.
        tables: embedding tables and heads.
        tensors: parameters and buffers.
    """

    def __init__(self, surface: ModelSurface) -> None:
        self.modules = KeyResolver(surface)
        self.linears = NameResolver(surface.linears, surface.rename_key)
        heads = [site.tied_head for site in surface.embeddings.values() if site.tied_head]
        linear_heads = [name for name, site in surface.linears.items() if site.part == "head"]
        self.tables = NameResolver({*surface.embeddings, *heads, *linear_heads}, surface.rename_key)
        self.tensors = NameResolver(surface.base_tensor_names, functools.partial(_rename_tensor, surface.rename_key))


def _rename_tensor(rename_key: Callable[[str], str], name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{rename_key(module)}.{leaf}"


def _core(name: str) -> str:
    """A name without the levels that differ between versions and wrappings of one model."""
    parts = name.split(".")
    kept = [
        part
        for position, part in enumerate(parts)
        if part not in ROLES and not (part == "vision_model" and position and parts[position - 1] == "vision_tower")
    ]
    return ".".join(kept)
