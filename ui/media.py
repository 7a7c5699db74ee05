"""What a visitor attached: files, each with the modality that its content shows. Called by `ui/conversation` and the composer.

Decoding is the engine's work, and its word is final: this only decides whether a file is sent as audio or as an image.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.request import AudioPart, ImagePart, Modality

_IMAGE_STARTS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8")
_HEAD_LEN = 12


@dataclass(frozen=True)
class Attachment:
    """A file of a message."""

    path: Path
    modality: Modality

    def part(self) -> AudioPart | ImagePart:
        """The file as a prompt holds it."""
        kind = ImagePart if self.modality == "image" else AudioPart
        return kind(self.path, param=self.path.name)


def attachments(paths: Iterable[str | Path]) -> tuple[Attachment, ...]:
    """The files of a message in their order."""
    return tuple(Attachment(Path(path), modality_of(Path(path))) for path in paths)


def modality_of(path: Path) -> Modality:
    """By content where it is a known kind of image; else by name, so that the engine's refusal speaks of the right thing."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_LEN)
    except OSError:
        head = b""
    if head.startswith(_IMAGE_STARTS) or (head[:4] == b"RIFF" and head[8:] == b"WEBP"):
        return "image"
    return "image" if (mimetypes.guess_type(path.name)[0] or "").startswith("image/") else "audio"


def joined(modalities: Collection[str]) -> str:
    """As reasons of receipts spell several: `audio+image`."""
    return "+".join(sorted(set(modalities)))


def media_kind(modalities: Collection[str]) -> str:
    """The end of the keys of sentences that say what may be sent: `text`, `audio`, `image` or `both`."""
    known = [modality for modality in ("audio", "image") if modality in modalities]
    return "both" if len(known) == 2 else known[0] if known else "text"
