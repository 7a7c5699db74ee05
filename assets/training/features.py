"""Clips on the device: a store of samples, augmentation, and the feature extractor's log-mel frames.

`F` encoder frames of 20 ms belong to `320 F - 160` samples. Letters: `C` clips, `S` samples, `Q` rooms.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torchaudio
from torch import Tensor, nn

from .acoustics import ROOM_SECONDS

RATE = 16_000
ROOM_LEN = round(ROOM_SECONDS * RATE)
# Encoder frames of a batch; each clip goes into the smallest that holds it.
BUCKETS = (30, 40, 50, 65, 85, 105, 130, 160, 200, 250, 315, 400, 500, 640)


def num_samples(frames: int) -> int:
    """Samples that give exactly `frames` encoder frames."""
    return 320 * frames - 160


@dataclass
class ClipBatch:
    """Which clips to cut and how, all [C]: offsets and lengths in samples, the rest as float32 but for `room`.

    Attributes:
        room: number of the room's response, -1 for none.
        noise: root mean square of the noise beside a speech of 1; 0 for none.
        tilt: of the noise: its power falls with frequency to that power.
        babble: share of the noise that is other clips of the batch.
        low, high: Hz between which sound is kept.
    """

    start: np.ndarray
    length: np.ndarray
    speed: np.ndarray
    lead: np.ndarray
    gain: np.ndarray
    room: np.ndarray
    noise: np.ndarray
    tilt: np.ndarray
    babble: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass
class SpeechStore:
    """All clips so far: int16 samples on the device, texts and places on the host."""

    device: torch.device
    capacity: int
    num_rooms: int = 0
    texts: list[str] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    by_bucket: dict[int, list[int]] = field(default_factory=lambda: {bucket: [] for bucket in BUCKETS})
    used: int = 0

    def __post_init__(self) -> None:
        self.samples = torch.zeros(self.capacity, dtype=torch.int16, device=self.device)

    def add(self, samples: np.ndarray, lens: np.ndarray, texts: list[str]) -> None:
        """Takes clips that lie one after the other in `samples`; full = ignored."""
        if self.used + len(samples) + num_samples(BUCKETS[-1]) > self.capacity:
            return
        self.samples[self.used : self.used + len(samples)] = torch.from_numpy(samples).to(self.device)
        position = self.used
        for clip_len, text in zip(lens.tolist(), texts, strict=True):
            bucket = next((bucket for bucket in BUCKETS if num_samples(bucket) >= clip_len), None)
            if bucket is not None:
                self.by_bucket[bucket].append(len(self.texts))
                self.texts.append(text)
                self.start.append(position)
                self.length.append(clip_len)
            position += clip_len
        self.used += len(samples)

    def choose(
        self, bucket: int, count: int, rng: np.random.Generator, augment: bool = True
    ) -> tuple[np.ndarray, ClipBatch]:
        """`count` clips that fit `bucket`: their indices and a draw of augmentations."""
        own = self.by_bucket[bucket]
        below = self.by_bucket[BUCKETS[max(0, BUCKETS.index(bucket) - 1)]]
        index = np.array(own)[rng.integers(0, len(own), count)]
        if augment and below:
            other = np.array(below)[rng.integers(0, len(below), count)]
            index = np.where(rng.random(count) < 0.3, other, index)
        total = num_samples(bucket)
        start = np.array([self.start[i] for i in index], np.int64)
        length = np.array([self.length[i] for i in index], np.int64)
        speed = np.ones(count, np.float32)
        if augment:
            draw = rng.random(count)
            lowest = np.maximum(0.85, length / total)
            speed = np.where(draw < 0.35, rng.uniform(lowest, np.maximum(1.15, lowest)), speed)
            # Some clips fill their frames to the last one: no margin at either end.
            speed = np.where(draw > 0.85, lowest, speed).astype(np.float32)
        slack = np.maximum(0.0, total - length / speed)
        lead = (slack * (rng.random(count) if augment else 0.5)).astype(np.float32)
        lead = np.where(speed == 1.0, np.floor(lead), lead).astype(np.float32)
        places = (start, length, speed, lead)
        return index, ClipBatch(*places, *(_surroundings(count, self.num_rooms, rng) if augment else _silence(count)))


def _surroundings(count: int, num_rooms: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Gain, room, noise, tilt, babble and band of each clip: a third are near and quiet, the others have one or more."""
    is_plain = rng.random(count) < 0.33
    gain = 10 ** rng.uniform(-1.3, 0.15, count)
    has_room = ~is_plain & (rng.random(count) < 0.5) & (num_rooms > 0)
    room = np.where(has_room, rng.integers(0, max(1, num_rooms), count), -1)
    snr_db = np.where(is_plain, rng.uniform(30, 60, count), rng.uniform(3, 35, count))
    noise = np.where(is_plain | (rng.random(count) < 0.75), 10 ** (-snr_db / 20), 0.0)
    tilt = rng.uniform(-0.5, 2.5, count)
    babble = np.where(~is_plain & (rng.random(count) < 0.35), rng.uniform(0.3, 1, count), 0.0)
    has_band = ~is_plain & (rng.random(count) < 0.3)
    low = np.where(has_band, 10 ** rng.uniform(1.3, 2.6, count), 0.0)
    high = np.where(has_band, rng.uniform(3000, 8000, count), 8001.0)
    return (gain.astype(np.float32), room, *(x.astype(np.float32) for x in (noise, tilt, babble, low, high)))


