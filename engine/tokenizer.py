"""Loads a model's tokenizer and processor, and finds the tokens that end an answer.

Knows transformers' loading functions and turns their failures into sentences. Called by `engine/engine`.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from engine.errors import InvalidRequest


def load_tokenizer(path: str, gguf_file: str | None) -> Any:
    """The model's fast tokenizer.

    Raises:
        InvalidRequest: there is none, or it has no fast form (which the detokenizer needs).
    """
    keywords = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **keywords)
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


def load_processor(path: str) -> Any:
    """The model's multimodal processor."""
    try:
        return AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidRequest(
            f"No processor could be loaded from {path!r} ({str(error).strip().splitlines()[0]}); the folder needs "
            "processor_config.json or preprocessor_config.json.",
            param="model",
        ) from error


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: the generation config's and the tokenizer's."""
    generation_config = getattr(model, "generation_config", None)
    configured = getattr(generation_config, "eos_token_id", None)
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return frozenset(ids)
