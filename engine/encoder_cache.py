"""Computed media features, so that a clip that returns (the next turn of a chat) is not encoded again.

Owns the tensors, bounded by bytes, least recently used first out. Keyed by the media's content and, where an adapter
changes the tower, by the adapter's content. Touched by the engine thread only.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

Key = tuple[str, str | None]


class EncoderCache:
    """An LRU of [n, H] feature tensors of at most `max_bytes` in all."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._features: OrderedDict[Key, torch.Tensor] = OrderedDict()

    def get(self, key: Key) -> torch.Tensor | None:
        """The features, or None when they must be computed."""
        features = self._features.get(key)
        if features is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._features.move_to_end(key)
        return features

    def put(self, key: Key, features: torch.Tensor) -> None:
        """Keep features; older ones go until all fit. Features larger than the whole cache are not kept."""
        if features.nbytes > self.max_bytes or key in self._features:
            return
        self._features[key] = features
        self.num_bytes += features.nbytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._features.popitem(last=False)
            self.num_bytes -= oldest.nbytes

    def drop_adapter(self, digest: str) -> None:
        """Forget what an unloaded adapter's tower produced."""
        for key in [key for key in self._features if key[1] == digest]:
            self.num_bytes -= self._features.pop(key).nbytes

    def check_integrity(self) -> None:
        """Assert that the byte count is right and within bounds."""
        assert self.num_bytes == sum(features.nbytes for features in self._features.values()) <= self.max_bytes
