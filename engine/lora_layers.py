"""Makes a model's linear layers LoRA-aware, and holds the adapters' weights that the kernels read.

A linear becomes LoRA-aware by a change of its class, so names, tied weights and saving stay as they are. Every module
has fixed buffers with one row an adapter; a step says which packed tokens use which row. Owns the buffers; which adapter
lies in which row is `adapters/slots`' business, which writes through `LoraBuffers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from adapters.surface import LinearSite
from kernels import LoraSegment, lora_add_

if TYPE_CHECKING:
    from adapters.generation import Generation

_STATE = "_switchboard_lora"


@dataclass
class LoraStep:
    """Which packed tokens of the current call use which adapter; one object for each part of the model."""

    segments: tuple[LoraSegment, ...] = ()


@dataclass
class LoraRows:
    """One module's adapters: row n of the buffers is LoRA row n.

    Attributes:
        lora_a: [N, R, in]; lora_b: [N, out, R], scale folded in. What lies above a row's own rank is zero.
        ranks: N ranks, 0 where the row's adapter does not touch this module.
        step: shared with all modules of the same part.
    """

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    ranks: list[int]
    step: LoraStep


class LoraLinearMixin:
    """`forward` of a LoRA-aware linear: the base layer's output plus each token's own adapter."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        output: torch.Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        rows: LoraRows = self.__dict__[_STATE]
        if rows.step.segments:
            flat = output.view(-1, output.shape[-1])
            lora_add_(flat, x.reshape(-1, x.shape[-1]), rows.lora_a, rows.lora_b, rows.ranks, rows.step.segments)
        return output


class LoraBuffers:
    """All modules' LoRA rows; implements `adapters.slots.SlotWriter`.

    Args:
        model: the model whose linears are changed in place.
        sites: linears that adapters may touch, by module name.
        steps: the step object of each part (`decoder`, `tower`, `connector`, `head`).
        num_slots: N. max_rank: R. dtype: of the buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Mapping[str, LinearSite],
        steps: Mapping[str, LoraStep],
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        self._rows: dict[str, LoraRows] = {}
        classes: dict[type, type] = {}
        for name, site in sites.items():
            module = model.get_submodule(name)
            device = next(module.parameters()).device
            rows = LoraRows(
                lora_a=torch.zeros(num_slots, max_rank, site.in_features, dtype=dtype, device=device),
                lora_b=torch.zeros(num_slots, site.out_features, max_rank, dtype=dtype, device=device),
                ranks=[0] * num_slots,
                step=steps[site.part],
            )
            base = type(module)
            if base not in classes:
                classes[base] = type(f"Lora{base.__name__}", (LoraLinearMixin, base), {})
            module.__class__ = classes[base]
            # Not through nn.Module.__setattr__: the buffers must stay out of the state dict.
            module.__dict__[_STATE] = rows
            self._rows[name] = rows

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(rows.lora_a.nbytes + rows.lora_b.nbytes for rows in self._rows.values())

    def write(self, lora_slot: int, generation: Generation) -> None:
        """Copy a generation's weights into row `lora_slot` of every module; modules that it does not touch get rank 0."""
        for name, rows in self._rows.items():
            pair = generation.pairs.get(name)
            if pair is None:
                self._clear(rows, lora_slot)
                continue
            rows.lora_a[lora_slot, : pair.rank] = pair.a
            rows.lora_a[lora_slot, pair.rank :] = 0
            rows.lora_b[lora_slot, :, : pair.rank] = pair.b
            rows.lora_b[lora_slot, :, pair.rank :] = 0
            rows.ranks[lora_slot] = pair.rank

    def clear(self, lora_slot: int) -> None:
        """Zero row `lora_slot` of every module."""
        for rows in self._rows.values():
            self._clear(rows, lora_slot)

    def _clear(self, rows: LoraRows, lora_slot: int) -> None:
        if rows.ranks[lora_slot]:
            rows.lora_a[lora_slot] = 0
            rows.lora_b[lora_slot] = 0
            rows.ranks[lora_slot] = 0
