"""Where a clip's last window is filled with zeros, the projector hears silence; whole windows are heard as before."""

from __future__ import annotations

import json

import numpy as np
import torch

from assets.training import evaluate, samples
from assets.training.model import WINDOW, build_model
from assets.training.silence import let_zero_be_silence


def test_whole_windows_are_unchanged_and_zeros_are_the_silent_state() -> None:
    model = build_model().eval()
    features = torch.randn(1, 8 * WINDOW, 160, generator=torch.Generator().manual_seed(0))
    state = torch.randn(160, generator=torch.Generator().manual_seed(1))
    projector = model.model.projector
    with torch.no_grad():
        before = model.get_audio_features(features).pooler_output
        silent = projector(state.expand(1, WINDOW, -1))
        unlike = projector(torch.zeros(1, WINDOW, 160))
        let_zero_be_silence(model, state)
        after = model.get_audio_features(features).pooler_output
        zeros = projector(torch.zeros(1, WINDOW, 160))
    scale = before.std()
    assert (after - before).abs().max() < 0.02 * scale
    assert (zeros - silent).abs().max() < 0.05 * scale < (unlike - silent).abs().max()


def test_clips_of_the_shipped_model_may_end_anywhere() -> None:
    model = evaluate.Model("speech", torch.float32)
    prompt = ({"role": "user", "content": f"<|audio|>{evaluate.PROMPT}"},)
    texts = {entry["file"]: entry["text"] for entry in json.loads((samples.AUDIO_DIR / "manifest.json").read_text())}
    lens = set()
    for file in ("train-time.wav", "clip-36.wav"):
        wave = samples.read_wave(samples.AUDIO_DIR / file)
        end = np.flatnonzero(np.abs(wave) > 0.02)[-1]
        for num_frames in range(WINDOW):
            clip = wave[: end + 320 * num_frames]
            lens.add(clip.size // 320 % WINDOW)
            assert model.answer(prompt, (clip,)) == texts[file], (file, num_frames)
    assert lens == set(range(WINDOW))
