"""Where a base model's files come from: a folder, the Hugging Face hub, or the hub's local cache where it cannot be asked.

Asked once, before anything is loaded: transformers would look for each file by itself, and try a hub that cannot be reached
again and again for half a minute. Knows nothing of what is in the files. Called by `engine/model`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from adapters.resolvers.hub import TIMEOUT_S, transport_errors
from engine.errors import InvalidRequest

logger = logging.getLogger(__name__)


def find_origin(path: str, gguf_file: str | None = None) -> str:
    """What transformers should load a model from: the path itself, or the folder of the cache that stands in for the hub.

    Raises:
        InvalidRequest: the path is of this machine and not there, or it is an id, the hub cannot be asked and the cache has
            no copy.
    """
    folder = Path(path).expanduser()
    if path.startswith((".", "~", "/", "\\")) and not folder.is_dir():
        raise InvalidRequest(f"--model {path}: there is no such folder.", param="model")
    if gguf_file and folder.is_dir() and not (folder / gguf_file).is_file():
        raise InvalidRequest(f"--gguf-file {gguf_file}: the model's folder has no such file.", param="gguf_file")
    if folder.exists():
        return path
    obstacle = _obstacle(path)
    if obstacle is None:
        return path
    cached = _cached_folder(path, gguf_file or "config.json")
    if cached is None:
        raise InvalidRequest(
            f"No base model could be loaded from {path!r}: it is no folder here, {obstacle}, and the local cache has no "
            "copy; give a folder with config.json and safetensors, or download the model beforehand.",
            param="model",
        )
    logger.warning("event=hub_not_asked model=%s effect=cached_copy_used reason=%r", path, obstacle)
    return str(cached)


def _obstacle(model_id: str) -> str | None:
    """Why the hub cannot be asked, or None. What it says of the id is left to transformers."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE keeps the Hugging Face hub from being asked"
    try:
        HfApi().model_info(model_id, timeout=TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError):
        return None
    except transport_errors():
        return "the Hugging Face hub cannot be reached (check the network or HF_ENDPOINT)"
    return None


def _cached_folder(model_id: str, file_name: str) -> Path | None:
    """The cache's folder of the whole repository, where it has the file, which may lie in a folder of that."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model_id, file_name)
    except HFValidationError:
        return None
    return Path(found).parents[len(Path(file_name).parts) - 1] if isinstance(found, str) else None
