"""Recordings are read whole where they fit the window, in pieces where they do not, and within bounds."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Engine
from engine.errors import InvalidRequest, MediaError
from engine.recording import RATE, RecordingReader
from engine.request import AudioPart
from tests.oracles import tone


def reader(*, window: float = 4.0, longest: float = 100.0) -> RecordingReader:
    """A reader whose context holds any window up to 10 seconds."""
    return RecordingReader(
        window_seconds=window, max_seconds=longest, max_bytes=2**20, fits=lambda seconds: seconds <= 10
    )


def spoken(*parts: float) -> np.ndarray:
    """[S] float32: tones of so many seconds, and silence for the negative ones."""
    return np.concatenate([tone(part) if part > 0 else np.zeros(round(-part * RATE), np.float32) for part in parts])


def test_what_fits_the_window_stays_whole_with_the_times_of_its_sound() -> None:
    samples = spoken(-0.5, 1.0, -1.0, 0.5, -0.7)
    read = reader().read(AudioPart((samples, RATE)))
    [piece] = read.pieces
    assert (piece.start, piece.end) == (0, samples.size)
    assert read.times(piece) == pytest.approx((0.5, 3.0), abs=0.02)
    assert piece.quiet_share == pytest.approx(1.0 / 2.5, abs=0.02)
    part, _ = read.part(piece).source  # type: ignore[misc]
    assert np.shares_memory(part, read.samples) and (part == samples).all()


def test_what_does_not_is_cut_and_silence_left_out() -> None:
    read = reader().read(AudioPart((spoken(-2.0, 1.0, -3.0, 2.0), RATE)))
    assert [read.times(piece) for piece in read.pieces] == [
        pytest.approx((2.0, 3.0), abs=0.02), pytest.approx((6.0, 8.0), abs=0.02),
    ]  # fmt: skip


@pytest.mark.parametrize("num_samples", [1, 100, 399, 400, 401])
def test_the_shortest_recordings_are_one_piece_within_their_duration(num_samples: int) -> None:
    read = reader().read(AudioPart((tone(1.0)[1 : num_samples + 1], RATE)))
    [piece] = read.pieces
    start, end = read.times(piece)
    assert 0 <= start < end == pytest.approx(num_samples / RATE)


@pytest.mark.parametrize("seconds", [0.1, 3.0, 9.0])
def test_a_silent_recording_has_no_pieces(seconds: float) -> None:
    assert reader().read(AudioPart((np.full(round(seconds * RATE), 5e-4, np.float32), RATE))).pieces == ()


def test_the_window_shrinks_until_the_context_holds_it() -> None:
    assert reader(window=8.0).window_seconds == 8.0
    assert 8.0 < reader(window=30.0).window_seconds <= 10.0
    with pytest.raises(InvalidRequest, match="too short for a second of audio"):
        _ = RecordingReader(window_seconds=30, max_seconds=60, max_bytes=1, fits=lambda seconds: False).window_seconds


def test_an_engine_asks_its_own_context(tiny_engine: Engine) -> None:
    seconds = tiny_engine.recordings.window_seconds
    assert 10 < seconds < 30  # 10 tokens a second in a context of 512, with as much room again
    num_tokens = len(tiny_engine.tokenize(tiny_engine.transcription_prompt(AudioPart((tone(seconds), RATE)))))
    assert 200 < 2 * num_tokens <= tiny_engine.max_model_len


def test_a_recording_over_the_limit_is_refused_with_its_field() -> None:
    with pytest.raises(MediaError, match="longer than 2 seconds") as caught:
        reader(longest=2.0).read(AudioPart((tone(2.1), RATE), "file"))
    assert caught.value.param == "file"
