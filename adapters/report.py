"""What a load found out about an adapter, as people and JSON see it. Made by `weights`, shown by the API and the UI."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from adapters.planned import AdapterPlan, PlannedPair


@dataclass(frozen=True)
class ModuleGroup:
    """Modules of one kind: those whose names end alike, in one part of the model.

    Attributes:
        name: the last name component, such as `q_proj`.
        part: decoder, tower, connector or head.
        num_modules: how many there are.
        ranks, scales: rank, scale -> number of modules.
    """

    name: str
    part: str
    num_modules: int
    ranks: dict[int, int]
    scales: dict[float, int]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the keys of `ranks` and `scales` become strings."""
        return vars(self) | _texts(self.ranks, self.scales)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModuleGroup:
        """The inverse of `to_dict`."""
        return cls(**values | _numbers(values))


def module_groups(plan: AdapterPlan) -> list[ModuleGroup]:
    """The plan's pairs by kind of module, sorted by part and name."""
    members: dict[tuple[str, str], list[PlannedPair]] = {}
    for name, pair in plan.pairs.items():
        members.setdefault((pair.site.part, name.rpartition(".")[2]), []).append(pair)
    return [
        ModuleGroup(
            name,
            part,
            len(pairs),
            dict(sorted(Counter(pair.rank for pair in pairs).items())),
            dict(sorted(Counter(pair.scale for pair in pairs).items())),
        )
        for (part, name), pairs in sorted(members.items())
    ]


def file_dtypes(plan: AdapterPlan) -> dict[str, int]:
    """How the files store the pairs: safetensors dtype, such as `BF16` -> number of tensors."""
    halves = [half.dtype for pair in plan.pairs.values() for half in (pair.a, pair.b)]
    return dict(sorted(Counter(halves).items()))


@dataclass(frozen=True)
class AdapterReport:
    """Facts about a validated adapter.

    Attributes:
        matched: LoRA pairs that landed on a layer of the running model.
        total: LoRA pairs in the files; equal to `matched`, because anything else is refused.
        rank: largest rank of any module.
        ranks: rank -> number of modules.
        alpha: the config's `lora_alpha`.
        scale: the commonest scale (alpha over rank, or over its square root with rsLoRA).
        scales: scale -> number of modules.
        target_modules: last name components of the modules, sorted.
        parts: which parts of the model are touched: decoder, tower, connector, head.
        num_modules: modules touched.
        num_bytes: bytes of A and B in the serving dtype.
        dtype: serving dtype, such as `bfloat16`.
        digest: `sha256:…` of tensors and effective scales.
        base_model: what the config names as its base model, without folders; None if it names none.
        warnings: sentences that a person should read; the adapter is served all the same.
        is_zero_effect: the adapter changes nothing anywhere (B or A is zero in every module, or alpha is 0).
        unmatched: pairs without a layer: always 0 in a report, because such an adapter is refused.
        base_match: whether the base that the config names is the served one by name: `same`, `other`, `unnamed`; by shape
            every reported adapter fits.
        file_dtypes: how the files store the pairs -> number of tensors.
        groups: ranks and scales by kind of module.
        card: `AdapterCard.to_dict()` of the card beside the tensors; None where there is none.
    """

    matched: int
    total: int
    rank: int
    ranks: dict[int, int]
    alpha: float
    scale: float
    scales: dict[float, int]
    target_modules: list[str]
    parts: list[str]
    num_modules: int
    num_bytes: int
    dtype: str
    digest: str
    base_model: str | None
    warnings: list[str]
    is_zero_effect: bool
    unmatched: int = 0
    base_match: str = "unnamed"
    file_dtypes: dict[str, int] = field(default_factory=dict)
    groups: list[ModuleGroup] = field(default_factory=list)
    card: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the keys of `ranks` and `scales` become strings."""
        return (
            vars(self)
            | _texts(self.ranks, self.scales)
            | {"warnings": list(self.warnings), "groups": [group.to_dict() for group in self.groups]}
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AdapterReport:
        """The inverse of `to_dict`; raises `TypeError`, `KeyError` or `ValueError` where `values` is something else."""
        groups = [ModuleGroup.from_dict(group) for group in values.get("groups", [])]
        return cls(**values | _numbers(values) | {"groups": groups})


def _texts(ranks: dict[int, int], scales: dict[float, int]) -> dict[str, Any]:
    return {
        "ranks": {str(rank): count for rank, count in ranks.items()},
        "scales": {f"{scale:.6g}": count for scale, count in scales.items()},
    }


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {
        "ranks": {int(rank): count for rank, count in values["ranks"].items()},
        "scales": {float(scale): count for scale, count in values["scales"].items()},
    }
