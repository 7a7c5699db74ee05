"""Subtitle files: SubRip and WebVTT from timed texts. Called by `transcriptions` and the browser app.

Sources: WebVTT is https://www.w3.org/TR/webvtt1/; SubRip has no standard and is written as players read it: numbered
cues, a comma before the milliseconds, a blank line after each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Timed(Protocol):
    """Text with its time, in seconds."""

    @property
    def start(self) -> float:
        """When it begins."""

    @property
    def end(self) -> float:
        """When it ends."""

    @property
    def text(self) -> str:
        """What is said."""


def write_srt(segments: Sequence[Timed]) -> str:
    """SubRip; segments without text are left out."""
    cues = (
        f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{text}\n"
        for number, (start, end, text) in enumerate(_cues(segments), start=1)
    )
    return "\n".join(cues)


def write_vtt(segments: Sequence[Timed]) -> str:
    """WebVTT; segments without text are left out."""
    cues = (f"{_clock(start, '.')} --> {_clock(end, '.')}\n{_escape(text)}\n" for start, end, text in _cues(segments))
    return "\n".join(["WEBVTT\n", *cues])


def _cues(segments: Sequence[Timed]) -> Iterator[tuple[int, int, str]]:
    """(start, end, text) with times in milliseconds, text on one line, and no cue without a duration."""
    for segment in segments:
        # A blank line would end the cue, and an arrow would begin another.
        text = " ".join(segment.text.split()).replace("-->", "->")
        if text:
            start = round(1000 * segment.start)
            yield start, max(round(1000 * segment.end), start + 1), text


def _clock(milliseconds: int, mark: str) -> str:
    """`HH:MM:SS` and, after the mark, milliseconds; hours have as many digits as they need."""
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{mark}{rest:03}"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
