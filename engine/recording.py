"""A recording of any length, decoded once and cut into pieces that the model hears at once.

Knows the model's window and the limits of files; cutting itself is `engine/segments`. Blocking; called by the service on
a thread, and by benchmarks.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.audio import SILENCE_PEAK
from engine.errors import InvalidRequest
from engine.media import decode_audio
from engine.request import AudioPart
from engine.segments import Piece, cut_at_silence

RATE = 16_000
"""Hz; what speech models take. A model of another rate has its pieces resampled."""

_MIN_WINDOW_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class Recording:
    """Decoded and cut.

    Attributes:
        samples: [S] float32 mono at `RATE`.
        seconds: duration as it came.
        pieces: what is to be heard, in order; none where all is silent.
    """

    samples: np.ndarray
    seconds: float
    pieces: tuple[Piece, ...]

    def part(self, piece: Piece, param: str | None = None) -> AudioPart:
        """A piece as audio for a prompt; shares the recording's memory."""
        return AudioPart((self.samples[piece.start : piece.end], RATE), param)

    def times(self, piece: Piece) -> tuple[float, float]:
        """When its sound begins and ends, in seconds."""
        return piece.sound_start / RATE, min(piece.sound_end / RATE, max(self.seconds, piece.sound_start / RATE))


class RecordingReader:
    """Reads recordings for one model.

    Args:
        window_seconds: longest piece, in seconds, as set.
        max_seconds: longest recording.
        max_bytes: largest file.
        fits: whether the model's context holds a clip of so many seconds and its transcript.
    """

    def __init__(
        self, *, window_seconds: float, max_seconds: float, max_bytes: int, fits: Callable[[float], bool]
    ) -> None:
        self._wanted_seconds = window_seconds
        self._max_seconds = max_seconds
        self._max_bytes = max_bytes
        self._fits = fits

    @cached_property
    def window_seconds(self) -> float:
        """The longest piece that is heard at once, in seconds.

        Raises:
            InvalidRequest: the context holds no second of audio.
        """
        seconds = max(self._wanted_seconds, _MIN_WINDOW_SECONDS)
        while not self._fits(seconds):
            if seconds <= _MIN_WINDOW_SECONDS:
                raise InvalidRequest(
                    "The context is too short for a second of audio; start with a larger --max-model-len.", param="file"
                )
            seconds = max(0.8 * seconds, _MIN_WINDOW_SECONDS)
        return seconds

    def read(self, audio: AudioPart) -> Recording:
        """Decode and cut. What fits the window as it is stays whole.

        Raises:
            MediaError: it cannot be decoded, or is too long or too large.
        """
        clip = decode_audio(audio, rate=RATE, max_seconds=self._max_seconds, max_bytes=self._max_bytes, min_samples=1)
        pieces = cut_at_silence(clip.samples, RATE, self.window_seconds)
        if clip.seconds <= self.window_seconds:
            pieces = self._whole(clip.samples, pieces)
        return Recording(clip.samples, clip.seconds, tuple(pieces))

    @staticmethod
    def _whole(samples: np.ndarray, pieces: list[Piece]) -> list[Piece]:
        """One piece for all, with the times of its sound; none where it is silent."""
        if np.abs(samples).max() < SILENCE_PEAK:
            return []
        if not pieces:
            return [Piece(0, samples.size, 0, samples.size, 0.0)]
        heard = sum((piece.sound_end - piece.sound_start) * (1 - piece.quiet_share) for piece in pieces)
        first, last = pieces[0].sound_start, pieces[-1].sound_end
        return [Piece(0, samples.size, first, last, 1 - heard / (last - first))]


class Joint:
    """What stands between the texts of pieces: a space, unless there is one, or the script writes none."""

    def __init__(self) -> None:
        self._index = 0
        self._last = ""

    def before(self, index: int, text: str) -> str:
        """What to put before the next text, which belongs to piece `index`."""
        is_new, last = index != self._index, self._last
        self._index, self._last = index, text[-1]
        if not is_new or not last or last.isspace() or text[0].isspace() or (_is_wide(last) and _is_wide(text[0])):
            return ""
        return " "


def _is_wide(character: str) -> bool:
    """Chinese and Japanese write no spaces (East Asian Width, Unicode Standard Annex 11)."""
    return unicodedata.east_asian_width(character) in ("W", "F")
