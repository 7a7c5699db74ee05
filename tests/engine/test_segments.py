"""Long recordings are cut where nothing is said, whole speech stays whole, and nothing that sounds is lost."""

from __future__ import annotations

import itertools
import time
import tracemalloc

import numpy as np
import pytest

from engine.segments import MARGIN_SECONDS, PAUSE_SECONDS, Piece, cut_at_silence, frame_levels

RATE = 16_000


def noise(seconds: float, level_db: float, seed: int = 0) -> np.ndarray:
    """[S] float32 of a given root mean square in dB of full scale."""
    values = np.random.default_rng(seed).standard_normal(round(seconds * RATE), dtype=np.float32)
    return values * np.float32(10 ** (level_db / 20))


def recording(
    bursts: list[tuple[float, float]], seconds: float, *, level_db: float = -20, floor_db: float = -75
) -> np.ndarray:
    """[S] float32: bursts (start, end) in seconds over a floor."""
    samples = noise(seconds, floor_db, seed=1)
    for index, (start, end) in enumerate(bursts):
        first, last = round(start * RATE), round(end * RATE)
        samples[first:last] += noise((last - first) / RATE, level_db, seed=index + 2)
    return samples


def seconds_of(pieces: list[Piece]) -> list[tuple[float, float]]:
    """Sound of each piece, in seconds."""
    return [(piece.sound_start / RATE, piece.sound_end / RATE) for piece in pieces]


def check_order(pieces: list[Piece], num_samples: int, max_seconds: float) -> None:
    last = 0
    for piece in pieces:
        assert last <= piece.start <= piece.sound_start < piece.sound_end <= piece.end <= num_samples
        assert piece.end - piece.start <= max_seconds * RATE
        assert 0 <= piece.quiet_share <= 1
        last = piece.end


@pytest.mark.parametrize("floor_db", [-200, -75, -50, -38])
def test_pauses_divide_pieces_whatever_the_noise_of_the_room(floor_db: float) -> None:
    bursts = [(0.8, 2.0), (2.9, 6.1), (7.4, 7.9), (10.0, 14.5)]
    pieces = cut_at_silence(recording(bursts, 16, floor_db=floor_db), RATE, 12)
    assert np.abs(np.subtract(seconds_of(pieces), bursts)).max() <= 0.03
    for piece, (start, end) in zip(pieces, bursts, strict=True):
        margins = (start - piece.start / RATE, piece.end / RATE - end)
        assert margins == pytest.approx((MARGIN_SECONDS, MARGIN_SECONDS), abs=0.03)
    check_order(pieces, 16 * RATE, 12)


def test_short_pauses_do_not_divide() -> None:
    bursts = [(1.0, 2.0), (2.0 + PAUSE_SECONDS - 0.05, 4.0), (4.0 + PAUSE_SECONDS + 0.05, 6.0)]
    pieces = cut_at_silence(recording(bursts, 7), RATE, 12)
    assert np.abs(np.subtract(seconds_of(pieces), [(1.0, 4.0), bursts[2]])).max() <= 0.03
    assert pieces[0].quiet_share == pytest.approx((PAUSE_SECONDS - 0.05) / 3, abs=0.02)
    assert pieces[0].end == pieces[1].start or pieces[1].start - pieces[0].end < 0.2 * RATE


def test_sound_that_dips_between_the_thresholds_is_one_piece() -> None:
    samples = recording([(1, 3), (4, 6)], 7)
    dip = slice(3 * RATE, 4 * RATE)
    samples[dip] = noise(1, -62)
    assert len(cut_at_silence(samples, RATE, 12)) == 2
    samples[dip] = noise(1, -54.5)  # above the lower threshold, and 8 dB below the upper one would not begin a piece
    assert len(cut_at_silence(samples, RATE, 12)) == 1
    alone = noise(7, -75)
    alone[dip] = samples[dip]
    alone[5 * RATE : 6 * RATE] = noise(1, -20)
    assert len(cut_at_silence(alone, RATE, 12)) == 1


