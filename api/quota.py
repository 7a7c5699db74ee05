"""How much one key may ask for: requests and tokens a minute. Knows nothing of HTTP or of who asks. Used by `tenants`."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from engine.errors import Overloaded


class RateLimited(Overloaded):
    """The key's share of requests or tokens is used up for now."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.retry_after = max(1, math.ceil(wait_s))


class _Bucket:
    """A level that fills at `per_minute` a minute up to as much, and may be overdrawn."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def wait_for(self, amount: float, now: float) -> float:
        """Seconds until the level is at least `amount`."""
        self._level = min(self.per_minute, self._level + (now - self._filled_at) * self.per_minute / 60)
        self._filled_at = now
        return max(0.0, (amount - self._level) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        self._level -= amount


class Quota:
    """The share of one key. Thread-safe.

    A request is let in while any token is left; what its answer took is booked when it ends, so that the answers under
    way may overdraw, and the key then waits until that is made good.

    Args:
        requests_per_minute, tokens_per_minute: None means no bound.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        now = clock()
        self.bounds = (requests_per_minute, tokens_per_minute)
        self._requests = None if requests_per_minute is None else _Bucket(requests_per_minute, now)
        self._tokens = None if tokens_per_minute is None else _Bucket(tokens_per_minute, now)

    def admit(self) -> None:
        """Book one request; raises `RateLimited` where requests or tokens are used up, and books nothing then."""
        with self._lock:
            now = self._clock()
            for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
                wait_s = 0.0 if bucket is None else bucket.wait_for(1, now)
                if bucket is not None and wait_s > 0:
                    raise RateLimited(f"This key may use {bucket.per_minute} {what} a minute; try again later.", wait_s)
            if self._requests is not None:
                self._requests.take(1)

    def spend(self, num_tokens: int) -> None:
        """Book the tokens of a request that has ended."""
        with self._lock:
            if self._tokens is not None:
                self._tokens.take(num_tokens)
