"""Which replica a request goes to: adapter affinity with bounded load, a pure function.

An adapter's requests stay on one replica for as long as that one is not busy, so that few replicas hold it and its batches
are full; beyond that they spread. Called by `router`; knows nothing of Ray.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

MAX_SHARE = 1.25
"""A holder keeps its adapter's requests up to this many means of the replicas' loads, however busy it is.

Where all are busy, going elsewhere costs a read and gains nothing; `benchmarks.placement` shows what it would do.
"""


@dataclass(frozen=True)
class ReplicaView:
    """A replica as the router sees it.

    Attributes:
        replica: its id.
        load: requests under way on it and waiting for it.
        adapters: names of adapters that it holds.
    """

    replica: str
    load: int = 0
    adapters: Collection[str] = ()


def rank_replicas(
    views: Sequence[ReplicaView],
    *,
    adapter: str | None,
    busy_at: int,
    prefer: str | None = None,
    avoid: Collection[str] = (),
) -> list[str]:
    """Ids of all replicas, the best one first.

    With an adapter, in this order: those that hold it and are not busy, or not much busier than the mean; others that are
    not busy, those with the fewest adapters first; the rest, by load. Equals are ordered by rendezvous hashing (Thaler and
    Ravishankar, 1998) of adapter and replica, so that every router chooses alike without having asked another. Without an
    adapter, the least load is first.

    Args:
        views: the replicas.
        adapter: name of the adapter that the request names, or None.
        busy_at: load from which a replica is busy.
        prefer: the replica that has the page which sends this, which goes before everything else.
        avoid: replicas that have just been lost; they come last.
    """

    mean = (sum(view.load for view in views) + 1) / max(1, len(views))
    kept_below = max(busy_at, math.ceil(MAX_SHARE * mean))

    def badness(view: ReplicaView) -> tuple[bool, bool, int, int, bytes]:
        is_last, is_other = view.replica in avoid, view.replica != prefer
        tie = _weight(adapter or "", view.replica)
        if adapter is None:
            return is_last, is_other, view.load, 0, tie
        holds = adapter in view.adapters
        if view.load >= (kept_below if holds else busy_at):
            return is_last, is_other, 2 + view.load, not holds, tie
        return is_last, is_other, 0 if holds else 1, 0 if holds else len(view.adapters), tie

    return [view.replica for view in sorted(views, key=badness)]


def _weight(adapter: str, replica: str) -> bytes:
    """The same for every process, unlike `hash`."""
    return hashlib.blake2b(f"{adapter}\0{replica}".encode(), digest_size=8).digest()
