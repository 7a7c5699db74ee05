"""Synthetic speech: espeak-ng and flite through ctypes, 16 kHz mono.

Owns the voices, which of them training never hears, and the worker processes that fill a folder with clips.
espeak-ng comes from the package `espeakng-loader` (library and data) where there is one, else from the system, as flite does.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import multiprocessing
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.signal import resample_poly

from . import wide

RATE = 16_000
ESPEAK_LANGUAGES = ("en-us", "en-us", "en", "en", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-029")
ESPEAK_VARIANTS = (
    "m1 m2 m4 m5 m6 m7 m8 f1 f2 f3 f5 klatt klatt2 klatt3 adam Alex Alicia Andrea Andy Annie antonio aunty belinda "
    "benjamin caleb david Denis Diogo ed edward Gene Gustave Henrique Hugo Jacky john Lee linda marcelo Marco Mario "
    "Michael miguel Mike Mr Nguyen Pablo paul pedro quincy rob robert sandro shelby steph steph2 travis victor Zac"
).split()
MORE_LANGUAGES = (*ESPEAK_LANGUAGES, "en-us-nyc", "en-gb-x-gbcwmd")
MORE_VARIANTS = (
    *ESPEAK_VARIANTS, "AnxiousAndy", "Gene2", "Reed", "RicishayMax", "RicishayMax3", "Storm", "Tweaky", "anika", "announcer",
    "boris", "croak", "edward2", "fast", "grandma", "grandpa", "gustave", "ian", "iven", "iven3", "iven4", "kaukovalta",
    "klatt4", "klatt5", "klatt6", "michel", "mike2", "norbert", "pablo", "robosoft", "robosoft3", "robosoft5", "serious",
    "steph3", "zac",
)  # fmt: skip
HELD_OUT_VOICES = ("espeak:en-us+m3", "espeak:en+f4", "flite:rms")
FLITE_VOICES = ("slt", "awb", "kal16")
MORE_FLITE_VOICES = (*FLITE_VOICES, *FLITE_VOICES, "kal")  # kal is kal16 at half the rate


@dataclass(frozen=True)
class Voice:
    """`engine:name` with its speed (1 = normal, larger = faster) and pitch (0..99, 50 = normal)."""

    name: str
    speed: float = 1.0
    pitch: int = 50


def training_voice(rng: random.Random) -> Voice:
    """A voice that training hears: a quarter flite, the rest espeak-ng."""
    speed, pitch = rng.uniform(0.8, 1.25), rng.randint(30, 70)
    if rng.random() < 0.28:
        return Voice(f"flite:{rng.choice(FLITE_VOICES)}", speed, pitch)
    language = rng.choice(ESPEAK_LANGUAGES)
    if rng.random() < 0.12:
        return Voice(f"espeak:{language}", speed, pitch)
    return Voice(f"espeak:{language}+{rng.choice(ESPEAK_VARIANTS)}", speed, pitch)


def wide_voice(rng: random.Random) -> Voice:
    """A voice of the wide training: all of `training_voice` and more, at speeds and pitches further apart."""
    speed, pitch = rng.uniform(0.7, 1.35), rng.randint(20, 85)
    if rng.random() < 0.4:
        return Voice(f"flite:{rng.choice(MORE_FLITE_VOICES)}", speed, pitch)
    return Voice(f"espeak:{rng.choice(MORE_LANGUAGES)}+{rng.choice(MORE_VARIANTS)}", speed, pitch)


def held_out_voice(rng: random.Random) -> Voice:
    """A voice that training never hears."""
    return Voice(rng.choice(HELD_OUT_VOICES), rng.uniform(0.85, 1.15), rng.randint(40, 60))


class _Espeak:
    """espeak-ng in retrieval mode; one per process."""

    def __init__(self) -> None:
        library_path, data_path = _espeak_paths()
        self.library = ctypes.CDLL(library_path)
        self._samples: list[np.ndarray] = []
        callback_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._rate = self.library.espeak_Initialize(1, 0, data_path, 0)
        if self._rate <= 0:
            raise RuntimeError(f"espeak-ng did not start with its data in {data_path!r}")
        self._callback = callback_type(self._receive)
        self.library.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: ctypes._Pointer[ctypes.c_short], count: int, events: int) -> int:
        if samples and count > 0:
            self._samples.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def speak(self, text: str, voice: Voice) -> tuple[np.ndarray, int]:
        name = voice.name.partition(":")[2]
        if self.library.espeak_SetVoiceByName(name.encode()) != 0:
            raise ValueError(f"espeak-ng has no voice {name!r}")
        self.library.espeak_SetParameter(1, int(165 * voice.speed), 0)
        self.library.espeak_SetParameter(3, voice.pitch, 0)
        self._samples.clear()
        encoded = text.encode()
        self.library.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, 1, None, None)
        self.library.espeak_Synchronize()
        return np.concatenate([np.zeros(1, np.int16), *self._samples]), self._rate


def _espeak_paths() -> tuple[str, bytes | None]:
    """Library, and the folder of its data where the library does not know it."""
    try:
        loader = importlib.import_module("espeakng_loader")
    except ModuleNotFoundError:
        return "libespeak-ng.so.1", None
    return str(loader.get_library_path()), str(Path(loader.get_data_path()).parent).encode()


class _Wave(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


class _FliteVoice(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("features", ctypes.c_void_p))


class _Flite:
    """flite with its built-in voices; one per process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libflite.so.1", mode=ctypes.RTLD_GLOBAL)
        for name in ("usenglish", "cmulex"):
            ctypes.CDLL(f"libflite_{name}.so.1", mode=ctypes.RTLD_GLOBAL)
        self._library.flite_init()
        self._library.flite_text_to_wave.restype = ctypes.POINTER(_Wave)
        self._library.flite_text_to_wave.argtypes = (ctypes.c_char_p, ctypes.POINTER(_FliteVoice))
        self._library.flite_feat_set_float.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_float)
        self._library.delete_wave.argtypes = (ctypes.POINTER(_Wave),)
        self._voices: dict[str, ctypes._Pointer[_FliteVoice]] = {}

    def _voice(self, name: str) -> ctypes._Pointer[_FliteVoice]:
        if name not in self._voices:
            library = ctypes.CDLL(f"libflite_cmu_us_{name}.so.1", mode=ctypes.RTLD_GLOBAL)
            register = getattr(library, f"register_cmu_us_{name}")
            register.restype, register.argtypes = ctypes.POINTER(_FliteVoice), (ctypes.c_char_p,)
            self._voices[name] = register(None)
        return self._voices[name]

    def speak(self, text: str, voice: Voice) -> tuple[np.ndarray, int]:
        handle = self._voice(voice.name.partition(":")[2])
        features = handle.contents.features
        self._library.flite_feat_set_float(features, b"duration_stretch", 1 / voice.speed)
        self._library.flite_feat_set_float(features, b"f0_shift", 2 ** ((voice.pitch - 50) / 50))
        wave = self._library.flite_text_to_wave(text.encode(), handle)
        samples = np.ctypeslib.as_array(wave.contents.samples, (wave.contents.num_samples,)).copy()
        rate = wave.contents.sample_rate
        self._library.delete_wave(wave)
        return samples, rate


