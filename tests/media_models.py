"""Tiny random models that take audio, images or both, with the processors that belong to them.

`tests/oracles.make_model` builds and saves them; this file only says what they look like. `media_inputs` gives what
transformers' own forward takes for a prompt's media, by the processors' parts and not by the code under test (but for one
processor that cannot be had, see `_phi_images`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from transformers.utils import is_torchvision_available

from engine.crops import CropRules, cut_into_crops

if TYPE_CHECKING:
    from PIL import Image

EXTRA_SPECIALS = ["<|image|>", "<|begin|>", "<|end|>", "<|audio_bos|>", "<|audio_eos|>", "<|video|>"]
IMAGE, BEGIN, END, AUDIO_BEGIN, AUDIO_END, VIDEO = range(261, 267)
AUDIO = 260
MEDIA_VOCAB_SIZE = 267

GEMMA = "Gemma3ForConditionalGeneration"
LLAVA = "LlavaForConditionalGeneration"
QWEN_VL = "Qwen2_5_VLForConditionalGeneration"
QWEN_AUDIO = "Qwen2AudioForConditionalGeneration"
OMNI = "Qwen2_5OmniThinkerForConditionalGeneration"
VOXTRAL = "VoxtralForConditionalGeneration"
PHI = "Phi4MultimodalForCausalLM"
MEDIA_MODELS = (GEMMA, LLAVA, QWEN_VL, QWEN_AUDIO, VOXTRAL, PHI, OMNI)
HAS_OMNI = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
"""Older versions of transformers lay the class out in a way that is refused."""
WINDOW_SECONDS = {QWEN_AUDIO: 1, VOXTRAL: 2, OMNI: 10}
"""Of the feature extractors; the longest clip, but for Voxtral, which takes several windows."""

PHI_CROPS = 6
"""Most crops of one of the tiny Phi-4's images."""

EXTRA_TOKENS = {
    "image_token": "<|image|>", "boi_token": "<|begin|>", "eoi_token": "<|end|>", "vision_bos_token": "<|begin|>",
    "vision_eos_token": "<|end|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
    "video_token": "<|video|>",
}  # fmt: skip
_ROPE_GRID = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
_VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 24,
    "patch_size": 6, "projection_dim": 16,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4, "window_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [1],
}  # fmt: skip
_WHISPER = {
    "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40,
    "max_source_positions": 50,
}  # fmt: skip


