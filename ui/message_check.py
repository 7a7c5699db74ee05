"""Whether a message can be sent at all, told before anything reaches the engine. Called by `ui/chat`."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path

from ui.text import Texts

WAV_HEADER_BYTES = 44


def message_problem(text: Texts, words: str, audio: Sequence[Path]) -> str | None:
    """Why a message cannot be sent; None if it can. Decoding itself is the engine's work."""
    if not words and not audio:
        return text("chat.empty_message")
    for path in audio:
        if is_silent_file(path):
            return text("chat.empty_recording")
    return None


def is_silent_file(path: Path) -> bool:
    """Whether a file is no more than a header: what a recorder delivers that was stopped at once."""
    if path.stat().st_size <= WAV_HEADER_BYTES:
        return True
    try:
        with wave.open(str(path)) as clip:
            return bool(clip.getnframes() == 0)
    except (wave.Error, EOFError):
        return False
