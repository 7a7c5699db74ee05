"""Which files of a folder or repository belong to an adapter: never a pickle, never a whole model's weights."""

from __future__ import annotations

import re

from adapters.folder import CONFIG_NAME, INDEX_NAME, NEW_EMBEDDINGS_NAME
from adapters.tokenizer_files import TOKENIZER_NAMES

_WANTED = re.compile(r"adapter[\w.-]*\.safetensors")


def is_wanted(name: str) -> bool:
    """Whether a file of this name, without folders, is downloaded."""
    is_weights = _WANTED.fullmatch(name) is not None or name == NEW_EMBEDDINGS_NAME
    return is_weights or name in (CONFIG_NAME, INDEX_NAME, *TOKENIZER_NAMES)
