"""Lets zero stand for silence between encoder and projector, so that a clip may end anywhere.

The projector reads windows of five encoder frames and fills a clip's last one with zeros, which training, whose clips fill whole
windows, never shows it. Here the encoder's last bias moves by the state that it has in silence, and the projector's keys and
values move back: whole windows give what they gave, zeros what silence gives. Called by `export`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from transformers import GraniteSpeechFeatureExtractor, GraniteSpeechForConditionalGeneration

RATE = 16_000
SILENT_SAMPLES = RATE // 2
SILENT_FRAMES = slice(-20, -2)  # of 20 ms: away from the speech and from the end


@torch.no_grad()
def silent_state(model: GraniteSpeechForConditionalGeneration, waves: Iterable[np.ndarray]) -> Tensor:
    """[H] the encoder's mean output over the silence after clips [S] float32 at 16 kHz."""
    extractor = GraniteSpeechFeatureExtractor()
    states = []
    for wave in waves:
        clip = torch.from_numpy(np.concatenate([wave, np.zeros(SILENT_SAMPLES, np.float32)]))
        features = extractor(clip[None])["input_features"].to(model.dtype)
        states.append(model.model.encoder(features).last_hidden_state[0, SILENT_FRAMES])
    return torch.cat(states).mean(0)


@torch.no_grad()
def let_zero_be_silence(model: GraniteSpeechForConditionalGeneration, state: Tensor) -> None:
    """Moves the encoder's output by -`state` [H], as bfloat16 holds it, and the projector with it."""
    bias = model.model.encoder.layers[-1].post_norm.bias
    moved = bias - (bias - state).bfloat16().to(bias.dtype)
    bias -= moved
    for layer in model.model.projector.qformer.encoder.layer:
        for linear in (layer.crossattention.attention.key, layer.crossattention.attention.value):
            linear.bias += linear.weight @ moved
