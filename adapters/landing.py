"""Pairs up the LoRA halves of an adapter's files, and finds the layer of the running model that each pair lands on.

A pair lands on one layer, or, where the files name a fused layer and the model has separate ones (or the other way
round), on the rows that are its own: rows of B belong to output features, so cutting B by rows and keeping A is exact.
Every pair that has no layer becomes a reason. Called by `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from adapters.keys import KeyResolver, TensorKey
from adapters.places import TensorPlace
from adapters.surface import PACKED_SUFFIXES, ModelSurface

MAX_LISTED = 5
_PACKED_OF = {member: packed for packed, members in PACKED_SUFFIXES.items() for member in members}


@dataclass
class Halves:
    """What the files hold for one module of theirs."""

    a: TensorPlace | None = None
    b: TensorPlace | None = None
    magnitude: TensorPlace | None = None
    lora_bias: TensorPlace | None = None


@dataclass(frozen=True)
class Piece:
    """A pair of the files, or rows of one, on its way to a layer; `member` is its part of a fused layer, if it is one."""

    file_name: str
    a: TensorPlace
    b: TensorPlace
    magnitude: TensorPlace | None = None
    lora_bias: TensorPlace | None = None
    member: str | None = None

    def cut(self, start: int, end: int) -> Piece:
        """The same module's rows `start` to `end`."""
        magnitude, bias = (None if one is None else one.cut(start, end) for one in (self.magnitude, self.lora_bias))
        return Piece(self.file_name, self.a, self.b.cut(start, end), magnitude, bias)


