"""Where to cut a long recording: at silence, into pieces that a model hears at once.

A pure function of samples: energy by frame, thresholds from the levels around it, hysteresis, and the quietest place where
nobody pauses. Knows nothing of models and files. Called by `engine/recording`.

Dimension letters: S samples, F frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FRAME_SECONDS = 0.01
PAUSE_SECONDS = 0.5
"""Sound apart by less than this belongs together."""
MARGIN_SECONDS = 0.2
"""Kept before and after sound, where there is room: soft consonants are below any threshold."""
MIN_SOUND_SECONDS = 0.03
"""Sound shorter than this is a click."""
SILENCE_DB = -60.0
"""Root mean square, in dB of full scale, below which nothing can be heard."""

_TILE_SECONDS = 30.0  # levels are judged by those of a tile and of its neighbours
_FLOOR_DB = -65.0  # digital silence counts as this
_STEADY_DB = 6.0  # levels that differ by less hold no pauses: music, noise, a tone
_BLOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Piece:
    """Samples [start, end) of a recording, to be heard at once.

    Attributes:
        sound_start: first sample of the sound in it, without the margin.
        sound_end: sample after the last of the sound.
        quiet_share: share of the frames between the two that are below the threshold of sound.
    """

    start: int
    end: int
    sound_start: int
    sound_end: int
    quiet_share: float


def cut_at_silence(samples: np.ndarray, rate: int, max_seconds: float) -> list[Piece]:
    """Pieces of at most `max_seconds`, in order and not overlapping; what lies between them is silent.

    Sound begins where the level passes the upper of two thresholds and ends where it stays below the lower one. Pauses
    of `PAUSE_SECONDS` and more divide pieces; where a piece would be too long without one, it is cut at the quietest
    fifth of a second of its later half. Needs memory for one block and a few numbers a frame.

    Args:
        samples: [S] float32 in -1..1.
        rate: samples in a second.
        max_seconds: the model's window; at least a second.
    """
    assert max_seconds >= 1.0
    frame_len = max(1, round(rate * FRAME_SECONDS))
    levels = frame_levels(samples, frame_len)
    if not levels.size:
        return []
    upper, lower = _thresholds(levels)
    runs = _sound_runs(levels, upper, lower)
    max_frames = int(max_seconds * rate / frame_len)
    cuts: list[tuple[int, int]] = []
    for start, end in _with_margins(runs, levels.size):
        cuts += _split(levels, start, end, max_frames)
    is_quiet = levels < lower
    return [_piece(cut, runs, is_quiet, frame_len, samples.size) for cut in cuts]


def frame_levels(samples: np.ndarray, frame_len: int) -> np.ndarray:
    """Root mean square of each frame in dB of full scale, [F] float32 and not below a floor; a last, short frame counts."""
    block_len = frame_len * max(1, round(_BLOCK_SECONDS / FRAME_SECONDS))
    levels = np.empty(-(-samples.size // frame_len), dtype=np.float32)
    for start in range(0, samples.size, block_len):
        block = samples[start : start + block_len]
        num_whole = block.size // frame_len
        whole = block[: num_whole * frame_len].reshape(num_whole, frame_len)
        power = np.einsum("fs,fs->f", whole, whole) / frame_len
        rest = block[num_whole * frame_len :]
        if rest.size:
            power = np.append(power, np.dot(rest, rest) / rest.size)
        first = start // frame_len
        levels[first : first + power.size] = 10 * np.log10(np.maximum(power, 1e-12))
    return np.maximum(levels, _FLOOR_DB)


def _thresholds(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Upper and lower threshold of each frame, [F] float32 each, from quantiles of the minute and a half around it."""
    tile_len = round(_TILE_SECONDS / FRAME_SECONDS)
    upper, lower = np.empty_like(levels), np.empty_like(levels)
    for start in range(0, levels.size, tile_len):
        around = levels[max(0, start - tile_len) : start + 2 * tile_len]
        floor, top = np.percentile(around, (10, 95))
        tile = slice(start, start + tile_len)
        if top - floor < _STEADY_DB:
            upper[tile] = lower[tile] = SILENCE_DB
        else:
            upper[tile] = max(SILENCE_DB, floor + np.clip(0.3 * (top - floor), 4, 12))
            lower[tile] = max(SILENCE_DB, floor + np.clip(0.15 * (top - floor), 2, 7))
    return upper, lower


def _sound_runs(levels: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> list[tuple[int, int]]:
    """Frames [start, end) of each stretch of sound, apart by a pause or more."""
    pause, shortest = (round(seconds / FRAME_SECONDS) for seconds in (PAUSE_SECONDS, MIN_SOUND_SECONDS))
    loud = np.concatenate([[0], np.cumsum(levels >= upper)])
    joined: list[tuple[int, int]] = []
    for start, end in _runs(levels >= lower):
        if loud[end] - loud[start] < shortest:
            continue
        if joined and start - joined[-1][1] < pause:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _with_margins(runs: list[tuple[int, int]], num_frames: int) -> list[tuple[int, int]]:
    """Runs with a margin at either end; neighbours share a gap that is too small for both."""
    margin = round(MARGIN_SECONDS / FRAME_SECONDS)
    wide = []
    for index, (start, end) in enumerate(runs):
        first = 0 if index == 0 else (runs[index - 1][1] + start + 1) // 2
        last = num_frames if index + 1 == len(runs) else (end + runs[index + 1][0] + 1) // 2
        wide.append((max(first, start - margin), min(last, end + margin)))
    return wide


def _split(levels: np.ndarray, start: int, end: int, max_frames: int) -> list[tuple[int, int]]:
    """A stretch in pieces of at most `max_frames`, cut where it is quietest; none is much shorter than a quarter of that."""
    pieces = []
    while end - start > max_frames:
        earliest = start + max_frames // 2
        latest = min(start + max_frames, end - max_frames // 4)
        cut = _quietest(levels, earliest, latest)
        pieces.append((start, cut))
        start = cut
    return [*pieces, (start, end)]


def _quietest(levels: np.ndarray, earliest: int, latest: int) -> int:
    """The frame in [earliest, latest] in the middle of the quietest fifth of a second; the last of equals."""
    width = min(round(0.2 / FRAME_SECONDS), latest - earliest)
    if width < 1:
        return latest
    sums = np.concatenate([[0.0], np.cumsum(levels[earliest:latest], dtype=np.float64)])
    means = (sums[width:] - sums[:-width]).round(3)
    last_minimum: int = means.size - 1 - int(means[::-1].argmin())
    return earliest + last_minimum + width // 2


def _piece(
    cut: tuple[int, int], runs: list[tuple[int, int]], is_quiet: np.ndarray, frame_len: int, num_samples: int
) -> Piece:
    """Samples of a cut, with the sound that lies in it."""
    start, end = cut
    inside = [(max(start, first), min(end, last)) for first, last in runs if first < end and last > start]
    sound_start, sound_end = (inside[0][0], inside[-1][1]) if inside else (start, end)
    return Piece(
        start=start * frame_len,
        end=min(end * frame_len, num_samples),
        sound_start=sound_start * frame_len,
        sound_end=min(sound_end * frame_len, num_samples),
        quiet_share=float(is_quiet[sound_start:sound_end].mean()),
    )
