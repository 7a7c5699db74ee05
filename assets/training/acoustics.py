"""Rooms and noise for the demo model's clips: impulse responses of shoebox rooms, coloured noise, hum, telephone bands.

numpy alone. `features` applies the same things on the device in training, with other rooms; `held_out` applies these to what
is measured.
"""

from __future__ import annotations

import random

import numpy as np

RATE = 16_000
SOUND_SPEED = 343.0  # metres a second
ROOM_SECONDS = 0.5


def room_response(rng: random.Random) -> np.ndarray:
    """[8000] float32 from the direct sound on, which is 1: a room drawn at random, by Allen and Berkley's image sources.

    2.5 to 8 metres long, walls that swallow 15 to 60 % of the energy, speaker and microphone 0.3 to 3 metres apart.
    """
    size = np.array([rng.uniform(2.5, 8), rng.uniform(2.5, 6), rng.uniform(2.3, 3.5)])
    reflection = np.sqrt(1 - rng.uniform(0.15, 0.6))
    while True:
        source, microphone = (np.array([rng.uniform(0.2, side - 0.2) for side in size]) for _ in range(2))
        if 0.3 <= np.linalg.norm(source - microphone) <= 3:
            break
    distance, bounces = _images(size, source, microphone)
    direct = np.linalg.norm(source - microphone)
    amplitude = reflection**bounces * direct / distance
    place = (distance - direct) / SOUND_SPEED * RATE
    length = round(ROOM_SECONDS * RATE)
    inside = place < length - 1
    whole = place[inside].astype(np.int64)
    part = place[inside] - whole
    response = np.bincount(whole, amplitude[inside] * (1 - part), length)
    return (response + np.bincount(whole + 1, amplitude[inside] * part, length)).astype(np.float32)


def _images(size: np.ndarray, source: np.ndarray, microphone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances of all mirror images that are heard in time, and how many walls each has met."""
    reach = SOUND_SPEED * ROOM_SECONDS
    offsets, bounces = [], []
    for side, mine, other in zip(size, source, microphone, strict=True):
        count = int(reach / (2 * side)) + 1
        order = np.arange(-count, count + 1)
        offsets.append(np.concatenate([2 * order * side + mine - other, 2 * order * side - mine - other]))
        bounces.append(np.concatenate([np.abs(2 * order), np.abs(2 * order - 1)]))
    x, y, z = (offset**2 for offset in offsets)
    squares = (x[:, None, None] + y[None, :, None] + z[None, None, :]).reshape(-1)
    walls = (bounces[0][:, None, None] + bounces[1][None, :, None] + bounces[2][None, None, :]).reshape(-1)
    near = squares < reach**2 * 1.2
    return np.sqrt(squares[near]), walls[near]


def in_room(wave: np.ndarray, response: np.ndarray) -> np.ndarray:
    """`wave` [S] as the room answers, as long and as loud at its loudest as before."""
    total = wave.size + response.size - 1
    heard = np.fft.irfft(np.fft.rfft(wave, total) * np.fft.rfft(response, total), total)[: wave.size]
    return (heard * np.abs(wave).max() / max(1e-9, np.abs(heard).max())).astype(np.float32)


def coloured_noise(length: int, tilt: float, rng: np.random.Generator) -> np.ndarray:
    """[length] float32 of root mean square 1, its power falling with frequency to the power of `tilt`: 0 white, 2 brown."""
    spectrum = np.fft.rfft(rng.standard_normal(length))
    frequency = np.maximum(np.fft.rfftfreq(length, 1 / RATE), 40)
    noise = np.fft.irfft(spectrum * frequency ** (-tilt / 2), length)
    return (noise / np.sqrt(np.mean(noise**2))).astype(np.float32)


def hum(length: int, rng: np.random.Generator) -> np.ndarray:
    """[length] float32 of root mean square 1: a mains hum with its overtones."""
    pitch = rng.choice([50.0, 60.0])
    time = np.arange(length) / RATE
    strengths = rng.uniform(0.1, 1, 12) / np.arange(1, 13)
    phases = rng.uniform(0, 2 * np.pi, 12)
    waves = (s * np.sin(2 * np.pi * pitch * (k + 1) * time + p) for k, (s, p) in enumerate(zip(strengths, phases)))  # noqa: B905
    total = np.sum(list(waves), axis=0)
    return (total / np.sqrt(np.mean(total**2))).astype(np.float32)


def with_noise(wave: np.ndarray, noise: np.ndarray, snr_db: float) -> np.ndarray:
    """`wave` [S] and noise of root mean square 1, so that where the wave sounds it is `snr_db` above the noise; not over 1."""
    loud = wave[np.abs(wave) > 0.02 * np.abs(wave).max()]
    level = np.sqrt(np.mean(loud**2)) if loud.size else 0.0
    mixed = wave + noise[: wave.size] * level * 10 ** (-snr_db / 20)
    return (mixed / max(1.0, np.abs(mixed).max())).astype(np.float32)


def telephone(wave: np.ndarray) -> np.ndarray:
    """`wave` [S] between 300 and 3400 Hz."""
    spectrum = np.fft.rfft(wave)
    frequency = np.fft.rfftfreq(wave.size, 1 / RATE)
    return np.fft.irfft(spectrum * ((frequency > 300) & (frequency < 3400)), wave.size).astype(np.float32)
