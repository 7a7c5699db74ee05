"""Phi-4-multimodal in the layout in which it was published, which transformers reads only once it is converted.

That layout comes with code of its own, which is never run here. Its config has other fields, its weights other names, and
each linear of the decoder holds the two adapters beside the base weight. The names are those of transformers' conversion
script for the model. Called by `engine/model`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

PUBLISHED_TYPE = "phi4mm"
"""`model_type` of the published config."""

RENAMES = {
    r"\.base_layer\.": ".",
    r"\.net\.0\.linear\.": ".gate_up_proj.",
    r"\.net\.2\.": ".down_proj.",
    r"\.self_attn\.linear_q\.": ".self_attn.q_proj.",
    r"\.self_attn\.linear_k\.": ".self_attn.k_proj.",
    r"\.self_attn\.linear_v\.": ".self_attn.v_proj.",
    r"\.self_attn\.linear_out\.": ".self_attn.o_proj.",
    r"\.img_projection\.0\.": ".img_projection_up.",
    r"\.img_projection\.2\.": ".img_projection_down.",
    r"\.glb_GN": ".global_img_feature_extensor",
    r"\.sub_GN": ".sub_img_feature_extensor",
    r"\.audio_projection\.speech\.0\.": ".up_proj_for_speech.",
    r"\.audio_projection\.speech\.2\.": ".down_proj_for_speech.",
    r"\.audio_projection\.vision\.0\.": ".up_proj_for_vision_speech.",
    r"\.audio_projection\.vision\.2\.": ".down_proj_for_vision_speech.",
}
"""Pattern in a published tensor's name -> what the class of transformers calls it."""

_NOT_OURS = (
    "_name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "_attn_implementation",
    "vision_lora", "speech_lora", "embd_layer", "audio_processor", "img_processor",
)  # fmt: skip
_AUDIO_NAMES = {
    "attention_dim": "hidden_size", "attention_heads": "num_attention_heads", "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
}  # fmt: skip
_AUDIO_KEPT = (
    "activation", "chunk_size", "left_chunk", "dropout_rate", "ext_pw_out_channel", "depthwise_multiplier", "kernel_size",
    "conv_activation", "input_size", "conv_glu_type", "time_reduction", "num_blocks",
)  # fmt: skip


def native_fields(published: Mapping[str, Any]) -> dict[str, Any]:
    """A published config, as config.json holds it -> the fields of transformers' one; KeyError where it is none.

    The sizes of the image tower stand in the published code alone; they are what transformers' class has by default.
    """
    audio, layers = published["audio_processor"]["config"], published["embd_layer"]
    bias = audio["relative_attention_bias_args"]
    audio_config = {new: audio[old] for old, new in _AUDIO_NAMES.items() if old in audio}
    audio_config |= {name: audio[name] for name in _AUDIO_KEPT if name in audio}
    audio_config |= {
        "nemo_conv_channels": audio["nemo_conv_settings"]["conv_channels"],
        "bias_max_distance": bias["t5_bias_max_distance"],
        "bias_symmetric": bias.get("t5_bias_symmetric", False),
        "downsample_rate": layers["audio_embd_layer"]["downsample_rate"],
    }
    return {name: copy.deepcopy(value) for name, value in published.items() if name not in _NOT_OURS} | {
        "model_type": "phi4_multimodal",
        "architectures": ["Phi4MultimodalForCausalLM"],
        "audio_config": audio_config,
        "vision_config": {"crop_size": layers["image_embd_layer"]["crop_size"]},
    }
