"""The base models that are served: an explicit list, each with a parity test, and what each needs from the engine.

The model code is transformers' own; an entry only says where the decoder is, what happens to logits after the head, and
which media the model takes. Everything else is refused by name. `docs/models.md` shows the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine import encoders, published_phi4, wordings
from engine.audio import (
    ConformerFrontend,
    GraniteSpeechFrontend,
    TrimmedWhisperFrontend,
    VoxtralFrontend,
    WhisperFrontend,
)
from engine.errors import UnsupportedModel
from engine.frontend import Frontend
from engine.request import Modality
from engine.vision import CropImageFrontend, FixedImageFrontend, GridImageFrontend, PatchImageFrontend
from engine.wordings import Wording

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Logits = torch.Tensor


def _plain(logits: Logits, config: Any) -> Logits:
    return logits


def _scaled(logits: Logits, config: Any) -> Logits:
    """Granite divides by `logits_scaling`. The speech wrapper forgets to; its text model was trained with it."""
    scaling: float = config.logits_scaling
    return logits / scaling


def _soft_capped(logits: Logits, config: Any) -> Logits:
    """Gemma: `cap * tanh(logits / cap)` where the config has a cap."""
    cap: float | None = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


@dataclass(frozen=True)
class MediaSupport:
    """How a model takes one modality.

    Attributes:
        encode: tower and connector: the model, the inputs of K items of equal shape, and K -> K tensors [n, H].
        make_frontend: the model's processor and config -> what prepares items.
    """

    encode: Callable[[Any, encoders.Inputs, int], encoders.Features]
    make_frontend: Callable[[Any, Any], Frontend]


@dataclass(frozen=True)
class Architecture:
    """How to drive one transformers model class.

    Attributes:
        class_name: the class, as `architectures` in config.json names it.
        decoder: path of the decoder submodule, which takes `inputs_embeds` and explicit positions.
        finish_logits: what the class does to logits after the head; gets the text config.
        parts: module path prefix -> part of the model, the first that fits; the rest of the linears is `decoder`.
        media: the media that it takes, and how.
        has_grid_positions: whether images are placed by row and column (M-RoPE).
        has_long_rope: whether longrope checkpoints are served, with frequencies chosen request by request.
        hides_placeholders: whether the class embeds token 0 for a placeholder, even one that it has generated itself.
        two_way_tower: prefix of a tower's modules that claim to be causal although they are not: images without padding have
            no mask, and PyTorch's kernel would then believe them.
        renames: pattern in the names of weights and adapters, as the model was published -> what transformers' class has.
        whole: classes of checkpoints of which this model is a part, and the part's name in their config.
        is_split: whether the model was tried over several GPUs (`engine/parallel`).
        transcription: how to ask for a transcript; the first wording that fits the checkpoint, the last fits all and is for
            chats.
    """

    class_name: str
    decoder: str = "model"
    finish_logits: Callable[[Logits, Any], Logits] = _plain
    parts: tuple[tuple[str, str], ...] = ()
    media: Mapping[Modality, MediaSupport] = field(default_factory=dict)
    has_grid_positions: bool = False
    has_long_rope: bool = False
    hides_placeholders: bool = False
    two_way_tower: str = ""
    renames: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[frozenset[str], str] = (frozenset(), "")
    is_split: bool = False
    transcription: tuple[Wording, ...] = ()

    @property
    def modalities(self) -> frozenset[Modality]:
        """Media that the model takes."""
        return frozenset(self.media)

    def own_config(self, config: PretrainedConfig) -> PretrainedConfig:
        """The config of this class in a checkpoint's config: that itself, or a part."""
        part: PretrainedConfig = getattr(config, self.whole[1], config) if self.whole[1] else config
        return part


def _granite_speech(processor: Any, config: Any) -> Frontend:
    return GraniteSpeechFrontend(processor)


def _qwen2_audio(processor: Any, config: Any) -> Frontend:
    token = processor.audio_token
    inline = f"{processor.audio_bos_token}{token}{processor.audio_eos_token}"
    return WhisperFrontend(processor.feature_extractor, processor.tokenizer, token, inline)


