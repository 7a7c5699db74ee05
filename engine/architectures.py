"""The base models that are served: an explicit list, each with a parity test, and what each needs from the engine.

The model code is transformers' own; an entry only says where the decoder is, what happens to logits after the head, and
which media the model takes. Everything else is refused by name. `docs/models.md` shows the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.errors import UnsupportedModel

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
class Architecture:
    """How to drive one transformers model class.

    Attributes:
        class_name: the class, as `architectures` in config.json names it.
        decoder: path of the decoder submodule, which takes `inputs_embeds` and explicit positions.
        finish_logits: what the class does to logits after the head; gets the text config.
        parts: module path prefix -> part of the model, longest first; the rest of the linears is `decoder`.
        takes_audio: whether it has an audio tower, reached through `get_audio_features`.
        transcription_request: what to ask beside a clip to get its transcript, from the model's card.
    """

    class_name: str
    decoder: str = "model"
    finish_logits: Callable[[Logits, Any], Logits] = _plain
    parts: tuple[tuple[str, str], ...] = ()
    takes_audio: bool = False
    transcription_request: str = ""

    @property
    def modalities(self) -> frozenset[str]:
        """Media that the model takes."""
        return frozenset({"audio"} if self.takes_audio else ())


ARCHITECTURES = {
    architecture.class_name: architecture
    for architecture in (
        Architecture("LlamaForCausalLM"),
        Architecture("Qwen2ForCausalLM"),
        Architecture("Qwen3ForCausalLM"),
        Architecture("GraniteForCausalLM", finish_logits=_scaled),
        Architecture("Gemma3ForCausalLM", finish_logits=_soft_capped),
        Architecture(
            "GraniteSpeechForConditionalGeneration",
            decoder="model.language_model",
            finish_logits=_scaled,
            parts=(("model.encoder.", "tower"), ("model.projector.", "connector")),
            takes_audio=True,
            transcription_request="can you transcribe the speech into a written format?",
        ),
    )
}


def find_architecture(config: PretrainedConfig) -> Architecture:
    """The entry for a model's config; raises `UnsupportedModel` with the list of what is served."""
    names = config.architectures or _causal_class(config)
    for name in names:
        if name in ARCHITECTURES:
            _check_rope(config)
            return ARCHITECTURES[name]
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


def _check_rope(config: PretrainedConfig) -> None:
    """Refuse rope types whose frequencies follow the longest request of a batch: neighbours would change answers."""
    text_config = config.get_text_config()
    parameters = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = (
        parameters.values() if any(isinstance(value, dict) for value in parameters.values()) else [parameters]
    )
    for rope in by_layer_type:
        kind = (rope or {}).get("rope_type", "default")
        if kind in ("dynamic", "longrope"):
            raise UnsupportedModel(
                f"The model's rope type {kind!r} depends on the longest prompt of a batch, so it is not served; "
                "use a checkpoint with another rope type, such as default, linear, yarn or llama3.",
                param="model",
            )
