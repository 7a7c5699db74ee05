"""Subtitle files are what players read, whatever the texts hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

from api.subtitles import write_srt, write_vtt


@dataclass(frozen=True)
class Line:
    start: float
    end: float
    text: str


LINES = (
    Line(0.0, 1.5, "hello there"),
    Line(1.5, 1.9, "  "),
    Line(59.9996, 61.0004, " a <b> & c --> d\n\ne "),
    Line(3661.25, 3661.25, "one"),
    Line(360_000, 360_001, "late"),
)


def test_srt_numbers_cues_and_leaves_out_those_without_text() -> None:
    assert write_srt(LINES) == (
        "1\n00:00:00,000 --> 00:00:01,500\nhello there\n\n"
        "2\n00:01:00,000 --> 00:01:01,000\na <b> & c -> d e\n\n"
        "3\n01:01:01,250 --> 01:01:01,251\none\n\n"
        "4\n100:00:00,000 --> 100:00:01,000\nlate\n"
    )


def test_vtt_has_its_header_and_escapes_markup() -> None:
    assert write_vtt(LINES[:3]) == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:01.500\nhello there\n\n"
        "00:01:00.000 --> 00:01:01.000\na &lt;b&gt; &amp; c -&gt; d e\n"
    )


def test_nothing_said_is_an_empty_file() -> None:
    assert write_srt(()) == ""
    assert re.fullmatch(r"WEBVTT\n+", write_vtt(LINES[1:2]))
