"""Buffers for adapters that change the base layer's own output: DoRA's magnitudes and trained biases.

Beside the LoRA product, which every adapter adds, such an adapter scales and shifts what the base layer gives, by output
column. A group of linears gets these buffers when the first such adapter comes, or at start where CUDA graphs are
recorded, which need fixed addresses; a group without them costs nothing. `engine/lora_layers` applies them.

N LoRA rows, O output columns of a group, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from adapters.magnitude import OutputChange
from engine.transfer import pinned
from kernels import LoraMetadata, scale_shift_

if TYPE_CHECKING:
    from adapters.generation import Generation
    from engine.lora_layers import LoraGroup


class ScaleShift:
    """Scale and shift of a group's output: row n is LoRA row n."""

    def __init__(self, num_slots: int, num_columns: int, device: torch.device) -> None:
        self._scale = torch.ones(num_slots, num_columns, dtype=torch.float32, device=device)
        self._shift = torch.zeros(num_slots, num_columns, dtype=torch.float32, device=device)
        self._host_is_used = [False] * num_slots
        self._is_used = torch.zeros(num_slots, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return self._scale.nbytes + self._shift.nbytes

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scale [N, O], shift [N, O], and which rows are used [N]: what the operator reads."""
        return self._scale, self._shift, self._is_used

    def apply_(self, output: torch.Tensor, metadata: LoraMetadata) -> None:
        """Change the rows of output [T, O] that belong to such adapters, in place."""
        scale_shift_(output, self._scale, self._shift, self._is_used, self._host_is_used, metadata)

    def write(self, lora_slot: int, changes: Sequence[OutputChange | None], slice_ends: Sequence[int]) -> None:
        """Fill row `lora_slot`: one change for each slice of the columns, None where the slice stays as it is."""
        if not any(changes):
            self.clear(lora_slot)
            return
        start = 0
        for change, end in zip(changes, slice_ends, strict=True):
            scale, shift = self._scale[lora_slot, start:end], self._shift[lora_slot, start:end]
            if change is None:
                scale.fill_(1.0)
                shift.zero_()
            else:
                scale.copy_(pinned(change.scale, scale.device), non_blocking=True)
                shift.copy_(pinned(change.shift, shift.device), non_blocking=True)
            start = end
        self._set_used(lora_slot, True)

    def clear(self, lora_slot: int) -> None:
        """Row `lora_slot` changes nothing any more."""
        if self._host_is_used[lora_slot]:
            self._set_used(lora_slot, False)

    def _set_used(self, lora_slot: int, is_used: bool) -> None:
        self._host_is_used[lora_slot] = is_used
        self._is_used[lora_slot] = int(is_used)


class ScaleShiftWriter:
    """Writes generations into the groups' scale and shift; implements `adapters.slots.SlotWriter`.

    Args:
        groups: all groups of linears.
        num_slots: N.
        is_reserved: make the buffers of all groups now, not when the first adapter comes that needs them.
    """

    def __init__(self, groups: Sequence[LoraGroup], num_slots: int, *, is_reserved: bool) -> None:
        self._groups = groups
        self._num_slots = num_slots
        if is_reserved:
            for group in groups:
                self._add_buffers(group)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers that there are by now."""
        return sum(group.scale_shift.num_bytes for group in self._groups if group.scale_shift is not None)

    def write(self, lora_slot: int, generation: Generation) -> None:
        """Fill row `lora_slot` in every group that the generation, or what the row held before, changes."""
        for group in self._groups:
            changes = [generation.extras.changes.get(name) for name in group.names]
            if any(changes) and group.scale_shift is None:
                self._add_buffers(group)
            if group.scale_shift is not None:
                group.scale_shift.write(lora_slot, changes, group.slice_ends)

    def clear(self, lora_slot: int) -> None:
        """Row `lora_slot` changes nothing any more in any group."""
        for group in self._groups:
            if group.scale_shift is not None:
                group.scale_shift.clear(lora_slot)

    def _add_buffers(self, group: LoraGroup) -> None:
        group.scale_shift = ScaleShift(self._num_slots, group.slice_ends[-1], group.lora_a.device)
