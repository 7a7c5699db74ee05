"""How much memory adapters take, by rank, from a model's layers alone.

A pair on a layer of `in` and `out` features holds `rank * (in + out)` numbers. Knows nothing of files. Called by
`__main__`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from adapters.surface import LinearSite


@dataclass(frozen=True)
class RankEstimate:
    """Memory of adapters of one rank.

    Attributes:
        rank: of every module.
        adapter_bytes: of one adapter on the layers that were asked about.
        slot_bytes: of the server's buffers for `num_slots` adapters of up to this rank, which are allocated at start for
            every layer that may carry LoRA, whatever adapters come.
        share: `adapter_bytes` over the base model's bytes.
    """

    rank: int
    adapter_bytes: int
    slot_bytes: int
    share: float


def pair_bytes(sites: Iterable[LinearSite], rank: int, dtype: torch.dtype) -> int:
    """Bytes of A and B of one rank on all `sites`."""
    return rank * sum(site.in_features + site.out_features for site in sites) * dtype.itemsize


def estimate(
    touched: Sequence[LinearSite],
    allocated: Sequence[LinearSite],
    ranks: Iterable[int],
    *,
    num_slots: int,
    base_bytes: int,
    dtype: torch.dtype,
) -> list[RankEstimate]:
    """One row a rank. `touched` are the layers that an adapter changes, `allocated` those that the server has room for."""
    return [
        RankEstimate(
            rank,
            pair_bytes(touched, rank, dtype),
            num_slots * pair_bytes(allocated, rank, dtype),
            pair_bytes(touched, rank, dtype) / base_bytes,
        )
        for rank in ranks
    ]
