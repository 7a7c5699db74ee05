"""Resampling of audio as it is decoded, so that an hour at a high rate never lies in memory.

The filter is the caller's function for whole signals; here is only the cutting, with as much context on either side as the
filter is long. The result does not depend on how the blocks are divided. Called by `engine/media`.

Dimension letters: S samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

CHUNK_SECONDS = 30.0
CONTEXT_SECONDS = 0.1
"""More than half the length of the filters in use."""

Resample = Callable[[np.ndarray, int, int], np.ndarray]


def resample_blocks(
    blocks: Iterable[np.ndarray], source_rate: int, rate: int, resample: Resample
) -> Iterator[np.ndarray]:
    """Blocks [S] float32 at `source_rate` Hz -> the same signal at `rate` Hz, in blocks of another size.

    `resample(samples, source_rate, rate)` turns S samples into ceil(S * rate / source_rate). A signal that is no longer than
    a chunk and its context goes through it whole.
    """
    if source_rate == rate:
        yield from blocks
        return
    # Chunks begin at whole multiples of this many samples, where samples of both rates coincide.
    unit = source_rate // math.gcd(source_rate, rate)
    context = unit * math.ceil(CONTEXT_SECONDS * source_rate / unit)
    chunk = unit * math.ceil(CHUNK_SECONDS * source_rate / unit)
    held: list[np.ndarray] = []
    num_held = num_before = 0  # samples held, and how many of them were given out already
    for block in blocks:
        held.append(block)
        num_held += block.size
        while num_held > num_before + chunk + context:
            signal = np.concatenate(held)
            window = resample(signal[: num_before + chunk + context], source_rate, rate)
            first, last = (num * rate // source_rate for num in (num_before, num_before + chunk))
            yield window[first:last]
            held = [signal[num_before + chunk - context :]]
            num_held, num_before = held[0].size, context
    if num_held:
        yield resample(np.concatenate(held), source_rate, rate)[num_before * rate // source_rate :]
