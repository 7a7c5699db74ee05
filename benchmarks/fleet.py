"""A simulated fleet: replicas that hold adapters on three tiers, and requests that a policy sends to one of them.

Event by event, with a heap. A replica is what one server is to a scheduler: so many requests run at a time, so many adapters
have a row of the LoRA buffers, so many lie in CPU memory, and whoever asks for another waits for one read from disk that all
who ask for it share. Least recently used goes first on both tiers; what is in use stays. Knows nothing of policies' reasons
and of how the times were measured. Used by `benchmarks/placement`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_PASSES = 64
"""Of a request that waits for a row, by later ones that have theirs; as in the engine's scheduler."""


class Arrival(NamedTuple):
    """A request: seconds from the start, the number of its adapter, and the seconds that its answer takes once it runs."""

    at: float
    adapter: int
    service_s: float


class Served(NamedTuple):
    """How a request was served: the replica, the tier that held its adapter, and when its answer began and ended, in seconds."""

    replica: int
    tier: str
    began_at: float
    ended_at: float


@dataclass(frozen=True)
class Shape:
    """One replica.

    Attributes:
        streams: requests that run at a time.
        rows: adapters that a step can read.
        cpu_loras: adapters in CPU memory, those in rows included.
        disk_s: seconds to read one adapter from disk; one after the other.
        row_s: seconds to copy one from CPU memory into a row.
    """

    streams: int
    rows: int
    cpu_loras: int
    disk_s: float
    row_s: float


class Replica:
    """What one server holds and does. `load` counts every request that it was sent and has not answered."""

    def __init__(self, shape: Shape) -> None:
        self.load = 0
        self.num_running = 0
        self.memory: OrderedDict[int, None] = OrderedDict()
        self.reads: dict[int, list[int]] = {}
        self._shape = shape
        self._rows: OrderedDict[int, float] = OrderedDict()
        self._in_memory: defaultdict[int, int] = defaultdict(int)
        self._in_rows: defaultdict[int, int] = defaultdict(int)
        self._queue: deque[tuple[int, int]] = deque()
        self._disk_free_at = 0.0

    def take(self, request: int, adapter: int, now: float) -> tuple[str, float | None]:
        """Accept a request. Returns the tier of its adapter and, where that has to be read, when the read ends."""
        self.load += 1
        self._in_memory[adapter] += 1
        if adapter in self.memory:
            self.memory.move_to_end(adapter)
            self._queue.append((request, adapter))
            return ("row" if adapter in self._rows else "memory"), None
        waiting = self.reads.setdefault(adapter, [])
        waiting.append(request)
        if len(waiting) > 1:
            return "disk", None
        self._disk_free_at = max(now, self._disk_free_at) + self._shape.disk_s
        return "disk", self._disk_free_at

    def finish_read(self, adapter: int) -> list[int]:
        """An adapter is in memory; returns those that were put out for it."""
        self._queue.extend((request, adapter) for request in self.reads.pop(adapter))
        self.memory[adapter] = None
        excess = len(self.memory) - self._shape.cpu_loras
        idle = [held for held in self.memory if not self._in_memory[held]] if excess > 0 else []
        for held in idle[: max(0, excess)]:
            del self.memory[held]
        return idle[: max(0, excess)]

    def start(self, now: float) -> list[tuple[int, float]]:
        """Start what can run, in order. Returns requests with the time at which their row is filled."""
        started, passed = [], deque[tuple[int, int]]()
        while self._queue and self.num_running < self._shape.streams and len(passed) <= MAX_PASSES:
            request, adapter = self._queue.popleft()
            ready_at = self._row(adapter, now)
            if ready_at is None:
                passed.append((request, adapter))
                continue
            self._in_rows[adapter] += 1
            self.num_running += 1
            started.append((request, ready_at))
        self._queue.extendleft(reversed(passed))
        return started

    def finish(self, adapter: int) -> None:
        """A request has been answered."""
        self.load -= 1
        self.num_running -= 1
        self._in_memory[adapter] -= 1
        self._in_rows[adapter] -= 1

    def _row(self, adapter: int, now: float) -> float | None:
        """When the adapter's row can be read; None where every row is in use by others."""
        if adapter not in self._rows:
            if len(self._rows) == self._shape.rows:
                idle = next((held for held in self._rows if not self._in_rows[held]), None)
                if idle is None:
                    return None
                del self._rows[idle]
            self._rows[adapter] = now + self._shape.row_s
        self._rows.move_to_end(adapter)
        return max(now, self._rows[adapter])

    def check_integrity(self) -> None:
        """Nothing is left of what has been answered, and no tier holds more than it may."""
        assert self.load == self.num_running == 0 and not self._queue and not self.reads
        assert not any(self._in_memory.values()) and not any(self._in_rows.values())
        assert len(self._rows) <= self._shape.rows


