"""Groups of linears whose adapters are fully sharded: both halves are cut, and the small product between them is joined.

Beside columns each rank has R / n rows of A; what they make of x is gathered, then multiplied with the rank's B. Beside rows
each rank multiplies its columns of x; that is summed, and each rank adds its share of the output's columns to its partial
output, of which the layer's own sum makes the whole. Half the memory for adapters, for one more collective a group.

T packed tokens, N rows, M modules of a group, R rank of the buffers, n ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from adapters.surface import LinearSite
from engine import cpu_linear, ops
from engine.lora_layers import LoraGroup
from engine.parallel.collectives import RankGroup
from engine.parallel.shards import LinearShard
from engine.parallel.split import Split
from kernels import LoraMetadata, lora_expand_, lora_shrink


def make_group(split: Split, modules: Mapping[str, nn.Module], *arguments: Any, **sizes: Any) -> LoraGroup:
    """A fully sharded group where the linears are cut, else a plain one; the arguments are `LoraGroup`'s."""
    shard = split.shards.get(next(iter(modules)))
    if shard is None:
        return LoraGroup(modules, *arguments, **sizes)
    return FullyShardedGroup(split, shard, modules, *arguments, **sizes)


class FullyShardedGroup(LoraGroup):
    """Linears that read the same input and are cut in the same way.

    `lora_a` is [N, M, R / n, in] beside columns and [N, 1, R, in / n] beside rows; `lora_b` [N, O / n, R] in both cases.
    `ranks` are the adapters' own.
    """

    def __init__(
        self,
        split: Split,
        shard: LinearShard,
        modules: Mapping[str, nn.Module],
        sites: Mapping[str, LinearSite],
        metadata: LoraMetadata,
        step_number: int,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(modules, sites, metadata, step_number, num_slots=num_slots, max_rank=max_rank, dtype=dtype)
        self._group, self._is_column = split.group, shard.kind == "column"
        size = split.group.size
        if self._is_column:
            shape_a = (num_slots, len(self.names), max_rank // size, self.lora_a.shape[-1])
            self.lora_a = torch.zeros(shape_a, dtype=dtype, device=self.lora_a.device)
        else:
            shape_b = (num_slots, shard.out_features // size, max_rank)
            self.lora_b = torch.zeros(shape_b, dtype=dtype, device=self.lora_b.device)

    def call_kernels(self, max_recorded_tokens: int) -> None:
        """Nothing: the halves, with a collective between them, are compiled where they are first met."""

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = (F.linear if torch.compiler.is_compiling() else cpu_linear.linear)(x, weight, bias)
        self._add(output, x)
        return output

    def _add(self, output: torch.Tensor, x: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            sharded_add_op(
                output, x, self.lora_a, self.lora_b, self.ranks, self.slice_ends, self._is_column, self.step_number,
                self._group.number,
            )  # fmt: skip
        elif self.metadata.segments:
            add_sharded_(
                output.view(-1, output.shape[-1]), x.reshape(-1, x.shape[-1]), self.lora_a, self.lora_b, self.ranks,
                self.host_ranks, self.slice_ends, self._is_column, self.metadata, self._group,
            )  # fmt: skip


def add_sharded_(
    output: torch.Tensor,
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    host_ranks: Sequence[Sequence[int]],
    slice_ends: tuple[int, ...],
    is_column: bool,
    metadata: LoraMetadata,
    group: RankGroup,
) -> None:
    """Add this rank's part of the LoRA product, with one collective; the step has adapters.

    Args:
        output: [T, O], accumulated in place: the rank's columns, or beside rows its part of the sum.
        x: [T, in], of which the rank has all columns, or beside rows its share.
        lora_a, lora_b: see `FullyShardedGroup`.
        ranks, host_ranks: the adapters' own ranks, as in `kernels.lora_add_group_`.
        slice_ends: M ends of the modules' columns in the output.
        is_column: whether the layers are cut by columns.
        metadata: the step.
        group: the ranks.
    """
    if is_column:
        most = lora_a.shape[2]  # Rows of A that lie here.
        before = group.rank * most
        own_ranks = (ranks - before).clamp_(0, most)
        own_host_ranks = [[min(max(rank - before, 0), most) for rank in row] for row in host_ranks]
        shrunk = group.join(lora_shrink(x, lora_a, own_ranks, own_host_ranks, metadata))
        lora_expand_(output, shrunk, lora_b, ranks, host_ranks, slice_ends, metadata)
    else:
        shrunk = lora_shrink(x, lora_a, ranks, host_ranks, metadata)
        group.sum_(shrunk)
        width = lora_b.shape[1]
        own = output[:, group.rank * width : (group.rank + 1) * width]
        lora_expand_(own, shrunk, lora_b, ranks, host_ranks, (width,), metadata)


@torch.library.custom_op(
    "switchboard::fully_sharded_lora_add",
    mutates_args=("output",),
    schema="(Tensor(a!) output, Tensor x, Tensor lora_a, Tensor lora_b, Tensor ranks, int[] slice_ends, bool is_column, "
    "int step, int group) -> ()",
)
def sharded_add_op(output, x, lora_a, lora_b, ranks, slice_ends, is_column, step, group):  # type: ignore[no-untyped-def]
    """`add_sharded_` as an operator; nothing where the step has no adapters."""
    metadata: LoraMetadata = ops.find(step)
    if metadata.segments:
        add_sharded_(
            output.view(-1, output.shape[-1]), x.reshape(-1, x.shape[-1]), lora_a, lora_b, ranks,
            () if ranks.is_cuda else ranks.tolist(), tuple(slice_ends), is_column, metadata, ops.find(group),
        )  # fmt: skip


@sharded_add_op.register_fake
def _(output, x, lora_a, lora_b, ranks, slice_ends, is_column, step, group):  # type: ignore[no-untyped-def]
    return None