def media_config(architecture: str, text: Mapping[str, Any]) -> Any:
    """The config of a model of the architecture, with the fields `text` for its decoder."""
    text = {**text, "vocab_size": MEDIA_VOCAB_SIZE}
    width = text["hidden_size"]
    if architecture == GEMMA:
        text |= {
            "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }  # fmt: skip
        return transformers.Gemma3Config(
            text_config=text, vision_config={**_VISION, "model_type": "siglip_vision_model"}, mm_tokens_per_image=4,
            boi_token_index=BEGIN, eoi_token_index=END, image_token_index=IMAGE, tie_word_embeddings=False,
        )  # fmt: skip
    if architecture == LLAVA:
        return transformers.LlavaConfig(
            text_config={**text, "model_type": "llama"}, vision_config={**_VISION, "model_type": "clip_vision_model"},
            image_token_index=IMAGE, tie_word_embeddings=False,
        )  # fmt: skip
    if architecture == QWEN_AUDIO:
        return transformers.Qwen2AudioConfig(
            text_config={**text, "model_type": "qwen2"}, audio_config={**_WHISPER, "model_type": "qwen2_audio_encoder"},
            audio_token_index=AUDIO, tie_word_embeddings=False,
        )  # fmt: skip
    if architecture == VOXTRAL:
        audio = {
            "num_mel_bins": 16, "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_source_positions": 100, "model_type": "voxtral_encoder",
        }  # fmt: skip
        return transformers.VoxtralConfig(
            text_config={**text, "model_type": "llama"}, audio_config=audio, audio_token_id=AUDIO,
            tie_word_embeddings=False,
        )  # fmt: skip
    if architecture == PHI:
        audio = {
            "input_size": 16, "hidden_size": 32, "intermediate_size": 40, "num_blocks": 2, "num_attention_heads": 4,
            "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8,
            "bias_max_distance": 20, "audio_token_id": AUDIO,
        }  # fmt: skip
        vision = {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": 24, "crop_size": 24, "patch_size": 4, "image_token_id": IMAGE,
        }  # fmt: skip
        return transformers.Phi4MultimodalConfig(
            **{"sliding_window": 31, **text}, audio_config=audio, vision_config=vision
        )
    vision = {**_QWEN_VISION, "out_hidden_size": width}
    if architecture == QWEN_VL:
        return transformers.Qwen2_5_VLConfig(
            text_config={**text, "model_type": "qwen2_5_vl_text", "rope_parameters": _ROPE_GRID}, vision_config=vision,
            image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END,
            tie_word_embeddings=False,
        )  # fmt: skip
    return transformers.Qwen2_5OmniThinkerConfig(
        text_config={**text, "rope_parameters": _ROPE_GRID}, vision_config=vision,
        audio_config={**_WHISPER, "n_window": 10, "output_dim": width}, audio_token_index=AUDIO, image_token_index=IMAGE,
        video_token_index=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END,
        audio_start_token_id=AUDIO_BEGIN, audio_end_token_id=AUDIO_END, tie_word_embeddings=False,
    )  # fmt: skip


def save_processor(architecture: str, tokenizer: Any, folder: Path) -> None:
    """Save the processor's files as checkpoints hold them."""
    if architecture == GEMMA:
        transformers.Gemma3Processor(_gemma_images(), tokenizer, image_seq_length=4).save_pretrained(folder)
    elif architecture == LLAVA:
        transformers.LlavaProcessor(
            _llava_images(),
            tokenizer,
            patch_size=6,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ).save_pretrained(folder)
    elif architecture == QWEN_AUDIO:
        transformers.Qwen2AudioProcessor(_whisper(architecture), tokenizer).save_pretrained(folder)
    elif architecture == VOXTRAL:
        _whisper(architecture).save_pretrained(folder)
    elif architecture == QWEN_VL:
        _qwen_images().save_pretrained(folder)
    elif architecture == PHI:
        # The class of the image processor cannot be made without torchvision, so the file is written as it writes it.
        parts = {
            "processor_class": "Phi4MultimodalProcessor",
            "audio_processor": json.loads(_conformer().to_json_string()),
            "image_processor": {
                "image_processor_type": "Phi4MultimodalImageProcessor", "dynamic_hd": PHI_CROPS, "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3, "patch_size": 4, "size": {"height": 24, "width": 24},
            },
        }  # fmt: skip
        (folder / "processor_config.json").write_text(json.dumps(parts))
    elif architecture == OMNI:
        # One file holds what both parts need, as in the released checkpoints.
        merged = {**_qwen_images().to_dict(), **_whisper(architecture).to_dict()}
        transformers.WhisperFeatureExtractor(**merged).save_pretrained(folder)


def media_inputs(architecture: str, media: Sequence[np.ndarray | Image.Image]) -> dict[str, torch.Tensor]:
    """What the model's forward takes for clips ([S] at 16 kHz) and images, in order of modality."""
    images = [item for item in media if not isinstance(item, np.ndarray)]
    clips = [item for item in media if isinstance(item, np.ndarray)]
    inputs: dict[str, torch.Tensor] = {}
    if images:
        if architecture == PHI:
            inputs |= _phi_images(images)
        elif architecture == GEMMA:
            inputs["pixel_values"] = _gemma_images()(images, return_tensors="pt")["pixel_values"]
        elif architecture == LLAVA:
            inputs["pixel_values"] = _llava_images()(images, return_tensors="pt")["pixel_values"]
        else:
            inputs |= dict(_qwen_images()(images, return_tensors="pt"))
    if clips and architecture == PHI:
        made = _conformer()(clips, sampling_rate=16_000, return_tensors="pt")
        inputs |= {name: made[name] for name in ("audio_input_features", "audio_embed_sizes")}
    elif clips and architecture == VOXTRAL:
        window = 16_000 * WINDOW_SECONDS[VOXTRAL]
        mels = [
            _whisper(VOXTRAL)(
                clip,
                sampling_rate=16_000,
                truncation=False,
                padding=True,
                pad_to_multiple_of=window,
                return_tensors="pt",
            )["input_features"]
            for clip in clips
        ]
        inputs["input_features"] = torch.cat([part for mel in mels for part in mel.split(window // 160, -1)])
    elif clips:
        extractor = _whisper(architecture)
        made = extractor(
            clips, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        inputs |= {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
    return inputs


def _whisper(architecture: str) -> Any:
    return transformers.WhisperFeatureExtractor(
        feature_size=16, chunk_length=WINDOW_SECONDS[architecture], sampling_rate=16_000
    )


def _conformer() -> Any:
    return transformers.Phi4MultimodalFeatureExtractor(feature_size=16)


def _phi_images(images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """Crops of several images, filled up to equal number as the model's processor does, which needs torchvision.

    The cutting is the engine's; `tests/engine/test_crops.py` holds it against what that processor made.
    """
    rules = CropRules(24, 4, PHI_CROPS, [0.5] * 3, [0.5] * 3)
    crops = [cut_into_crops(np.asarray(image), rules) for image in images]
    longest = max(len(one.mask) for one in crops)
    pixels = torch.zeros(len(crops), longest, 3, 24, 24)
    mask = torch.ones(len(crops), longest, 6, 6)
    for row, one in enumerate(crops):
        pixels[row, : len(one.pixels)] = one.pixels
        mask[row, : len(one.mask)] = one.mask.float()
    sizes = torch.tensor([[one.height, one.width] for one in crops])
    return {"image_pixel_values": pixels, "image_attention_mask": mask, "image_sizes": sizes}


def _processor_class(name: str) -> Any:
    """The form that transformers takes by itself: torchvision's, which rounds pixels otherwise than PIL's, where it is there."""
    return getattr(transformers, name if is_torchvision_available() else f"{name}Pil")


def _gemma_images() -> Any:
    return _processor_class("Gemma3ImageProcessor")(size={"height": 24, "width": 24})


def _llava_images() -> Any:
    size = {"height": 24, "width": 24}
    return _processor_class("CLIPImageProcessor")(size={"shortest_edge": 24}, crop_size=size)


def _qwen_images() -> Any:
    return _processor_class("Qwen2VLImageProcessor")(
        patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8 * 2, "longest_edge": 8 * 8 * 12}
    )


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """An RGB image of coarse random colours."""
    from PIL import Image

    blocks = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)
