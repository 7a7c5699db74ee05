"""Resampling in chunks gives what resampling the whole signal gives, however the decoder divides it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from engine import resampling
from engine.media import resample
from engine.resampling import resample_blocks


def divided(signal: np.ndarray, seed: int) -> Iterator[np.ndarray]:
    """The signal in blocks of random size, empty ones among them."""
    rng = np.random.default_rng(seed)
    while signal.size:
        num = int(rng.choice([0, 1, 1024, 5000, signal.size // 3 + 1]))
        yield signal[:num]
        signal = signal[num:]


@pytest.mark.parametrize("seconds", [0.01, 0.999, 2.2, 7.3])
@pytest.mark.parametrize(
    ("source_rate", "tolerance"),
    [(48_000, 1e-6), (44_100, 1e-6), (8_000, 1e-6), (11_025, 1e-6), (16_000, 0), (15_999, 1e-3)],
)
def test_chunks_add_up_to_the_whole(
    source_rate: int, tolerance: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resampling, "CHUNK_SECONDS", 0.5)
    rng = np.random.default_rng(source_rate)
    signal = rng.uniform(-1, 1, int(seconds * source_rate)).astype(np.float32)
    whole = resample(signal, source_rate, 16_000)
    results = [
        np.concatenate(list(resample_blocks(divided(signal, seed), source_rate, 16_000, resample))) for seed in (0, 1)
    ]
    assert (results[0] == results[1]).all()
    assert results[0].size == whole.size
    assert np.abs(results[0] - whole).max() <= tolerance
    assert np.abs(whole).max() > 0.5


def test_a_context_that_is_too_short_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "CHUNK_SECONDS", 0.5)
    monkeypatch.setattr(resampling, "CONTEXT_SECONDS", 1e-4)
    signal = np.random.default_rng(0).uniform(-1, 1, 96_000).astype(np.float32)
    result = np.concatenate(list(resample_blocks([signal], 48_000, 16_000, resample)))
    assert np.abs(result - resample(signal, 48_000, 16_000)).max() > 1e-3


def test_no_more_than_a_few_chunks_are_held() -> None:
    block = np.ones(48_000, np.float32)

    def thinned(signal: np.ndarray, source_rate: int, rate: int) -> np.ndarray:
        return signal[::3]

    tracemalloc.start()
    try:
        blocks = (block.copy() for _ in range(600))
        num_samples = sum(part.size for part in resample_blocks(blocks, 48_000, 16_000, thinned))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_samples == 600 * 16_000
    assert peak < 20e6 < 600 * block.nbytes


def test_nothing_gives_nothing() -> None:
    assert list(resample_blocks([], 48_000, 16_000, resample)) == []
