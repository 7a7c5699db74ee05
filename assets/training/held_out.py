"""Spoken texts that training never had, by kind of text, voice and surroundings: what error rates are measured on.

Synthesised anew at each use, the same for the same split, count and synthesiser. Used by `evaluate`, `train` and
`benchmarks/transcribe`.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from . import acoustics, speech, text, wide

TextMaker = Callable[[random.Random, text.Split], str]
VoiceMaker = Callable[[random.Random], speech.Voice]
Surroundings = Callable[[np.ndarray, random.Random], np.ndarray]
Voices = Literal["seen", "held-out"]


@dataclass(frozen=True)
class Spoken:
    """A text and its sound, [S] float32 at 16 kHz between -1 and 1."""

    text: str
    wave: np.ndarray


@dataclass(frozen=True)
class ClipSet:
    """How the clips of a set are made; `surroundings` None is silence, `is_wide` the wide vocabulary."""

    make_text: TextMaker
    voices: Voices = "seen"
    surroundings: Surroundings | None = None
    is_wide: bool = False


def _noise(snr_db: float) -> Surroundings:
    return lambda wave, rng: acoustics.with_noise(wave, _any_noise(wave.size, rng), snr_db)


def _room(wave: np.ndarray, rng: random.Random) -> np.ndarray:
    return acoustics.in_room(wave, acoustics.room_response(rng))


def _noisy_room(wave: np.ndarray, rng: random.Random) -> np.ndarray:
    return _noise(15)(_room(wave, rng), rng)


def _telephone(wave: np.ndarray, rng: random.Random) -> np.ndarray:
    return acoustics.telephone(wave)


def _any_noise(length: int, rng: random.Random) -> np.ndarray:
    """White, pink or brown noise, a hum, or four people talking; of root mean square 1."""
    generator = np.random.default_rng(rng.getrandbits(63))
    kind = rng.choice(("white", "pink", "brown", "hum", "people"))
    if kind == "hum":
        return acoustics.hum(length, generator)
    if kind != "people":
        return acoustics.coloured_noise(length, ("white", "pink", "brown").index(kind), generator)
    total = np.zeros(length, np.float32)
    for _ in range(4):
        said = speech.synthesize(wide.any_wide_sentence(rng), speech.training_voice(rng)).astype(np.float32)
        total += np.resize(np.roll(said, rng.randrange(said.size)), length)
    return total / np.sqrt(np.mean(total**2) + 1e-9)


SETS: Mapping[str, ClipSet] = {
    "sentences": ClipSet(text.sentence),
    "sentences, held-out voices": ClipSet(text.sentence, "held-out"),
    "sentences, noise 20 dB": ClipSet(text.sentence, surroundings=_noise(20)),
    "sentences, noise 10 dB": ClipSet(text.sentence, surroundings=_noise(10)),
    "sentences, room": ClipSet(text.sentence, surroundings=_room),
    "sentences, room and noise 15 dB": ClipSet(text.sentence, surroundings=_noisy_room),
    "sentences, telephone": ClipSet(text.sentence, surroundings=_telephone),
    "word strings": ClipSet(text.word_list),
    "word strings, held-out voices": ClipSet(text.word_list, "held-out"),
    "wide sentences": ClipSet(wide.wide_sentence, is_wide=True),
    "wide sentences, held-out voices": ClipSet(wide.wide_sentence, "held-out", is_wide=True),
    "wide word strings": ClipSet(wide.word_string, is_wide=True),
    "wide word strings, held-out voices": ClipSet(wide.word_string, "held-out", is_wide=True),
}
"""name -> how its clips are made."""


def spoken(content: str, voice: speech.Voice, rng: random.Random) -> np.ndarray:
    """[S] float32 of a text with up to 0.4 seconds of silence at both ends."""
    return speech.with_margins(speech.synthesize(content, voice), rng).astype(np.float32) / 32768


def clips(name: str, count: int, split: text.Split = "test") -> list[Spoken]:
    """`count` clips of a set, at most 12 seconds long.

    Raises:
        OSError: espeak-ng or flite is not installed.
    """
    kind = SETS[name]
    rng = random.Random(f"{name} {split}")
    make_voice = speech.held_out_voice if kind.voices == "held-out" else speech.training_voice
    made: list[Spoken] = []
    while len(made) < count:
        content = kind.make_text(rng, split)
        wave = spoken(content, make_voice(rng), rng)
        if wave.size <= 12 * speech.RATE:
            made.append(Spoken(content, kind.surroundings(wave, rng) if kind.surroundings else wave))
    return made


def write_clips(path: Path, count: int) -> None:
    """Writes `count` clips of every set to an `.npz`: `samples` int16 one after the other, `lens`, `texts`, `sets`."""
    made = [(name, clip) for name in SETS for clip in clips(name, count)]
    partial = path.with_name(f".{path.name}")
    np.savez(
        partial,
        samples=np.concatenate([(clip.wave * 32767).astype(np.int16) for _, clip in made]),
        lens=[clip.wave.size for _, clip in made],
        texts=[clip.text for _, clip in made],
        sets=[name for name, _ in made],
    )
    partial.rename(path)


def start_writer(path: Path, count: int) -> None:
    """`write_clips` in a process of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    multiprocessing.get_context("fork").Process(target=write_clips, args=(path, count), daemon=True).start()