@dataclass
class Landed:
    """Layer name -> its piece, or the pieces that together are its adapter; `num_found` of `total` modules landed."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    total: int = 0
    num_found: int = 0


def pair_up(keys: Sequence[TensorKey], tensors: Mapping[str, TensorPlace], reasons: list[str]) -> dict[str, Halves]:
    """File module name -> its halves. Refuses missing halves, doubles, and files that hold several adapters."""
    slots = {
        "A": "a", "B": "b", "embedding_a": "a", "embedding_b": "b", "magnitude": "magnitude", "lora_bias": "lora_bias",
    }  # fmt: skip
    lora_keys = [key for key in keys if key.kind in slots]
    adapters = sorted({key.adapter for key in lora_keys if key.adapter is not None})
    if len(adapters) > 1:
        reasons.append(f"the files hold several adapters ({listed(adapters)}); save each one into a folder of its own")
        return {}
    halves: dict[str, Halves] = {}
    doubles = []
    for key in lora_keys:
        place, slot = tensors[key.raw], slots[key.kind]
        if key.is_mlx and len(place.shape) == 2:
            place = TensorPlace(place.file, place.entry, is_transposed=True)
        one = halves.setdefault(key.module, Halves())
        if getattr(one, slot) is not None:
            doubles.append(key.raw)
        setattr(one, slot, place)
    if doubles:
        reasons.append(f"these tensors occur twice under different names: {listed(doubles)}")
    for name, slot in (("lora_A", "a"), ("lora_B", "b")):
        missing = [module for module, one in halves.items() if getattr(one, slot) is None]
        if missing:
            reasons.append(f"{name} is missing for {listed(missing)}; the checkpoint is incomplete, save it again")
    return halves


def land(halves: Mapping[str, Halves], surface: ModelSurface, reasons: list[str]) -> Landed:
    """Find the layer of each whole pair; every module that has none becomes a reason."""
    resolver = surface.names.modules
    landed = Landed(total=len(halves))
    losses = _Losses()
    for module, one in halves.items():
        name, why = resolver.resolve(module).name, resolver.why_unsupported(module)
        if why is not None:
            losses.unsupported.setdefault(why, []).append(module)
            continue
        spots = [(name, None)] if name is not None else list(_fused_spots(module, resolver, surface))
        if not spots:
            losses.add_unmatched(module, resolver.resolve(module).candidates)
        elif any(not surface.is_targeted(spot) for spot, _ in spots):
            losses.filtered.append(module)
        else:
            landed.num_found += 1
            if one.a is not None and one.b is not None:
                whole = Piece(module, one.a, one.b, one.magnitude, one.lora_bias)
                _put(whole, spots, surface, landed, losses)
    reasons += losses.sentences(landed, surface)
    return landed


def _put(
    whole: Piece, spots: Sequence[tuple[str, str | None]], surface: ModelSurface, landed: Landed, losses: _Losses
) -> None:
    if len(spots) == 1:
        name, member = spots[0]
        _add(Piece(whole.file_name, whole.a, whole.b, whole.magnitude, whole.lora_bias, member), name, landed, losses)
        return
    sizes = [surface.linears[name].out_features for name, _ in spots]
    num_rows = [place.shape for place in (whole.b, whole.magnitude, whole.lora_bias) if place is not None]
    if any(not shape or shape[0] != sum(sizes) for shape in num_rows):
        parts = ", ".join(name.rpartition(".")[2] for name, _ in spots)
        losses.misfits.append(
            f"{whole.file_name}: lora_B {list(whole.b.shape)} does not fit the model, which has {parts} there, "
            f"{sum(sizes)} output features in all"
        )
        return
    start = 0
    for (name, _), size in zip(spots, sizes, strict=True):
        _add(whole.cut(start, start + size), name, landed, losses)
        start += size


def _add(piece: Piece, name: str, landed: Landed, losses: _Losses) -> None:
    others = landed.pieces.setdefault(name, [])
    twin = next(
        (other for other in others if other.member == piece.member or not (other.member and piece.member)), None
    )
    if twin is not None:
        losses.doubles.append(f"{twin.file_name} and {piece.file_name}")
    else:
        others.append(piece)


def _fused_spots(module: str, resolver: KeyResolver, surface: ModelSurface) -> Iterator[tuple[str, str | None]]:
    """Layers that a fused or separate name means on a model that has it the other way: (layer, part of it or None)."""
    parent, _, leaf = module.rpartition(".")
    members = PACKED_SUFFIXES.get(leaf, ())
    names = [resolver.resolve(f"{parent}.{member}").name for member in members]
    if members and all(name in surface.linears for name in names):
        yield from ((name, None) for name in names if name is not None)
    elif leaf in _PACKED_OF:
        name = resolver.resolve(f"{parent}.{_PACKED_OF[leaf]}").name
        if name is not None and name in surface.linears:
            yield name, leaf


class _Losses:
    """File modules that did not land, by why."""

    def __init__(self) -> None:
        self.unmatched: list[str] = []
        self.filtered: list[str] = []
        self.ambiguous: list[str] = []
        self.doubles: list[str] = []
        self.misfits: list[str] = []
        self.unsupported: dict[str, list[str]] = {}

    def add_unmatched(self, module: str, candidates: Sequence[str]) -> None:
        if candidates:
            self.ambiguous.append(f"{module} ({' or '.join(candidates[:3])})")
        else:
            self.unmatched.append(module)

    def sentences(self, landed: Landed, surface: ModelSurface) -> list[str]:
        num_found = landed.num_found - len(self.doubles)
        count = f"matched {num_found} of {landed.total} tensor pairs"
        if landed.total and not num_found:
            count = f"the adapter changes 0 modules of this model ({count})"
        reasons = []
        if self.unmatched:
            model = short_model_name(surface.model_name)
            reasons.append(
                f"{count}: the model {model!r} has no layer for {listed(self.unmatched)}; was it trained on another "
                "base model?"
            )
        if self.filtered:
            allowed = ", ".join(surface.target_suffixes)
            reasons.append(
                f"{count}: this server takes LoRA on {allowed} only (--lora-target-modules), but the adapter also has "
                f"{listed(self.filtered)}"
            )
        for why, modules in self.unsupported.items():
            reasons.append(f"{count}: LoRA on {listed(modules)} is not served: {why}")
        if self.ambiguous:
            reasons.append(
                f"{count}: these names fit more than one layer: {listed(self.ambiguous)}; rename the tensors in full"
            )
        if self.doubles:
            reasons.append(f"{count}: two names lead to one layer: {listed(self.doubles)}")
        return reasons + first_few(self.misfits)


def short_model_name(name: str | None) -> str | None:
    """A base model's name as it may be shown: `owner/name` as it is, a path without its folders."""
    if not name:
        return None
    levels = [level for level in name.replace("\\", "/").split("/") if level]
    is_hub_id = len(levels) <= 2 and not name.startswith(("/", ".", "~"))
    return "/".join(levels if is_hub_id else levels[-1:])[:120] or None


def listed(names: Sequence[str]) -> str:
    """The first names of many, for a sentence."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(name[:200] for name in names[:MAX_LISTED]) + more


def first_few(faults: list[str], limit: int = 3) -> list[str]:
    """The first of the faults that tend to repeat for every module, and how many more there are."""
    return [*faults[:limit], f"{len(faults) - limit} more modules have such faults"] if len(faults) > limit else faults