def test_clicks_are_not_sound() -> None:
    samples = recording([(1, 2)], 6)
    samples[4 * RATE : 4 * RATE + 200] = 0.5
    assert len(cut_at_silence(samples, RATE, 12)) == 1


def test_a_quiet_voice_beside_a_loud_one_is_kept() -> None:
    samples = recording([(1, 3), (9, 11)], 14, level_db=-12, floor_db=-70)
    samples += recording([(5, 7)], 14, level_db=-45, floor_db=-80)
    assert np.abs(np.subtract(seconds_of(cut_at_silence(samples, RATE, 12)), [(1, 3), (5, 7), (9, 11)])).max() <= 0.03


@pytest.mark.parametrize("level_db", [-3, -40, -55])
@pytest.mark.parametrize("seconds", [0.3, 11.9, 12.1, 24.5, 100.003])
def test_sound_without_any_silence_is_cut_into_windows_that_cover_it(seconds: float, level_db: float) -> None:
    samples = noise(seconds, level_db)
    pieces = cut_at_silence(samples, RATE, 12)
    check_order(pieces, samples.size, 12)
    assert (pieces[0].start, pieces[-1].end) == (0, samples.size)
    assert all(piece.end == after.start for piece, after in itertools.pairwise(pieces))
    assert len(pieces) == 1 or min(piece.end - piece.start for piece in pieces) >= 3 * RATE


@pytest.mark.parametrize("silence", [np.zeros(40 * RATE, np.float32), noise(40, -63), noise(40, -90)])
def test_nothing_is_left_of_silence(silence: np.ndarray) -> None:
    assert cut_at_silence(silence, RATE, 12) == []
    assert cut_at_silence(silence[:0], RATE, 12) == []


def test_a_piece_without_a_pause_is_cut_where_it_is_quietest() -> None:
    samples = recording([(0, 20)], 20)
    samples[round(9.3 * RATE) : round(9.5 * RATE)] *= 0.1
    samples[round(3.3 * RATE) : round(3.5 * RATE)] *= 0.01  # quieter, but in the first half of the window
    first, second = cut_at_silence(samples, RATE, 12)
    assert first.end == second.start
    assert first.end / RATE == pytest.approx(9.4, abs=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_loud_is_lost_and_pieces_are_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges = np.cumsum(rng.uniform(0.05, 5, 60))
    bursts = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    samples = recording(bursts, edges[-1] + 0.0123, level_db=float(rng.uniform(-30, -10)), floor_db=-60)
    pieces = cut_at_silence(samples, RATE, 8)
    check_order(pieces, samples.size, 8)
    is_covered = np.zeros(samples.size, dtype=bool)
    for piece in pieces:
        is_covered[piece.start : piece.end] = True
    frames = frame_levels(samples, 160) > -40
    assert frames.mean() > 0.2
    assert is_covered[: 160 * (frames.size - 1) : 160][frames[:-1]].all()


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
def test_other_rates_give_the_same_times(rate: int) -> None:
    samples = np.interp(np.arange(6 * rate) / rate, np.arange(6 * RATE) / RATE, recording([(1, 2), (3, 5)], 6))
    pieces = cut_at_silence(samples.astype(np.float32), rate, 12)
    found = [(piece.sound_start / rate, piece.sound_end / rate) for piece in pieces]
    assert np.abs(np.subtract(found, [(1, 2), (3, 5)])).max() <= 0.03


def test_an_hour_takes_seconds_and_little_memory() -> None:
    minute = recording([(start, start + 3.0) for start in range(0, 60, 4)], 60, floor_db=-60)
    hour = np.tile(minute, 60)
    tracemalloc.start()
    try:
        started = time.thread_time()
        pieces = cut_at_silence(hour, RATE, 12)
        elapsed = time.thread_time() - started
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(pieces) == 15 * 60
    assert peak < 30e6 < hour.nbytes
    assert elapsed < 20