def _silence(count: int) -> tuple[np.ndarray, ...]:
    zero = np.zeros(count, np.float32)
    return zero + 1, np.full(count, -1), zero, zero, zero, zero, zero + 8001


class FeatureMaker(nn.Module):
    """Cuts, augments and turns clips into encoder input, as the model's own feature extractor does.

    Args:
        rooms: [Q, ROOM_LEN] float32, each from its direct sound on.
    """

    def __init__(self, store: SpeechStore, rooms: Tensor) -> None:
        super().__init__()
        self._samples = store.samples
        self._rooms = torch.cat([rooms, torch.zeros(1, ROOM_LEN)]).to(store.device)
        self._rooms[-1, 0] = 1.0
        self.mel = torchaudio.transforms.MelSpectrogram(RATE, n_fft=512, win_length=400, hop_length=160, n_mels=80)
        self.to(store.device)

    def waveform(self, batch: dict[str, Tensor], frames: int) -> Tensor:
        """[C] fields of a `ClipBatch` -> [C, S] float32: in its room, in its noise, in its band."""
        length = num_samples(frames)
        place = torch.arange(length, device=self._samples.device, dtype=torch.float32)[None]
        wave = self._read(batch, (place - batch["lead"][:, None]) * batch["speed"][:, None])
        # A size that transforms quickly, with room for the response's tail.
        size = -(-(length + ROOM_LEN) // 8000) * 8000
        frequency = torch.fft.rfftfreq(size, 1 / RATE, device=wave.device)[None]
        band = (frequency >= batch["low"][:, None]) & (frequency <= batch["high"][:, None])
        response = torch.fft.rfft(self._rooms[batch["room"]], size)
        wave = torch.fft.irfft(torch.fft.rfft(wave, size) * response * band, size)[:, :length]
        wave = wave / wave.abs().amax(1, keepdim=True).clamp(min=1e-6)
        others = wave.roll(1, 0) + wave.roll(2, 0) + wave.roll(3, 0)
        hiss = torch.fft.rfft(torch.randn_like(wave), size)
        hiss = torch.fft.irfft(hiss * frequency.clamp(min=40) ** (-batch["tilt"][:, None] / 2) * band, size)[:, :length]
        share = batch["babble"][:, None]
        noise = _unit(_unit(hiss) * (1 - share) + _unit(others) * share)
        level = wave.square().sum(1, keepdim=True).div((batch["length"] / batch["speed"])[:, None]).sqrt()
        wave = wave + noise * level * batch["noise"][:, None]
        return wave / wave.abs().amax(1, keepdim=True).clamp(min=1e-6) * 0.73 * batch["gain"][:, None]

    def _read(self, batch: dict[str, Tensor], place: Tensor) -> Tensor:
        whole = place.floor()
        part = place - whole
        last = (batch["length"] - 1)[:, None]
        left = whole.long()
        inside = (left >= 0) & (left <= last)
        left = left.clamp(min=0)
        first = self._samples[batch["start"][:, None] + torch.minimum(left, last)].float()
        second = self._samples[batch["start"][:, None] + torch.minimum(left + 1, last)].float()
        return torch.where(inside, torch.lerp(first, second, part), 0.0) / 32768

    def forward(self, batch: dict[str, Tensor], frames: int, augment: bool = True) -> Tensor:
        """[C] fields -> [C, F, 160] float32."""
        return self.log_mel(self.waveform(batch, frames), frames, augment)

    def log_mel(self, wave: Tensor, frames: int, augment: bool) -> Tensor:
        """[C, S] samples that give `frames` encoder frames -> [C, F, 160] float32."""
        mel = self.mel(wave)
        log_mel = mel.transpose(-1, -2).clamp(min=1e-10).log10()
        top = log_mel.amax(dim=(-2, -1), keepdim=True)
        log_mel = torch.maximum(log_mel, top - 8.0) / 4 + 1
        if augment:
            log_mel = self._mask(self._mask(log_mel, 1, 12), 2, 8)
        return log_mel.reshape(log_mel.shape[0], frames, 160)

    @staticmethod
    def _mask(log_mel: Tensor, dim: int, widest: int) -> Tensor:
        """SpecAugment on half of the clips: one stretch along `dim` set to the clip's mean."""
        count, size = log_mel.shape[0], log_mel.shape[dim]
        device = log_mel.device
        width = torch.rand(count, 1, device=device) * widest * (torch.rand(count, 1, device=device) < 0.5)
        begin = torch.rand(count, 1, device=device) * (size - width)
        place = torch.arange(size, device=device)[None]
        inside = (place >= begin) & (place < begin + width)
        inside = inside[:, :, None] if dim == 1 else inside[:, None, :]
        return torch.where(inside, log_mel.mean(dim=(1, 2), keepdim=True), log_mel)


def _unit(x: Tensor) -> Tensor:
    """Rows [C, S] of root mean square 1."""
    return x / x.square().mean(1, keepdim=True).sqrt().clamp(min=1e-9)