@functools.cache
def _engine(name: str) -> _Espeak | _Flite:
    return _Espeak() if name == "espeak" else _Flite()


def espeak_library() -> ctypes.CDLL:
    """espeak-ng, started."""
    engine = _engine("espeak")
    assert isinstance(engine, _Espeak)
    return engine.library


def synthesisers() -> str:
    """What speaks here, for reports.

    Raises:
        OSError: espeak-ng or flite is not installed.
    """
    library = espeak_library()
    library.espeak_Info.restype = ctypes.c_char_p
    version = library.espeak_Info(None).decode()
    _engine("flite")
    origin = "the system's" if _espeak_paths()[1] is None else "of espeakng-loader"
    return f"espeak-ng {version} ({origin}), flite ({', '.join(FLITE_VOICES)}); held out: {', '.join(HELD_OUT_VOICES)}"


def synthesize(text: str, voice: Voice) -> np.ndarray:
    """`text` spoken: [samples] int16 at 16 kHz, silence at both ends cut away."""
    samples, rate = _engine(voice.name.partition(":")[0]).speak(text, voice)
    wave = samples.astype(np.float32)
    if rate != RATE:
        wave = resample_poly(wave, RATE // 50, rate // 50).astype(np.float32)
    loud = np.flatnonzero(np.abs(wave) > 0.01 * max(1.0, np.abs(wave).max()))
    if loud.size:
        wave = wave[max(0, loud[0] - 160) : loud[-1] + 160]
    wave *= 24_000 / max(1.0, np.abs(wave).max())
    return wave.astype(np.int16)


def with_margins(samples: np.ndarray, rng: random.Random, longest: float = 0.4) -> np.ndarray:
    """`samples` with 0 to `longest` seconds of silence before and after."""
    before, after = (np.zeros(int(RATE * rng.uniform(0, longest)), np.int16) for _ in range(2))
    return np.concatenate([before, samples, after])


def spoken_form(text: str, rng: random.Random) -> str:
    """`text` with commas strewn in, where a speaker might pause."""
    pause = rng.choice((0.0, 0.0, 0.0, 0.1, 0.4))
    words = text.split()
    return " ".join(word + ("," if rng.random() < pause else "") for word in words)


def _work(folder: Path, worker: int, seed: int, clips_per_file: int, stop_at: float) -> None:
    rng = random.Random(seed * 1000 + worker)
    for index in range(1_000_000):
        clips, spoken = [], []
        while len(clips) < clips_per_file:
            if time.time() > stop_at:
                return
            text = wide.training_utterance(rng)
            samples = synthesize(spoken_form(text, rng), wide_voice(rng))
            if 0.15 * RATE < len(samples) < 12.4 * RATE:
                clips.append(samples)
                spoken.append(text)
        partial = folder / f".{worker}-{index}.npz"
        np.savez(partial, samples=np.concatenate(clips), lens=[len(c) for c in clips], texts=spoken)
        partial.rename(folder / f"{worker}-{index}.npz")


def start_workers(
    folder: Path, num_workers: int, seed: int, seconds: float, clips_per_file: int = 200
) -> list[multiprocessing.Process]:
    """Processes that write training clips into `folder` (one `.npz` a batch) for so many seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    stop_at = time.time() + seconds
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_work, args=(folder, worker, seed, clips_per_file, stop_at), daemon=True)
        for worker in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    return workers
