"""Ways to choose the replica for a request of an adapter; each sees the fleet's loads and who holds what.

Each is `(fleet, adapter) -> replica's number`. Used by `benchmarks/placement`.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Callable, Iterator

from benchmarks.fleet import Fleet

Policy = Callable[[Fleet, int], int]

POINTS = 64
"""Of each replica on the ring."""
BOUND = 1.25
"""Most load of a replica, in means of the fleet (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads)."""


def at_random(fleet: Fleet, adapter: int) -> int:
    """Any replica."""
    return fleet.random.randrange(len(fleet.replicas))


def least_loaded(fleet: Fleet, adapter: int) -> int:
    """The one with the fewest requests, whatever it holds."""
    return fleet.least_loaded(range(len(fleet.replicas)))


def two_choices(fleet: Fleet, adapter: int) -> int:
    """The less loaded of two at random, whatever they hold."""
    return _better_of_two(fleet, range(len(fleet.replicas)))


def residency_first(fleet: Fleet, adapter: int) -> int:
    """The least loaded that holds the adapter, however loaded; the least loaded of all where none does."""
    holders = fleet.holders(adapter)
    return fleet.least_loaded(holders) if holders else least_loaded(fleet, adapter)


def holders_then_least(fleet: Fleet, adapter: int) -> int:
    """The least loaded that holds the adapter; the least loaded of all where none does or all that do are busy."""
    holders = fleet.holders(adapter)
    best = fleet.least_loaded(holders) if holders else None
    return least_loaded(fleet, adapter) if best is None or fleet.is_busy(best) else best


def holders_then_least_bounded(fleet: Fleet, adapter: int) -> int:
    """The same, but a holder keeps its requests for as long as it has no more than the bound."""
    holders = fleet.holders(adapter)
    best = fleet.least_loaded(holders) if holders else None
    return least_loaded(fleet, adapter) if best is None or fleet.replicas[best].load >= keeps_up_to(fleet) else best


def keeps_up_to(fleet: Fleet) -> int:
    """The load from which a holder sends requests elsewhere: more than runs at a time, and more than the bound.

    Where all are busy, going elsewhere costs a read and gains nothing.
    """
    return max(fleet.shape.streams, bounded_load(fleet))


def bounded_load(fleet: Fleet) -> int:
    """The bound in requests; one replica at least has fewer."""
    return math.ceil(BOUND * (fleet.num_under_way + 1) / len(fleet.replicas))


def holders_then_two(fleet: Fleet, adapter: int) -> int:
    """The less loaded of two that hold the adapter; of two of all where none does or that one is busy."""
    holders = fleet.holders(adapter)
    best = _better_of_two(fleet, holders) if holders else None
    return two_choices(fleet, adapter) if best is None or fleet.is_busy(best) else best


class Ring:
    """Consistent hashing: the adapter's place on a ring of replicas decides.

    Args:
        num_replicas: how many stand on the ring.
        is_bounded: whether replicas that have as much to do as the bound allows are passed by.
    """

    def __init__(self, num_replicas: int, *, is_bounded: bool) -> None:
        self._is_bounded = is_bounded
        self._points = sorted((_place(f"{n}/{p}"), n) for n in range(num_replicas) for p in range(POINTS))
        self._starts: dict[int, int] = {}

    def __call__(self, fleet: Fleet, adapter: int) -> int:
        walk = self._walk(adapter)
        if not self._is_bounded:
            return next(walk)
        most = bounded_load(fleet)
        return next(number for number in walk if fleet.replicas[number].load < most)

    def holders_then_ring(self, fleet: Fleet, adapter: int) -> int:
        """The same, but those who cannot stay go to the first on the ring that has room, so they meet again there."""
        most = keeps_up_to(fleet)
        holders = fleet.holders(adapter)
        best = fleet.least_loaded(holders) if holders else None
        if best is not None and fleet.replicas[best].load < most:
            return best
        return next(number for number in self._walk(adapter) if fleet.replicas[number].load < most)

    def _walk(self, adapter: int) -> Iterator[int]:
        """Replicas from the adapter's place on."""
        if adapter not in self._starts:
            self._starts[adapter] = bisect.bisect(self._points, (_place(f"adapter {adapter}"), 0))
        for step in range(len(self._points)):
            yield self._points[(self._starts[adapter] + step) % len(self._points)][1]


def all_policies(num_replicas: int) -> dict[str, Policy]:
    """By the names that tables show."""
    ring = Ring(num_replicas, is_bounded=True)
    return {
        "random": at_random,
        "least loaded": least_loaded,
        "two choices": two_choices,
        "consistent hashing": Ring(num_replicas, is_bounded=False),
        "bounded hashing": ring,
        "residency first": residency_first,
        "two holders, then two": holders_then_two,
        "holders, then least": holders_then_least,
        "holders to a bound, then least": holders_then_least_bounded,
        "holders to a bound, then ring": ring.holders_then_ring,
    }


def _better_of_two(fleet: Fleet, numbers: range | list[int]) -> int:
    return fleet.least_loaded(numbers if len(numbers) < 2 else fleet.random.sample(numbers, 2))


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
