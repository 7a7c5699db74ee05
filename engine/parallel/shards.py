"""Which part of a linear layer, and of an adapter's matrices on it, lies on which rank. Arithmetic alone.

A column-parallel layer has a share of the output's columns on each rank, a row-parallel one a share of the input's, so that
its ranks' outputs are summed. LoRA follows: beside columns A is whole and B cut as the output; beside rows A is cut as the
input and B whole, its product being part of what is summed. Fully sharded, what would be whole is cut as well: A by its
rank, B by the output.

R rank of an adapter, n ranks of the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from adapters.slab import padded_len
from adapters.surface import LinearSite
from adapters.weights import LoraPair


@dataclass(frozen=True)
class LinearShard:
    """How a linear layer is cut.

    Attributes:
        kind: what is cut: the output's columns, or the input's (a row of the weight's transpose).
        in_features, out_features: of the whole layer.
        is_joined: columns: every rank gets the whole output; rows: every rank has the whole input and takes its share.
    """

    kind: Literal["column", "row"]
    in_features: int
    out_features: int
    is_joined: bool = False

    def local_site(self, site: LinearSite, size: int) -> LinearSite:
        """The layer as one of `size` ranks has it."""
        inputs, outputs = self.in_features, self.out_features
        if self.kind == "column":
            return LinearSite(site.name, inputs, outputs // size, site.part)
        return LinearSite(site.name, inputs // size, outputs, site.part)


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `size`: what of an adapter belongs there.

    Attributes:
        fully_sharded_rank: R of the buffers where adapters are fully sharded; None where they are cut as the base is.
    """

    rank: int
    size: int
    fully_sharded_rank: int | None = None

    def of(self, length: int) -> slice:
        """This rank's part of `length` rows or columns."""
        assert length % self.size == 0, f"{length} does not go into {self.size} equal parts"
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def halves(self, pair: LoraPair, shard: LinearShard | None) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's A and B of a pair, as views; `shard` None where the layer is whole on every rank."""
        a, b = pair.a, pair.b
        if shard is None:
            return a, b
        if shard.kind == "column":
            b = b[self.of(shard.out_features)]
            if self.fully_sharded_rank is not None:
                a = a[self.of(self.fully_sharded_rank)]  # None of a short A's rows may be left.
        else:
            a = a[:, self.of(shard.in_features)]
            if self.fully_sharded_rank is not None:
                b = b[self.of(shard.out_features)]
        return a, b


@dataclass(frozen=True)
class PackedPair:
    """Where a module's halves lie in a rank's slab, in elements; `rank` is the adapter's own."""

    name: str
    rank: int
    scale: float
    a_start: int
    a_shape: tuple[int, int]
    b_start: int
    b_shape: tuple[int, int]


@dataclass(frozen=True)
class LocalPairs:
    """A rank's part of an adapter; `pairs` are views of one slab, as those of a generation."""

    pairs: Mapping[str, LoraPair]


def lay_out(
    pairs: Mapping[str, LoraPair], shards: Mapping[str, LinearShard], share: Share
) -> tuple[list[PackedPair], int]:
    """The places of a rank's halves in its slab, and the slab's length in elements."""
    packed: list[PackedPair] = []
    end = 0
    for name, pair in pairs.items():
        a, b = share.halves(pair, shards.get(name))
        b_start = end + padded_len(a.numel())
        packed.append(PackedPair(name, pair.rank, pair.scale, end, _shape(a), b_start, _shape(b)))
        end = b_start + padded_len(b.numel())
    return packed, end


def pack(
    pairs: Mapping[str, LoraPair], shards: Mapping[str, LinearShard], share: Share, slab: torch.Tensor
) -> list[PackedPair]:
    """Copy a rank's halves into `slab`, which has the pairs' type and `lay_out`'s length."""
    packed, _ = lay_out(pairs, shards, share)
    local = unpack(packed, slab).pairs
    for name, pair in pairs.items():
        a, b = share.halves(pair, shards.get(name))
        local[name].a.copy_(a)
        local[name].b.copy_(b)
    return packed


def unpack(packed: list[PackedPair], slab: torch.Tensor) -> LocalPairs:
    """The pairs that lie in a slab."""

    def half(start: int, shape: tuple[int, int]) -> torch.Tensor:
        return slab[start : start + shape[0] * shape[1]].view(shape)

    return LocalPairs(
        {
            place.name: LoraPair(
                half(place.a_start, place.a_shape), half(place.b_start, place.b_shape), place.rank, place.scale
            )
            for place in packed
        }
    )


def _shape(half: torch.Tensor) -> tuple[int, int]:
    rows, columns = half.shape
    return rows, columns