def _voxtral(processor: Any, config: Any) -> Frontend:
    token = processor.tokenizer.convert_ids_to_tokens(config.audio_token_id)
    inline = f"[BEGIN_AUDIO]{token}" if "[BEGIN_AUDIO]" in processor.tokenizer.get_vocab() else token
    return VoxtralFrontend(processor.feature_extractor, processor.tokenizer, token, inline)


def _qwen_omni_audio(processor: Any, config: Any) -> Frontend:
    tokens = processor.tokenizer
    inline = f"{tokens.audio_bos_token}{tokens.audio_token}{tokens.audio_eos_token}"
    return TrimmedWhisperFrontend(processor.feature_extractor, tokens, tokens.audio_token, inline)


def _conformer(processor: Any, config: Any) -> Frontend:
    token = processor.tokenizer.convert_ids_to_tokens(config.audio_config.audio_token_id)
    return ConformerFrontend(processor.feature_extractor, processor.tokenizer, token)


def _qwen_image(processor: Any, config: Any) -> Frontend:
    token = "<|image_pad|>" if not hasattr(processor.tokenizer, "image_token") else processor.tokenizer.image_token
    begin = getattr(processor.tokenizer, "vision_bos_token", "<|vision_start|>")
    end = getattr(processor.tokenizer, "vision_eos_token", "<|vision_end|>")
    return GridImageFrontend(processor.image_processor, processor.tokenizer, token, inline=f"{begin}{token}{end}")


_WRAPPED = "model.language_model"
_CONNECTED = (("model.multi_modal_projector.", "connector"),)
_QWEN_VISION = (("model.visual.merger.", "connector"), ("model.visual.", "tower"))
_QWEN_IMAGES = MediaSupport(encoders.image_in_patches, _qwen_image)

ARCHITECTURES = {
    architecture.class_name: architecture
    for architecture in (
        Architecture("LlamaForCausalLM", is_split=True),
        Architecture("MistralForCausalLM", is_split=True),
        Architecture("Qwen2ForCausalLM", is_split=True),
        Architecture("Qwen3ForCausalLM", is_split=True),
        Architecture("GraniteForCausalLM", finish_logits=_scaled, is_split=True),
        Architecture("Gemma3ForCausalLM", finish_logits=_soft_capped),
        Architecture("Phi3ForCausalLM", has_long_rope=True, is_split=True),
        Architecture(
            "GraniteSpeechForConditionalGeneration",
            decoder=_WRAPPED,
            finish_logits=_scaled,
            parts=(("model.encoder.", "tower"), ("model.projector.", "connector")),
            media={"audio": MediaSupport(encoders.granite_speech_audio, _granite_speech)},
            hides_placeholders=True,
            transcription=wordings.GRANITE_SPEECH,
        ),
        Architecture(
            "Qwen2AudioForConditionalGeneration",
            decoder=_WRAPPED,
            parts=(("model.audio_tower.", "tower"), *_CONNECTED),
            media={"audio": MediaSupport(encoders.qwen2_audio, _qwen2_audio)},
            transcription=wordings.QWEN2_AUDIO,
        ),
        Architecture(
            "VoxtralForConditionalGeneration",
            decoder=_WRAPPED,
            parts=(("model.audio_tower.", "tower"), *_CONNECTED),
            media={"audio": MediaSupport(encoders.windowed_audio, _voxtral)},
            transcription=wordings.VOXTRAL,
        ),
        Architecture(
            "Gemma3ForConditionalGeneration",
            decoder=_WRAPPED,
            parts=(("model.vision_tower.", "tower"), *_CONNECTED),
            media={"image": MediaSupport(encoders.image_of_fixed_size, FixedImageFrontend)},
        ),
        Architecture(
            "LlavaForConditionalGeneration",
            decoder=_WRAPPED,
            parts=(("model.vision_tower.", "tower"), *_CONNECTED),
            media={"image": MediaSupport(encoders.image_of_fixed_size, PatchImageFrontend)},
        ),
        Architecture(
            "Qwen2_5_VLForConditionalGeneration",
            decoder=_WRAPPED,
            parts=_QWEN_VISION,
            media={"image": _QWEN_IMAGES},
            has_grid_positions=True,
        ),
        Architecture(
            "Qwen2_5OmniThinkerForConditionalGeneration",
            decoder=_WRAPPED,
            parts=(*_QWEN_VISION, ("model.audio_tower.proj", "connector"), ("model.audio_tower.", "tower")),
            media={
                "audio": MediaSupport(encoders.masked_audio, _qwen_omni_audio),
                "image": _QWEN_IMAGES,
            },
            has_grid_positions=True,
            whole=(frozenset({"Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"}), "thinker_config"),
            transcription=wordings.QWEN2_5_OMNI,
        ),
        Architecture(
            "Phi4MultimodalForCausalLM",
            parts=(
                ("model.embed_tokens_extend.audio_embed.encoder.", "tower"),
                ("model.embed_tokens_extend.image_embed.img_processor.", "tower"),
                ("model.embed_tokens_extend.", "connector"),
            ),
            media={
                "audio": MediaSupport(encoders.conformer_audio, _conformer),
                "image": MediaSupport(encoders.image_in_crops, CropImageFrontend),
            },
            has_long_rope=True,
            two_way_tower="model.embed_tokens_extend.image_embed.img_processor.",
            renames=published_phi4.RENAMES,
            transcription=wordings.PHI_4_MULTIMODAL,
        ),
    )
}


