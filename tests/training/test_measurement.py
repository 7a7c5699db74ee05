"""What error rates are measured on: the sample clips as they lie on disk, and a report that says who spoke."""

from __future__ import annotations

import json

import numpy as np
import pytest

from assets.training import evaluate, samples, speech


def test_the_quick_set_is_every_sample_clip_with_its_text_and_sound() -> None:
    entries = json.loads((samples.AUDIO_DIR / "manifest.json").read_text(encoding="utf-8"))
    clips = evaluate.manifest_clips()
    assert [clip.wanted for clip in clips] == [entry["text"] for entry in entries]
    for clip, entry in zip(clips, entries, strict=True):
        assert np.array_equal(clip.wave, samples.read_wave(samples.AUDIO_DIR / entry["file"]))
        assert ("held-out voices" in clip.group) == entry["held_out_voice"]


def test_a_report_names_the_synthesisers_and_the_voices_that_are_held_out() -> None:
    try:
        told = speech.synthesisers()
    except OSError:
        pytest.skip("espeak-ng or flite is not installed")
    assert told.startswith("espeak-ng ") and all(voice in told for voice in speech.HELD_OUT_VOICES)
