"""Rooms, noise and features of the demo model's training: the device's arithmetic is that of plain numpy and of the product."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from transformers import GraniteSpeechFeatureExtractor

from assets.training import acoustics
from assets.training.features import FeatureMaker, SpeechStore, num_samples

RATE = 16_000
FRAMES = 40


def stored_clips() -> SpeechStore:
    """Two clips that fill most of `FRAMES`."""
    store = SpeechStore(torch.device("cpu"), 20 * num_samples(640), num_rooms=1)
    rng = np.random.default_rng(0)
    clips = [np.cumsum(rng.standard_normal(length)) for length in (11_000, 12_000)]
    samples = np.concatenate([(20_000 * clip / np.abs(clip).max()).astype(np.int16) for clip in clips])
    store.add(samples, np.array([11_000, 12_000]), ["one", "two"])
    return store


def plain_batch(store: SpeechStore):
    """Both clips without any augmentation."""
    index, batch = store.choose(FRAMES, 16, np.random.default_rng(1), augment=False)
    assert set(index) == {0, 1}
    return index, batch


def tensors(batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.asarray(getattr(batch, name))) for name in batch.__dataclass_fields__}


def laid_out(store: SpeechStore, index: np.ndarray, batch) -> np.ndarray:
    """[C, S] of the clips at their places, loudest sample 1."""
    rows = np.zeros((len(index), num_samples(FRAMES)), np.float64)
    for row, clip, lead in zip(rows, index, batch.lead.astype(int), strict=True):
        start, length = store.start[clip], store.length[clip]
        row[lead : lead + length] = store.samples[start : start + length].numpy()
    return rows / np.abs(rows).max(1, keepdims=True)


def test_first_reflections_are_those_of_the_six_walls() -> None:
    size, source, microphone = np.array([5.0, 4.0, 3.0]), np.array([1.0, 1.5, 1.2]), np.array([3.0, 2.0, 1.0])
    distances, bounces = acoustics._images(size, source, microphone)
    mirrored = [source]
    for axis in range(3):
        for wall in (0.0, size[axis]):
            image = source.copy()
            image[axis] = 2 * wall - source[axis]
            mirrored.append(image)
    expected = [np.linalg.norm(image - microphone) for image in mirrored]
    assert np.allclose(distances[bounces == 0], expected[:1])
    assert np.allclose(sorted(distances[bounces == 1]), sorted(expected[1:]))
    response = acoustics.room_response(random.Random(4))
    assert response[0] == 1 == response.max() and response.shape == (8000,)
    assert np.square(response[4000:]).sum() < 0.5 * np.square(response[:4000]).sum()


def test_noise_is_as_far_below_the_speech_as_asked() -> None:
    rng = np.random.default_rng(2)
    wave = np.concatenate([np.zeros(8000), 0.1 * np.sin(np.arange(32_000) / 20)]).astype(np.float32)
    level = 10 * np.log10(np.mean(wave[8000:] ** 2))
    for noise in (acoustics.coloured_noise(40_000, 1, rng), acoustics.hum(40_000, rng)):
        added = acoustics.with_noise(wave, noise, 12) - wave
        assert abs(level - 10 * np.log10(np.mean(added**2)) - 12) < 0.5


def test_clips_without_augmentation_are_as_stored() -> None:
    store = stored_clips()
    index, batch = plain_batch(store)
    maker = FeatureMaker(store, torch.zeros(0, acoustics.room_response(random.Random(0)).size))
    wave = maker.waveform(tensors(batch), FRAMES).numpy()
    assert np.abs(wave - 0.73 * laid_out(store, index, batch)).max() < 1e-4


def test_rooms_and_noise_on_the_device_are_those_of_numpy() -> None:
    store = stored_clips()
    index, batch = plain_batch(store)
    response = acoustics.room_response(random.Random(1))
    maker = FeatureMaker(store, torch.from_numpy(response)[None])
    in_room = maker.waveform(tensors(replace(batch, room=np.zeros_like(batch.room))), FRAMES).numpy()
    expected = np.stack([acoustics.in_room(row, response) for row in laid_out(store, index, batch)])
    assert np.abs(in_room - 0.73 * expected).max() < 1e-3
    assert np.abs(in_room - 0.73 * laid_out(store, index, batch)).max() > 0.05
    noisy = maker.waveform(tensors(replace(batch, noise=batch.noise + 0.1, tilt=batch.tilt + 1)), FRAMES).numpy()
    for heard, said, length in zip(noisy, laid_out(store, index, batch), batch.length, strict=True):
        scale = heard @ said / (said @ said)
        noise = np.sqrt(np.mean((heard - scale * said) ** 2)) / (scale * np.sqrt((said @ said) / length))
        assert 0.08 < noise < 0.12


def test_features_are_those_of_the_product() -> None:
    store = stored_clips()
    _, batch = plain_batch(store)
    maker = FeatureMaker(store, torch.zeros(0, 8000))
    wave = maker.waveform(tensors(batch), FRAMES)
    features = maker(tensors(batch), FRAMES, augment=False)
    extractor = GraniteSpeechFeatureExtractor()
    for row, clip in zip(features, wave, strict=True):
        expected = extractor(clip[None])["input_features"][0]
        assert torch.allclose(row, expected, atol=1e-4)
