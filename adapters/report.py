"""What a load found out about an adapter, as people and JSON see it. Made by `weights`, shown by the API and the UI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the keys of `ranks` and `scales` become strings."""
        return vars(self) | {
            "ranks": {str(rank): count for rank, count in self.ranks.items()},
            "scales": {f"{scale:.6g}": count for scale, count in self.scales.items()},
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AdapterReport:
        """The inverse of `to_dict`; raises `TypeError`, `KeyError` or `ValueError` where `values` is something else."""
        return cls(
            **values
            | {
                "ranks": {int(rank): count for rank, count in values["ranks"].items()},
                "scales": {float(scale): count for scale, count in values["scales"].items()},
            }
        )
