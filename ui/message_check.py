"""Whether a message can be sent at all, told before anything reaches the engine. Called by `ui/openings`."""

from __future__ import annotations

import wave
from collections.abc import Collection, Sequence
from pathlib import Path

from ui.media import attachments, media_kind
from ui.text import Texts

WAV_HEADER_BYTES = 44


def message_problem(text: Texts, words: str, files: Sequence[Path], modalities: Collection[str]) -> str | None:
    """Why a message cannot be sent to a model that takes these media; None if it can. Decoding itself is the engine's work."""
    if not words and not files:
        return text(f"chat.nothing_{media_kind(modalities)}")
    for attached in attachments(files):
        if attached.modality not in modalities:
            return text(f"attach.no_{attached.modality}", name=attached.path.name, taken=media_taken(text, modalities))
        if attached.modality == "audio" and is_silent_file(attached.path):
            return text("chat.empty_recording")
    return None


def media_taken(text: Texts, modalities: Collection[str]) -> str:
    """What the model takes, in words: `text and audio`."""
    return text.media(["text", *sorted(modalities)])


def is_silent_file(path: Path) -> bool:
    """Whether a file is no more than a header: what a recorder delivers that was stopped at once."""
    if path.stat().st_size <= WAV_HEADER_BYTES:
        return True
    try:
        with wave.open(str(path)) as clip:
            return bool(clip.getnframes() == 0)
    except (wave.Error, EOFError):
        return False
