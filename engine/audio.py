"""From a decoded clip to what the audio tower takes, and to the number of placeholders that stand for it.

Wraps the model's own feature extractor; one function gives the number of placeholders, and the tower's output is checked
against it. Runs on the caller's thread, never in an engine step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.media import AudioClip
from engine.state import MediaInput

SILENCE_PEAK = 1e-3
"""Clips whose samples all stay below this (-60 dB of full scale) hold nothing to hear; a quiet room is louder."""


class AudioFrontend:
    """The audio side of a model's processor.

    Args:
        processor: transformers' processor of the model (Granite Speech's).
    """

    def __init__(self, processor: Any) -> None:
        self._extractor = processor.audio_processor
        self.rate: int = self._extractor.sampling_rate
        """Sampling rate that the model takes, in Hz."""
        self.placeholder: str = processor.audio_token
        """Text that stands for one clip in a prompt."""
        self.placeholder_id: int = processor.tokenizer.convert_tokens_to_ids(processor.audio_token)

    def num_tokens(self, num_samples: int) -> int:
        """Placeholders that a clip of `num_samples` samples fills."""
        return int(self._extractor._get_num_audio_features([num_samples])[0])

    def prepare(self, clip: AudioClip) -> MediaInput:
        """Log-mel features of one clip, computed alone: padding to a longer one would change them."""
        features: torch.Tensor = self._extractor(torch.from_numpy(clip.samples)[None])["input_features"]
        is_silent = bool(np.abs(clip.samples).max() < SILENCE_PEAK)
        return MediaInput(clip.digest, features, self.num_tokens(len(clip.samples)), is_silent)
