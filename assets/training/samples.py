"""Makes `assets/audio`: held-out sentences as wave files, and their manifest.

`python -m assets.training.samples`. The list follows from the seed alone, whatever the model makes of it.
"""

from __future__ import annotations

import json
import random
import wave
from pathlib import Path

import numpy as np

from . import speech, text

AUDIO_DIR = Path(__file__).resolve().parents[1] / "audio"
SEED = 20_251
# file stem -> how its sentence begins
EXAMPLES = {
    "weather-report": "the weather in",
    "train-time": "the train to",
    "shopping-list": "add",
    "dinner-order": "i would like some",
    "phone-call": "please call",
}
RHYME = "mary had a little lamb its fleece was white as snow"


def held_out_sentence(rng: random.Random, begins: str) -> str:
    """A sentence of the test split that begins so."""
    while not (found := text.sentence(rng, "test")).startswith(begins):
        pass
    return found


def write_wave(path: Path, samples: np.ndarray) -> None:
    """16 kHz, mono, 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(speech.RATE)
        file.writeframes(samples.astype("<i2").tobytes())


def read_wave(path: Path) -> np.ndarray:
    """What `write_wave` wrote, as float32 between -1 and 1."""
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def spoken(make_text, make_voice, rng: random.Random) -> tuple[str, speech.Voice, np.ndarray]:  # type: ignore[no-untyped-def]
    """A text and a voice that together last 1.5 to 5 seconds."""
    while True:
        content, voice = make_text(rng), make_voice(rng)
        samples = speech.with_margins(speech.synthesize(content, voice), rng, longest=0.25)
        if 1.5 <= len(samples) / speech.RATE <= 5.0:
            return content, voice, samples


def main() -> None:
    """Writes all clips and the manifest."""
    rng = random.Random(SEED)
    AUDIO_DIR.mkdir(parents=True, exist_ok=True)
    for old in AUDIO_DIR.glob("*.wav"):
        old.unlink()
    entries: list[dict[str, object]] = []

    def add(stem: str, kind: str, made: tuple[str, speech.Voice, np.ndarray], is_example: bool = False) -> None:
        content, voice, samples = made
        write_wave(AUDIO_DIR / f"{stem}.wav", samples)
        entry: dict[str, object] = {
            "file": f"{stem}.wav",
            "text": content,
            "voice": voice.name,
            "held_out_voice": voice.name in speech.HELD_OUT_VOICES,
            "held_out_text": content != RHYME,
            "kind": kind,
        }
        entries.append({**entry, "example": True} if is_example else entry)

    slow = lambda r: speech.Voice(speech.training_voice(r).name, r.uniform(0.9, 1.05))  # noqa: E731
    for stem, begins in EXAMPLES.items():
        add(stem, "sentence", spoken(lambda r, b=begins: held_out_sentence(r, b), slow, rng), is_example=True)
    add("nursery-rhyme", "rhyme", spoken(lambda r: RHYME, lambda r: speech.Voice("flite:slt"), rng), is_example=True)
    groups = (
        ("sentence", 17, lambda r: text.sentence(r, "test"), speech.training_voice),
        ("sentence", 10, lambda r: text.sentence(r, "test"), speech.held_out_voice),
        ("word-list", 4, lambda r: text.word_list(r, "test", 3, 6), speech.training_voice),
        ("word-list", 2, lambda r: text.word_list(r, "test", 3, 6), speech.held_out_voice),
    )
    for kind, count, make_text, make_voice in groups:
        for _ in range(count):
            add(f"clip-{len(entries):02d}", kind, spoken(make_text, make_voice, rng))
    (AUDIO_DIR / "manifest.json").write_text(json.dumps(entries, indent=1) + "\n")
    size = sum(path.stat().st_size for path in AUDIO_DIR.iterdir())
    print(f"{len(entries)} clips, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