def find_architecture(config: PretrainedConfig) -> Architecture:
    """The entry for a model's config; raises `UnsupportedModel` with the list of what is served."""
    names = config.architectures or _causal_class(config)
    for name in names:
        for architecture in ARCHITECTURES.values():
            if name == architecture.class_name or name in architecture.whole[0]:
                _check_rope(architecture.own_config(config), architecture)
                _check_vision(architecture.own_config(config))
                return architecture
    served = ", ".join(sorted(ARCHITECTURES))
    raise UnsupportedModel(
        f"Models of the architecture {' / '.join(names) or config.model_type!r} are not served; served are: {served}.",
        param="model",
    )


def _causal_class(config: PretrainedConfig) -> list[str]:
    """The text generation class of the model type, for configs that name no class (those made from GGUF files)."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return [name] if isinstance(name, str) else []


def rope_types(config: PretrainedConfig) -> set[str]:
    """The rope types of a model's decoder, one for each kind of layer."""
    text_config = config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = (
        parameters.values() if any(isinstance(value, dict) for value in parameters.values()) else [parameters]
    )
    return {(rope or {}).get("rope_type", "default") for rope in by_layer_type}


def _check_rope(config: PretrainedConfig, architecture: Architecture) -> None:
    """Refuse rope types whose frequencies follow the longest request of a batch: neighbours would change answers."""
    refused = {"dynamic"} if architecture.has_long_rope else {"dynamic", "longrope"}
    for kind in sorted(rope_types(config) & refused):
        raise UnsupportedModel(
            f"The model's rope type {kind!r} depends on the longest prompt of a batch, so it is not served; "
            "use a checkpoint with another rope type, such as default, linear, yarn or llama3.",
            param="model",
        )


def _check_vision(config: PretrainedConfig) -> None:
    """Refuse what the vision towers of a served class could be but were not tried with."""
    tower = getattr(getattr(config, "vision_config", None), "model_type", None)
    known = ("clip_vision_model", "siglip_vision_model")
    if config.model_type == "llava" and tower not in known:
        raise UnsupportedModel(
            f"LLaVA models with a vision tower of the type {tower!r} are not served; served are {' and '.join(known)}.",
            param="model",
        )
    num_tokens = getattr(config, "mm_tokens_per_image", None)
    window = getattr(config.get_text_config(), "sliding_window", None)
    if num_tokens is not None and window is not None and num_tokens > window:
        raise UnsupportedModel(
            f"The model's images take {num_tokens} tokens, which is more than its sliding window of {window}; such "
            "models are not served.",
            param="model",
        )
