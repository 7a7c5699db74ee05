"""From a tower's inputs to the features that take the place of placeholders, one function for each kind of model.

Each takes the transformers model, the inputs of K items of equal shape (concatenated, already on the model's device and in
its type) and K, and returns K tensors [n, H], n being the number that an item's frontend announced. Items are never
padded to a common length, which would change some models' features. Called by `engine/model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from engine.audio import BESIDE_IMAGES
from engine.crops import num_crop_features

Inputs = Mapping[str, torch.Tensor]
Features = Sequence[torch.Tensor]

_CONFORMER_WINDOW = 500
"""Frames after subsampling that the tower of Phi-4-multimodal takes in one piece: 40 seconds."""


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


def conformer_audio(model: Any, inputs: Inputs, num_items: int) -> Features:
    """Clips' [K, F, M] mel frames; the name of the input says whether their prompts hold images."""
    [(name, mel)] = inputs.items()
    embed = model.model.embed_tokens_extend.audio_embed
    kind = "vision_speech" if name.endswith(BESIDE_IMAGES) else "speech"
    # The tower cuts longer clips into windows, and can do that with one clip alone.
    is_cut = -(-mel.shape[1] // embed.config.audio_config.time_reduction) > _CONFORMER_WINDOW
    hidden = torch.cat([embed.encoder(part, None) for part in (mel.split(1) if is_cut else (mel,))])
    hidden = functional.gelu(getattr(embed, f"up_proj_for_{kind}")(hidden))
    return _split(getattr(embed, f"down_proj_for_{kind}")(hidden), num_items)


def image_in_crops(model: Any, inputs: Inputs, num_items: int) -> Features:
    """Images' [K, C, 3, s, s] pixels, [K, C, g, g] masks and [K, 2] sizes, one by one: each is a batch of crops."""
    embed = model.model.embed_tokens_extend.image_embed
    config, features = model.config, []
    for item in range(num_items):
        one = {name: tensor[item : item + 1] for name, tensor in inputs.items()}
        height, width = one["image_sizes"][0].tolist()
        rows, columns = height // config.vision_config.crop_size, width // config.vision_config.crop_size
        num_tokens = num_crop_features(one["image_attention_mask"][0], rows, columns)
        # The class only puts features in place of placeholders, so it is given a prompt of nothing else.
        pixels = one["image_pixel_values"]
        prompt = torch.full((1, num_tokens), config.vision_config.image_token_id, device=pixels.device)
        nothing = torch.zeros(1, num_tokens, config.hidden_size, dtype=pixels.dtype, device=pixels.device)
        features.append(embed(prompt, nothing, **one)[0])
    return features


def _split(features: torch.Tensor, num_items: int) -> Features:
    """[..., H] of items of equal length, one after another."""
    return features.reshape(num_items, -1, features.shape[-1]).unbind()
