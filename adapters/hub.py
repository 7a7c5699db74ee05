"""Finds the folder that a source names: a folder of this machine, or a repository of the Hugging Face hub.

Downloads only what an adapter consists of. Called by `adapters/manager` through its `locate` argument, on loader threads.
"""

from __future__ import annotations

import re
from pathlib import Path

from adapters.errors import AdapterFilesNotFound
from adapters.tokenizer_files import TOKENIZER_NAMES

# owner/name, perhaps with a folder inside the repository: owner/name/sub/folder
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<folder>[\w.-]+(?:/[\w.-]+)*))?")
_WANTED = ("adapter_config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_NAMES)


def locate_adapter(source: str | Path) -> Path:
    """The folder of `source`: a path (`~` is the home folder), or a hub id such as `owner/name` or `owner/name/folder`.

    A folder of this machine wins over a hub id of the same spelling.

    Raises:
        AdapterFilesNotFound: neither is there, or the hub cannot be reached.
    """
    folder = Path(source).expanduser()
    match = _HUB_ID.fullmatch(str(source))
    if folder.exists() or match is None or ".." in Path(source).parts:
        return folder
    return _download(match["repo"], match["folder"])


def _download(repo: str, folder: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    prefix = f"{folder}/" if folder else ""
    try:
        root = snapshot_download(repo, allow_patterns=[prefix + name for name in _WANTED])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise AdapterFilesNotFound(
            f"{repo} is no folder here and cannot be had from the hub ({type(error).__name__}); give the adapter's folder, "
            "or check the id, the network and the token for private repositories"
        ) from None
    return Path(root) / (folder or "")
