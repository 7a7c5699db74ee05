"""From a tower's inputs to the features that take the place of placeholders, one function for each kind of model.

Each takes the transformers model, the inputs of K items of equal shape (concatenated, already on the model's device and in
its type) and K, and returns K tensors [n, H], n being the number that an item's frontend announced. Items are never
padded to a common length, which would change some models' features. Called by `engine/model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Inputs = Mapping[str, torch.Tensor]
Features = Sequence[torch.Tensor]


def granite_speech_audio(model: Any, inputs: Inputs, num_items: int) -> Features:
    """Clips' [K, E, F] features."""
    return _split(model.get_audio_features(inputs["input_features"]).pooler_output, num_items)


def qwen2_audio(model: Any, inputs: Inputs, num_items: int) -> Features:
    """Clips' [K, M, 3000] mel frames and masks; the model class does this inside its forward alone."""
    from transformers.masking_utils import create_bidirectional_mask

    tower, projector = model.model.audio_tower, model.model.multi_modal_projector
    mel, mask = inputs["input_features"], inputs["feature_attention_mask"]
    num_frames, num_tokens = tower._get_feat_extract_output_lengths(mask.sum(-1))
    padded_len = (mel.shape[-1] - 2) // 2 + 1
    is_sound = (torch.arange(padded_len, device=mel.device) < num_frames[:, None]).long()
    shape_alone = torch.zeros(num_items, padded_len, 1, dtype=mel.dtype, device=mel.device)
    attention_mask = create_bidirectional_mask(config=tower.config, inputs_embeds=shape_alone, attention_mask=is_sound)
    features = projector(tower(mel, attention_mask=attention_mask).last_hidden_state)
    return [item[:count] for item, count in zip(features, num_tokens.tolist(), strict=True)]


def windowed_audio(model: Any, inputs: Inputs, num_items: int) -> Features:
    """Clips' [K * W, M, 3000] windows of mel frames, each computed by itself."""
    return _split(model.get_audio_features(inputs["input_features"]).pooler_output, num_items)


def masked_audio(model: Any, inputs: Inputs, num_items: int) -> Features:
    """Clips' [K, M, L] mel frames and masks of L ones."""
    features = model.get_audio_features(
        inputs["input_features"], feature_attention_mask=inputs["feature_attention_mask"]
    ).last_hidden_state
    return _split(features, num_items)


def image_of_fixed_size(model: Any, inputs: Inputs, num_items: int) -> Features:
    """Images' [K, 3, h, w] pixels."""
    return list(model.get_image_features(inputs["pixel_values"]).pooler_output)


def image_in_patches(model: Any, inputs: Inputs, num_items: int) -> Features:
    """Images' [K * patches, 3 * t * p * p] pixels and [K, 3] grids."""
    return list(model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output)


def _split(features: torch.Tensor, num_items: int) -> Features:
    """[..., H] of items of equal length, one after another."""
    return features.reshape(num_items, -1, features.shape[-1]).unbind()
