"""The demo model's training steps run on a CPU and lower their losses; its greedy check answers as transformers does."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from assets.training import data
from assets.training.export import MODEL_DIR
from assets.training.features import FeatureMaker, SpeechStore, num_samples
from assets.training.graphs import TrainingSteps
from assets.training.model import attach_lora, detach_lora
from assets.training.network import Network
from assets.training.tokenizer import AUDIO_ID, DocumentEncoder
from assets.training.train import SHARES, Clock

BUCKET = 40
TEXTS = ["red lamp", "nine old doors", "we went home", "salt"]


@dataclass
class World:
    network: Network
    features: FeatureMaker
    batches: data.JointBatches
    tokenizer: PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def world() -> World:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    store = SpeechStore(torch.device("cpu"), 40 * num_samples(640), num_rooms=2)
    for index in range(12):
        pitch = 200 * (1 + index % len(TEXTS))
        clip = 12_000 * np.sin(np.arange(11_500) * 2 * np.pi * pitch / 16_000) + rng.normal(0, 50, 11_500)
        store.add(clip.astype(np.int16), np.array([11_500]), [TEXTS[index % len(TEXTS)]])
    assert len(store.by_bucket[BUCKET]) == 12
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
    encoder = DocumentEncoder(tokenizer.backend_tokenizer)
    draw = random.Random(0)
    skeletons = [[data._skeleton(draw, encoder, num_clips) for _ in range(20)] for num_clips in range(3)]
    rooms = torch.zeros(2, 8000)
    rooms[:, 0], rooms[:, 900] = 1.0, 0.5
    batches = data.JointBatches(store, encoder, skeletons, 0, frames_per_step=BUCKET * data.CLIPS)
    return World(Network(torch.device("cpu")), FeatureMaker(store, rooms), batches, tokenizer)


def inputs_of(world: World, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    inputs = {name: torch.from_numpy(value) for name, value in arrays.items()}
    features = world.features({name: inputs.pop(name) for name in data.CLIP_FIELDS}, BUCKET)
    return {**inputs, "features": features}


def losses_of(steps: TrainingSteps, inputs: dict[str, torch.Tensor], count: int) -> list[float]:
    steps.set_progress(0.05)
    losses = []
    for _ in range(count):
        steps.run(BUCKET, inputs)
        losses.append(steps.take_means()[0])
    return losses


def test_hearing_and_conversations_are_learned(world: World) -> None:
    network = world.network
    _, arrays = world.batches.clips(BUCKET, data.CLIPS)
    heads = [*network.heads.encoder.parameters(), network.heads.encoder_gain]
    steps = TrainingSteps([([*network.encoder.parameters(), *heads], 2e-3)], network.ctc_step, network.device, 2)
    losses = losses_of(steps, inputs_of(world, arrays), 3)
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    network.language_model.requires_grad_(False)
    lora = attach_lora(network.language_model, "speech")
    try:
        parameters = [*network.projector.parameters(), *lora.values()]
        steps = TrainingSteps([(parameters, 2e-3)], network.joint_step, network.device, 5)
        losses = losses_of(steps, inputs_of(world, world.batches.joint(BUCKET)), 2)
    finally:
        detach_lora(network.language_model)
        network.language_model.requires_grad_(True)
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.01
    assert all(bool(tensor.ne(0).any()) for name, tensor in lora.items() if "lora_B" in name)


def test_greedy_answers_are_those_of_transformers(world: World) -> None:
    network = world.network
    network.model.eval()
    _, arrays = world.batches.clips(BUCKET, data.CLIPS, augment=False)
    features = inputs_of(world, arrays)["features"][:2]
    before, after = ([5, 9, 77], [300, 41])
    answers = network.transcripts(features, (before, after), most=5)
    ids = torch.tensor([before + [AUDIO_ID] * 8 + after] * 2)
    mask = torch.ones(2, 8, dtype=torch.bool)
    expected = network.model.generate(
        input_ids=ids, input_features=features, input_features_mask=mask, attention_mask=torch.ones_like(ids),
        do_sample=False, max_new_tokens=5,
    )[:, ids.shape[1] :]  # fmt: skip
    assert answers == [[token for token in row if token] for row in expected.tolist()]
    assert any(answers)


def test_phases_share_what_is_left() -> None:
    clock = Clock(1000.0, ["joint", "ctc"])
    assert clock.budget("ctc") == pytest.approx(1000 * SHARES["ctc"] / (SHARES["ctc"] + SHARES["joint"]), abs=2)
    assert clock.budget("joint") == pytest.approx(1000, abs=2)  # no time has passed
