"""How much memory adapters take, by rank, from a model's layers alone.

A pair on a layer of `in` and `out` features holds `rank * (in + out)` numbers. Knows nothing of files. Called by
`__main__`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from adapters.surface import LinearSite, ModelSurface


@dataclass(frozen=True)
class RankEstimate:
    """Memory of adapters of one rank.

    Attributes:
        rank: of every module.
        adapter_bytes: of one adapter on the layers that were asked about.
        slot_bytes: of the server's buffers for `num_slots` adapters of up to this rank, which are allocated at start for
            every layer that may carry LoRA and the embedding, whatever adapters come.
        share: `adapter_bytes` over the base model's bytes.
    """

    rank: int
    adapter_bytes: int
    slot_bytes: int
    share: float


def pair_bytes(sites: Iterable[LinearSite], rank: int, dtype: torch.dtype) -> int:
    """Bytes of A and B of one rank on all `sites`."""
    return rank * sum(site.in_features + site.out_features for site in sites) * dtype.itemsize


def slot_bytes(surface: ModelSurface, rank: int) -> int:
    """Bytes of one row of the server's buffers: room for LoRA of this rank on all that adapters may touch."""
    sites = [site for name, site in surface.linears.items() if surface.is_targeted(name)]
    tables = [table for name, table in surface.embeddings.items() if surface.is_targeted(name)]
    numbers = rank * sum(table.num_tokens + table.width for table in tables)
    return pair_bytes(sites, rank, surface.lora_dtype) + numbers * surface.lora_dtype.itemsize


def estimate(
    touched: Sequence[LinearSite], surface: ModelSurface, ranks: Iterable[int], *, num_slots: int, base_bytes: int
) -> list[RankEstimate]:
    """One row a rank. `touched` are the layers that an adapter changes, `surface` all that the server has room for."""
    dtype = surface.lora_dtype
    return [
        RankEstimate(
            rank,
            pair_bytes(touched, rank, dtype),
            num_slots * slot_bytes(surface, rank),
            pair_bytes(touched, rank, dtype) / base_bytes,
        )
        for rank in ranks
    ]
