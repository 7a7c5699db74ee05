"""The tokenizer that lies beside an adapter which adds tokens: its files, read into memory with the adapter.

Owns which files belong to a tokenizer and their bounds. What they mean is the engine's business, which gets them as bytes
so that a loaded adapter never looks at the disk again. Called by `weights`; `upload` and `hub` let these names through.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from adapters.errors import AdapterRefused
from adapters.folder import is_under

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_NAMES = (
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
MAX_BYTES = 64 << 20
"""Of all files together; the largest vocabularies take about 35 MiB."""


def read_tokenizer_files(folder: Path, *, allowed_roots: Sequence[Path] | None = None) -> dict[str, bytes]:
    """File name -> content; empty where the folder has no `tokenizer.json`.

    Raises `AdapterRefused` where a file is no regular file, leads out of the allowed roots, or is too large.
    """
    if not (folder / TOKENIZER_NAME).exists():
        return {}
    files: dict[str, bytes] = {}
    room = MAX_BYTES
    for name in TOKENIZER_NAMES:
        path = folder / name
        if not path.exists():
            continue
        if allowed_roots is not None and not is_under(path, allowed_roots):
            raise AdapterRefused([f"{name} is a link that leads out of the folders that adapters may be loaded from"])
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > room:
            raise AdapterRefused([f"{name} is no regular file, or the tokenizer is over {MAX_BYTES >> 20} MiB"])
        files[name] = path.read_bytes()
        room -= len(files[name])
    return files