class Fleet:
    """The replicas as a router sees them, exactly and at once.

    Attributes:
        replicas: by number.
        shape: what each of them is.
        random: for policies; the same seed gives the same run.
    """

    def __init__(self, num_replicas: int, shape: Shape, seed: int) -> None:
        self.replicas = [Replica(shape) for _ in range(num_replicas)]
        self.shape = shape
        self.random = random.Random(seed)
        self.num_under_way = 0
        # adapter -> replicas that have it in memory or are reading it
        self._holders: defaultdict[int, dict[int, None]] = defaultdict(dict)

    def holders(self, adapter: int) -> list[int]:
        """Replicas that have an adapter in CPU memory or are about to."""
        return list(self._holders[adapter])

    def num_copies(self) -> int:
        """Adapters in CPU memory, over all replicas."""
        return sum(len(replica.memory) for replica in self.replicas)

    def is_busy(self, number: int) -> bool:
        """Whether one more request would have to wait for another to end."""
        return self.replicas[number].load >= self.shape.streams

    def least_loaded(self, numbers: Sequence[int]) -> int:
        """The replica with the fewest requests; any of them where several have as few."""
        loads = [self.replicas[number].load for number in numbers]
        lowest = min(loads)
        return self.random.choice([number for number, load in zip(numbers, loads, strict=True) if load == lowest])

    def run(self, trace: Sequence[Arrival], choose: Callable[[Fleet, int], int]) -> list[Served]:
        """Serve a trace, the requests in the order in which they come; returns how each was served.

        `choose(fleet, adapter)` names the replica. Raises `AssertionError` where a request is served twice or never.
        """
        served: list[Served | None] = [None] * len(trace)
        sent: list[tuple[int, str]] = []
        ticket = itertools.count()
        # (time, ticket, replica, request that ends or -1, adapter): an end, or the end of a read
        events: list[tuple[float, int, int, int, int]] = []

        def start(number: int, now: float) -> None:
            for request, ready_at in self.replicas[number].start(now):
                assert served[request] is None, "a request is served twice"
                ended_at = ready_at + trace[request].service_s
                served[request] = Served(*sent[request], ready_at, ended_at)
                heapq.heappush(events, (ended_at, next(ticket), number, request, trace[request].adapter))

        def step() -> None:
            now, _, number, request, adapter = heapq.heappop(events)
            replica = self.replicas[number]
            if request < 0:
                for gone in replica.finish_read(adapter):
                    del self._holders[gone][number]
            else:
                replica.finish(adapter)
                self.num_under_way -= 1
            start(number, now)

        for request, arrival in enumerate(trace):
            while events and events[0][0] <= arrival.at:
                step()
            number = choose(self, arrival.adapter)
            tier, read_at = self.replicas[number].take(request, arrival.adapter, arrival.at)
            sent.append((number, tier))
            self.num_under_way += 1
            if read_at is not None:
                self._holders[arrival.adapter][number] = None
                heapq.heappush(events, (read_at, next(ticket), number, -1, arrival.adapter))
            start(number, arrival.at)
        while events:
            step()
        for replica in self.replicas:
            replica.check_integrity()
        done = [one for one in served if one is not None]
        assert len(done) == len(trace), "a request is never served"
        return done
