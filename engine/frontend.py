"""The border between a model's processor and the engine: what stands for a media item in a prompt, and what its tower takes.

One frontend a modality. A prompt's text holds `placeholder` for an item; it becomes `expansion`, in which the token
`placeholder_id` then stands as often as the item has features. Implemented by `engine/audio` and `engine/vision`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from engine.request import AudioPart, ImagePart, Modality
from engine.state import MediaInput


class MediaLimits(Protocol):
    """Bounds on one media file."""

    @property
    def max_audio_seconds(self) -> float:
        """Longest clip, in seconds."""

    @property
    def max_media_bytes(self) -> int:
        """Largest file, in bytes."""


class Frontend(Protocol):
    """One modality of a model."""

    @property
    def modality(self) -> Modality:
        """What it takes."""

    @property
    def placeholder(self) -> str:
        """Text that stands for one item in a raw prompt and in what the chat template writes."""

    @property
    def expansion(self) -> str:
        """What the model reads in place of `placeholder`; holds the token `placeholder_id` once."""

    @property
    def placeholder_id(self) -> int:
        """The token that is repeated."""

    @property
    def inline(self) -> str:
        """Text that goes into a message for an item where the chat template places no media itself."""

    def read(self, part: Any, limits: MediaLimits) -> MediaInput:
        """Decode and prepare one item; raises `MediaError` with the part's `param`."""

    def beside(self, media: MediaInput, modalities: Collection[Modality]) -> MediaInput:
        """The item as the model takes it in a prompt that holds these modalities, with a digest of its own if it differs."""


def modality_of(part: AudioPart | ImagePart) -> Modality:
    """The modality of a part of a message."""
    return "audio" if isinstance(part, AudioPart) else "image"
