"""A loaded share of a model: how its layers are cut, and between whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adapters.surface import LinearSite
from engine.parallel.collectives import RankGroup
from engine.parallel.shards import LinearShard


@dataclass(frozen=True)
class Split:
    """What `BaseModel.split` says of a model that is spread over the ranks of `group`.

    Attributes:
        shards: the linears that are cut, by module name; all others are whole on every rank.
    """

    shards: Mapping[str, LinearShard]
    group: RankGroup

    @property
    def kv_parts(self) -> int:
        """Into how many parts the KV heads are divided: 1 where every rank computes the attention of all heads."""
        is_divided = any(name.endswith(".k_proj") and not shard.is_joined for name, shard in self.shards.items())
        return self.group.size if is_divided else 1

    def whole_site(self, site: LinearSite) -> LinearSite:
        """A linear of this rank as the whole model has it."""
        shard = self.shards.get(site.name)
        return site if shard is None else LinearSite(site.name, shard.in_features, shard.out_features, site.part)

    def local_site(self, site: LinearSite) -> LinearSite:
        """A linear of the whole model as this rank has it."""
        shard = self.shards.get(site.name)
        return site if shard is None else shard.local_site(site, self.group.size)
