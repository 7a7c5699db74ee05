"""What the engine did in the last minutes, second by second, for the Status tab's plots.

Owns a ring of samples, taken whenever some open page asks, and the first-token times of the web app's own answers. Knows
nothing of drawing. One for all visitors; used on the event loop alone.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.engine import EngineStats

MIN_GAP_S = 0.9
WINDOW_S = 180.0
MAX_LATENCIES = 200


@dataclass(frozen=True)
class Sample:
    """One look at the engine; rates are means since the sample before, a second.

    Attributes:
        at: `time.monotonic`, seconds.
        tokens_per_s, prompt_tokens_per_s: generated and read tokens.
        kv_share: share of the KV blocks in use, 0 to 1.
        num_waiting: requests that no step has had yet.
        batch: adapter -> its requests in a batch, as a mean over the batches since the sample before; the base model is `base`.
        loads, evictions: of adapters into rows and out of them or of CPU memory, since the sample before.
    """

    at: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    kv_share: float
    num_waiting: int
    batch: dict[str, float]
    loads: int
    evictions: int


class Samples:
    """The samples of the last minutes, oldest first."""

    def __init__(self) -> None:
        self._previous: tuple[float, EngineStats] | None = None
        self._samples: deque[Sample] = deque()
        self._latencies: deque[tuple[float, float]] = deque(maxlen=MAX_LATENCIES)

    def take(self, stats: EngineStats, now: float | None = None) -> None:
        """Add a sample, unless the latest one is too young."""
        now = time.monotonic() if now is None else now
        if self._previous is not None:
            before, old = self._previous
            if now - before < MIN_GAP_S:
                return
            self._samples.append(_sample(old, stats, now, now - before))
        self._previous = now, stats
        while self._samples and self._samples[0].at < now - WINDOW_S:
            self._samples.popleft()

    def note_first_token(self, seconds: float) -> None:
        """An answer of the web app has begun, so long after it was sent."""
        self._latencies.append((time.monotonic(), seconds))

    def recent(self) -> list[Sample]:
        """The samples of the window."""
        return list(self._samples)

    def latencies(self) -> list[tuple[float, float]]:
        """When answers began (`time.monotonic`), and after how many seconds, in the window."""
        start = time.monotonic() - WINDOW_S
        return [(at, seconds) for at, seconds in self._latencies if at >= start]


def _sample(old: EngineStats, new: EngineStats, now: float, gap_s: float) -> Sample:
    evictions = new.lora_row_evictions - old.lora_row_evictions + new.adapters.evictions - old.adapters.evictions
    num_steps = max(1, new.num_steps - old.num_steps)
    rows = {name: count - old.rows_by_adapter.get(name, 0) for name, count in new.rows_by_adapter.items()}
    batch = {name: count / num_steps for name, count in rows.items() if count > 0}
    return Sample(
        at=now,
        tokens_per_s=(new.generated_tokens - old.generated_tokens) / gap_s,
        prompt_tokens_per_s=(new.prompt_tokens - old.prompt_tokens) / gap_s,
        kv_share=new.kv_blocks_used / new.kv_blocks_total if new.kv_blocks_total else 0.0,
        num_waiting=new.num_waiting,
        batch=batch,
        loads=new.lora_row_loads - old.lora_row_loads,
        evictions=evictions,
    )
