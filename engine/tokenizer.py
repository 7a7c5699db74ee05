"""Loads a model's tokenizer and processor, and finds the tokens that end an answer.

Knows transformers' loading functions and turns their failures into sentences. Called by `engine/engine`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.feature_extraction_utils import FeatureExtractionMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.utils.hub import cached_file

from engine.errors import InvalidRequest
from engine.request import Modality

_PREPARED_HERE = frozenset({"Phi4MultimodalImageProcessor", "Phi4MMImageProcessor"})
"""Image processors that need torchvision in every form; `engine/vision` does their work from their settings."""
_EXTRACTORS = {
    "Phi4MultimodalFeatureExtractor": "Phi4MultimodalFeatureExtractor",
    "Phi4MMAudioFeatureExtractor": "Phi4MultimodalFeatureExtractor",
}
"""Type that a folder's files name -> transformers' class."""


def load_tokenizer(path: str, gguf_file: str | None, config: PretrainedConfig | None = None) -> Any:
    """The model's fast tokenizer; `config` is the model's, where transformers cannot read that of the path.

    Raises:
        InvalidRequest: there is none, or it has no fast form (which the detokenizer needs).
    """
    keywords: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    if config is not None:
        keywords["config"] = config
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **keywords)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(
            f"No tokenizer could be loaded from {path!r}; the folder needs tokenizer.json.", param="model"
        ) from error
    if not tokenizer.is_fast:
        raise InvalidRequest(f"The tokenizer of {path!r} has no fast form (tokenizer.json).", param="model")
    return tokenizer


def load_like(base: Any, folder: str) -> Any:
    """The tokenizer in a folder, of the same class as `base`; no code that its files name is ever run.

    Raises:
        InvalidRequest: the files hold none.
    """
    try:
        return type(base).from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # Somebody's files, read by the tokenizers library, which raises bare exceptions.
        raise InvalidRequest("The adapter's tokenizer cannot be read.", param="lora") from error


@dataclass(frozen=True)
class ProcessorParts:
    """What of a model's processor the engine uses, where the whole cannot be made.

    A processor also holds the parts for media that are not served (video), which need packages of their own.
    """

    tokenizer: Any
    image_processor: Any = None
    feature_extractor: Any = None
    chat_template: str | None = None


def load_processor(path: str, tokenizer: Any, modalities: Collection[Modality]) -> Any:
    """The model's multimodal processor, or its parts for the modalities.

    Raises:
        InvalidRequest: there is none.
    """
    if "image" not in modalities or _image_processor_name(path) not in _PREPARED_HERE:
        with contextlib.suppress(OSError, ValueError, KeyError, ImportError):
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
            if hasattr(processor, "tokenizer"):
                return processor
    try:
        return ProcessorParts(
            tokenizer,
            image_processor=_load_image_processor(path) if "image" in modalities else None,
            feature_extractor=_load_feature_extractor(path) if "audio" in modalities else None,
            chat_template=_processor_template(path),
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidRequest(
            f"No processor could be loaded from {path!r} ({first_line}); the folder needs processor_config.json or "
            "preprocessor_config.json.",
            param="model",
        ) from error


def _load_image_processor(path: str) -> Any:
    """The model's image processor, in the form that needs no torchvision where that is missing, or its settings."""
    name = _image_processor_name(path)
    if name in _PREPARED_HERE:
        return SimpleNamespace(**ImageProcessingMixin.get_image_processor_dict(path)[0])
    try:
        return AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
    except ImportError:  # older transformers ask for torchvision although they have the other form too
        return getattr(transformers, f"{name}Pil").from_pretrained(path)


def _image_processor_name(path: str) -> str:
    """The class of the model's image processor, whatever its form; empty where no file names one."""
    try:
        config, _ = ImageProcessingMixin.get_image_processor_dict(path)
    except OSError:
        return ""
    return str(config.get("image_processor_type", "")).removesuffix("Fast").removesuffix("Pil")


def _load_feature_extractor(path: str) -> Any:
    """The model's feature extractor."""
    config, _ = FeatureExtractionMixin.get_feature_extractor_dict(path)
    name = config.get("feature_extractor_type", "")
    if name in _EXTRACTORS:  # transformers finds these by the name of the whole processor alone
        return getattr(transformers, _EXTRACTORS[name]).from_dict(config)
    return AutoFeatureExtractor.from_pretrained(path, trust_remote_code=False)


def _processor_template(path: str) -> str | None:
    """The chat template of a processor's own file, as older checkpoints have it."""
    file = cached_file(path, "chat_template.json", _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    template: str | None = json.loads(Path(file).read_text(encoding="utf-8")).get("chat_template")
    return template


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: the generation config's and the tokenizer's."""
    generation_config = getattr(model, "generation_config", None)
    configured = getattr(generation_config, "eos_token_id", None)
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return frozenset(ids)
