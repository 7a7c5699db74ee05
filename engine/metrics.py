"""What the loop measures at each step, as plain numbers: no metrics library, and a few additions a step.

Histograms with fixed buckets; `StepMetrics` and `LoopCounters`, which the loop feeds. `api/metrics` gives them their public form.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.scheduler import Plan

COUNT_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKEN_BOUNDS = (1, 8, 32, 128, 512, 2048, 8192, 32768)


class Histogram:
    """Counts of values up to each of `bounds`, above all of them, and their sum. One thread writes, any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """Take another one's counts in; the bounds must be equal."""
        assert self.bounds == other.bounds, "histograms with different buckets do not add up"
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """`(upper bound, values up to it)` of each bucket, the last one's bound being `+Inf`: Prometheus' form."""
        rows, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], list(self.counts), strict=True):
            below += count
            rows.append((bound, float(below)))
        return rows


class StepMetrics:
    """Sizes of the steps since the start: requests, tokens, and distinct adapters (the base model is none)."""

    def __init__(self) -> None:
        self.num_requests = Histogram(COUNT_BOUNDS)
        self.num_tokens = Histogram(TOKEN_BOUNDS)
        self.num_adapters = Histogram((0, *COUNT_BOUNDS))

    def observe(self, plan: Plan) -> None:
        """Count a step that was launched."""
        self.num_requests.observe(len(plan.items))
        self.num_tokens.observe(plan.num_tokens)
        self.num_adapters.observe(len({item.state.lora_slot for item in plan.items if item.state.lora_slot >= 0}))


MAX_COUNTED_NAMES = 1024
"""Of adapters that come and go for months."""


@dataclasses.dataclass
class LoopCounters:
    """What the loop has done since the start."""

    num_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_finished: Counter[str] = dataclasses.field(default_factory=Counter)
    batch_by_adapter: dict[str, int] = dataclasses.field(default_factory=dict)
    """Requests of the latest step by adapter name; the base model is `base`."""
    rows_by_adapter: Counter[str] = dataclasses.field(default_factory=Counter)
    """The same summed over all steps; names beyond `MAX_COUNTED_NAMES` begin anew once they are in no batch."""
    steps: StepMetrics = dataclasses.field(default_factory=StepMetrics)

    def count(self, plan: Plan) -> None:
        """Note a step that was launched."""
        self.num_steps += 1
        self.steps.observe(plan)
        for item in plan.items:
            if item.start < (prompt_len := item.state.prompt_len):
                self.prompt_tokens += min(item.end, prompt_len) - item.start
        self.batch_by_adapter = dict(Counter(item.state.request.receipt.name or "base" for item in plan.items))
        self.rows_by_adapter.update(self.batch_by_adapter)
        if len(self.rows_by_adapter) > MAX_COUNTED_NAMES:
            self.rows_by_adapter = Counter({name: self.rows_by_adapter[name] for name in self.batch_by_adapter})
