"""Which files of a folder or repository belong to an adapter: never a pickle, never a whole model's weights."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import IO

from adapters.card import CARD_NAME
from adapters.folder import CONFIG_NAME, INDEX_NAME, NEW_EMBEDDINGS_NAME
from adapters.readme import README_NAME
from adapters.tokenizer_files import TOKENIZER_NAMES

_WANTED = re.compile(r"adapter[\w.-]*\.safetensors")


def is_wanted(name: str) -> bool:
    """Whether a file of this name, without folders, is downloaded."""
    is_weights = _WANTED.fullmatch(name) is not None or name == NEW_EMBEDDINGS_NAME
    return is_weights or name in (CONFIG_NAME, INDEX_NAME, CARD_NAME, README_NAME, *TOKENIZER_NAMES)


def write_zip(folder: Path, target: IO[bytes]) -> None:
    """The adapter's files of a folder as a zip without compression, which weights do not gain from. Raises `OSError`."""
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.iterdir()):
            if path.is_file() and is_wanted(path.name):
                archive.write(path, path.name)
