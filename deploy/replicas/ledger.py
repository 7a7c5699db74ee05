"""The list of changes to adapters that all replicas follow: who may change a name now, what it means since, who has it.

One process holds it, in memory. Replicas ask for what is new again and again (`sync`), and every one of them has the whole
list: after a restart of this process they bring it back, and nothing is changed until all have had the time to. Knows nothing
of Ray and of engines. Deployed by `deploy/ray_serve`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adapters.name_state import DEFAULTS, NameState

# A replica that has not asked for so long is gone; one that has nothing to hear asks again after `POLL_SECONDS`.
LEASE_SECONDS = 12.0
POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Change:
    """What a name means since the `seq`-th change."""

    seq: int
    state: NameState


@dataclass(frozen=True)
class News:
    """What `Ledger.sync` answers.

    Attributes:
        epoch: which process holds the ledger; another one than before knows nothing yet.
        head: number of the latest change.
        changes: the latest change of each name, of those after what the replica has seen, in order.
    """

    epoch: str
    head: int
    changes: Sequence[Change]


@dataclass
class _Follower:
    seen: int = 0
    asked_at: float = 0.0
    # name -> (number of the change, why it could not be followed)
    failed: Mapping[str, tuple[int, str]] = field(default_factory=dict)


class Ledger:
    """Changes in order, and turns by name. For one event loop.

    Args:
        lease_seconds: how long a replica that says nothing counts as alive.
        grace_seconds: how long it gives no turns and records nothing at first: until it has heard what another one recorded.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        *,
        lease_seconds: float = LEASE_SECONDS,
        grace_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoch = uuid.uuid4().hex
        self._head = 0
        self._changes: dict[str, Change] = {}
        self._followers: dict[str, _Follower] = {}
        # name -> replica that may change it now
        self._turns: dict[str, str] = {}
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._begins_at = clock() + grace_seconds
        self._moved = asyncio.Condition()

    async def sync(
        self,
        replica: str,
        epoch: str,
        seen: int,
        failed: Mapping[str, tuple[int, str]],
        known: Sequence[Change] = (),
        wait_s: float = POLL_SECONDS,
    ) -> News:
        """What a replica has not seen, as soon as there is anything.

        Args:
            replica: its id.
            epoch: of its latest news; empty before the first.
            seen: number of the latest change that it has followed.
            failed: changes that it could not follow, by name.
            known: all changes that it knows, where the epoch of its latest news is not the one before.
            wait_s: how long to wait for news, in seconds.
        """
        async with self._moved:
            self._take_in(known)
            earlier = self._followers.get(replica)
            if earlier is None or earlier.seen <= seen:  # Calls may overtake each other.
                self._followers[replica] = _Follower(seen, self._clock(), dict(failed))
            self._moved.notify_all()
            if epoch == self._epoch:
                await self._until(lambda: self._head > seen, wait_s)
            follower = self._followers.get(replica)
            if follower is not None:
                follower.asked_at = self._clock()
            news = [change for change in self._changes.values() if change.seq > seen]
            return News(self._epoch, self._head, sorted(news, key=lambda change: change.seq))

    async def leave(self, replica: str) -> None:
        """A replica ends in order."""
        async with self._moved:
            self._followers.pop(replica, None)
            self._moved.notify_all()

    async def take_turn(self, name: str, replica: str, wait_s: float) -> bool:
        """Let a replica change a name, once no other replica does; False where that took longer than `wait_s` seconds.

        A turn ends with `end_turn`, or when its replica is gone. A replica that has it may take it again: it may not have heard.
        """
        async with self._moved:
            if not await self._until(lambda: self._may_change(name, replica), wait_s):
                return False
            self._turns[name] = replica
            return True

    async def end_turn(self, name: str, replica: str, epoch: str, state: NameState | None, base: int) -> Change | None:
        """End a turn with what the name means now, or None where nothing changed.

        A state is recorded only by the ledger that the replica knows (`epoch`), where no other replica has the turn and the
        latest change of the name is still the one that this one was made upon (`base`; 0 for none).

        Returns:
            The name's latest change, recorded now or not; None where there is none, or the ledger is another one.
        """
        async with self._moved:
            is_recorded = state is not None and self._may_record(name, replica, epoch, base)
            if self._turns.get(name) == replica and (state is None or is_recorded):
                del self._turns[name]
            if state is not None and is_recorded:
                self._head += 1
                self._changes[name] = Change(self._head, state)
            self._moved.notify_all()
            return self._changes.get(name) if epoch == self._epoch else None

    async def settled(self, seq: int, wait_s: float) -> tuple[int, int]:
        """Wait until every replica has followed a change, at most `wait_s` seconds: how many have, and of how many."""
        async with self._moved:
            await self._until(lambda: all(follower.seen >= seq for follower in self._live().values()), wait_s)
            return self._count(seq)

    async def status(self) -> dict[str, Any]:
        """JSON-ready: the replicas, and of each name that was changed who has its latest change."""
        live = self._live()
        return {
            "changes": self._head,
            "replicas": [
                {"id": replica, "changes": follower.seen, "is_current": follower.seen >= self._head}
                for replica, follower in sorted(live.items())
            ],
            "adapters": [self._row(change, live) for name, change in self._changes.items() if name != DEFAULTS],
        }

    def _row(self, change: Change, live: Mapping[str, _Follower]) -> dict[str, Any]:
        have, of = self._count(change.seq)
        name = change.state.name
        failures = {replica: each.failed[name][1] for replica, each in live.items() if _has_failed(each, change)}
        return {"name": name, "generation": change.state.generation, "have": have, "of": of, "failures": failures}

    def _count(self, seq: int) -> tuple[int, int]:
        live = self._live().values()
        failed_at = [number for follower in live for number, _ in follower.failed.values()]
        return sum(follower.seen >= seq for follower in live) - failed_at.count(seq), len(live)

    def _live(self) -> dict[str, _Follower]:
        oldest = self._clock() - self._lease_seconds
        self._followers = {replica: each for replica, each in self._followers.items() if each.asked_at >= oldest}
        return self._followers

    def _may_change(self, name: str, replica: str) -> bool:
        holder = self._turns.get(name)
        return self._clock() >= self._begins_at and (holder == replica or holder not in self._live())

    def _may_record(self, name: str, replica: str, epoch: str, base: int) -> bool:
        latest = self._changes.get(name)
        is_same = base == (0 if latest is None else latest.seq)
        return epoch == self._epoch and is_same and self._may_change(name, replica)

    def _take_in(self, known: Sequence[Change]) -> None:
        """What a replica knows from before this process began."""
        for change in known:
            mine = self._changes.get(change.state.name)
            if mine is None or mine.seq < change.seq:
                self._changes[change.state.name] = change
            self._head = max(self._head, change.seq)

    async def _until(self, is_so: Callable[[], bool], wait_s: float) -> bool:
        """Wait for a condition; leases end without anybody saying so, so it is looked at every now and then."""
        deadline = self._clock() + wait_s
        while not is_so():
            left = deadline - self._clock()
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(self._moved.wait(), min(left, 1.0))
            except (asyncio.TimeoutError, TimeoutError):
                continue
        return True


def _has_failed(follower: _Follower, change: Change) -> bool:
    return follower.failed.get(change.state.name, (0, ""))[0] == change.seq
