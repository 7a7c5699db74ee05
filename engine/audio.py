"""From a clip to what an audio tower takes, and to the number of placeholders that stand for it.

Wraps the models' own feature extractors; for each, one function gives the number of placeholders, and the tower's output
is checked against it. Runs on the caller's thread, never in an engine step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.errors import MediaError
from engine.frontend import MediaLimits
from engine.media import AudioClip, decode_audio
from engine.request import AudioPart, Modality
from engine.state import MediaInput

SILENCE_PEAK = 1e-3
"""Clips whose samples all stay below this (-60 dB of full scale) hold nothing to hear; a quiet room is louder."""

BESIDE_IMAGES = "_beside_images"
"""Added to the names of a clip's inputs where the prompt's images change what becomes of them."""


class AudioFrontend:
    """What all audio sides share: decoding, and the shape of the result.

    Args:
        extractor: transformers' feature extractor.
        tokenizer: the model's.
        placeholder: text of the one token that stands for a clip, and is repeated.
        inline: text for a clip in a message where the chat template places none; the placeholder itself by default.

    Attributes:
        rate: sampling rate that the model takes, in Hz.
        placeholder, placeholder_id, expansion, inline, modality: as in `engine.frontend.Frontend`.
    """

    modality: Modality = "audio"

    def __init__(self, extractor: Any, tokenizer: Any, placeholder: str, inline: str | None = None) -> None:
        self._extractor = extractor
        self.rate: int = extractor.sampling_rate
        self.placeholder = self.expansion = placeholder
        self.placeholder_id: int = tokenizer.convert_tokens_to_ids(placeholder)
        self.inline = placeholder if inline is None else inline

    def num_tokens(self, num_samples: int) -> int:
        """Placeholders that a clip of `num_samples` samples fills."""
        raise NotImplementedError

    def read(self, part: AudioPart, limits: MediaLimits) -> MediaInput:
        """Decode and prepare one clip; raises `MediaError`."""
        clip = decode_audio(
            part, rate=self.rate, max_seconds=limits.max_audio_seconds, max_bytes=limits.max_media_bytes
        )
        try:
            return self.prepare(clip)
        except MediaError as error:
            error.param = part.param
            raise

    def beside(self, media: MediaInput, modalities: Collection[Modality]) -> MediaInput:
        """As in `engine.frontend.Frontend`: for most models a clip is the same whatever else the prompt holds."""
        return media

    def prepare(self, clip: AudioClip) -> MediaInput:
        """One clip's features, computed alone: padding to a longer one would change them.

        Raises:
            MediaError: the clip is longer than the model can take.
        """
        is_silent = bool(np.abs(clip.samples).max() < SILENCE_PEAK)
        features = self._features(clip.samples)
        return MediaInput(clip.digest, features, self.num_tokens(len(clip.samples)), is_silent=is_silent)

    def _features(self, samples: np.ndarray) -> Mapping[str, torch.Tensor]:
        """What the tower takes, of [S] float32 samples."""
        raise NotImplementedError


class GraniteSpeechFrontend(AudioFrontend):
    """Granite Speech: stacked log-mel frames, three tokens for each window of 15 of them (10 a second)."""

    def __init__(self, processor: Any) -> None:
        super().__init__(processor.audio_processor, processor.tokenizer, processor.audio_token)

    def num_tokens(self, num_samples: int) -> int:
        """3 * ceil(E / 15), E = (S // 160 + 1) // 2, with the checkpoint's own window and rate."""
        return int(self._extractor._get_num_audio_features([num_samples])[0])

    def _features(self, samples: np.ndarray) -> Mapping[str, torch.Tensor]:
        return {"input_features": self._extractor(torch.from_numpy(samples)[None])["input_features"]}


class WhisperFrontend(AudioFrontend):
    """Qwen2-Audio: Whisper's mel frames padded to its 30 seconds, with a mask (25 tokens a second)."""

    def num_tokens(self, num_samples: int) -> int:
        """`((l - 1) // 2 - 1) // 2 + 1` of the l mel frames, which two strided layers halve twice."""
        num_frames = -(-num_samples // int(self._extractor.hop_length))
        return ((num_frames - 1) // 2 - 1) // 2 + 1

    def _features(self, samples: np.ndarray) -> Mapping[str, torch.Tensor]:
        self._check_len(samples)
        return self._mel(samples, "max_length")

    def _check_len(self, samples: np.ndarray) -> None:
        longest: int = self._extractor.n_samples
        if samples.size > longest:
            raise MediaError(
                f"The audio is {samples.size / self.rate:.1f} seconds long, but this model hears {longest / self.rate:g} "
                "seconds at most; cut it into shorter pieces."
            )

    def _mel(self, samples: np.ndarray, padding: str) -> Mapping[str, torch.Tensor]:
        output = self._extractor(
            samples, sampling_rate=self.rate, padding=padding, return_attention_mask=True, return_tensors="pt"
        )
        return {"input_features": output["input_features"], "feature_attention_mask": output["attention_mask"]}


class TrimmedWhisperFrontend(WhisperFrontend):
    """Qwen2.5-Omni: the same frames and count, up to 300 seconds, without the padding, which its tower never sees."""

    def _features(self, samples: np.ndarray) -> Mapping[str, torch.Tensor]:
        self._check_len(samples)
        # Zeros behind the clip, so that its last frame is what it would be in a padded window.
        num_padded = min(int(self._extractor.n_samples), samples.size + 2 * self._extractor.n_fft)
        num_frames = -(-samples.size // self._extractor.hop_length)
        mel = self._mel(np.pad(samples, (0, num_padded - samples.size)), "longest")
        return {name: tensor[..., :num_frames] for name, tensor in mel.items()}


class VoxtralFrontend(AudioFrontend):
    """Voxtral: Whisper's mel frames in windows of 30 seconds, 375 tokens each (12.5 a second, padding included)."""

    def num_tokens(self, num_samples: int) -> int:
        """375 for each begun window: 3000 frames, halved once and then taken four by four."""
        num_windows = -(-num_samples // int(self._extractor.n_samples))
        return num_windows * int(self._extractor.nb_max_frames // 8)

    def _features(self, samples: np.ndarray) -> Mapping[str, torch.Tensor]:
        # Frames first, windows after: the loudest frame of the whole clip sets the floor of all.
        mel = self._extractor(
            samples, sampling_rate=self.rate, truncation=False, padding=True,
            pad_to_multiple_of=int(self._extractor.n_samples), return_tensors="pt",
        )["input_features"][0]  # fmt: skip
        return {
            "input_features": mel.unflatten(1, (-1, int(self._extractor.nb_max_frames))).transpose(0, 1).contiguous()
        }


class ConformerFrontend(AudioFrontend):
    """Phi-4-multimodal: log-mel frames, one token for each eight (12.5 a second); another projection beside images."""

    def num_tokens(self, num_samples: int) -> int:
        """ceil(F / 8) of the F = (S - 400) // 160 + 1 frames, with the checkpoint's own window, hop and rate."""
        window, hop = int(self._extractor.win_length), int(self._extractor.hop_length)
        num_frames = (max(num_samples, window) - window) // hop + 1
        return -(-num_frames // int(self._extractor.audio_compression_rate))

    def beside(self, media: MediaInput, modalities: Collection[Modality]) -> MediaInput:
        """A prompt that holds an image has its clips projected in another way; the input's name says which."""
        if "image" not in modalities:
            return media
        features = {f"{name}{BESIDE_IMAGES}": tensor for name, tensor in media.features.items()}
        return replace(media, digest=f"{media.digest}{BESIDE_IMAGES}", features=features)

    def _features(self, samples: np.ndarray) -> Mapping[str, torch.Tensor]:
        padded = np.pad(samples, (0, max(0, self._extractor.win_length - samples.size)))
        made = self._extractor(padded, sampling_rate=self.rate, return_tensors="pt")
        return {"input_features": made["audio_input_features"]}
