"""From what a caller gave (a folder, an id) to content: finds the folder, reads it, and counts what that took.

Holds who may read from where. Knows nothing of names. Owned by `manager`; runs on its callers' threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from adapters.errors import AdapterFilesNotFound
from adapters.folder import is_under
from adapters.generation import Generation
from adapters.intake import read_generation
from adapters.surface import ModelSurface
from adapters.tally import Tally


class Reader:
    """Reads adapters for one model.

    Args:
        surface: what the model takes.
        locate: turns what `find` was given into a local folder; may raise `AdapterError`.
        allowed_roots: folders that may be read from, None for any.
        own_root: the server's own adapter folder, which may always be read from; None where there is none.
        tally: counts the reads.
    """

    def __init__(
        self,
        surface: ModelSurface,
        *,
        locate: Callable[[str], Path],
        allowed_roots: Sequence[Path] | None,
        own_root: Path | None,
        tally: Tally,
    ) -> None:
        self.surface = surface
        self._locate = locate
        self._allowed_roots = None if allowed_roots is None else list(allowed_roots)
        self._own_root = own_root
        self._tally = tally

    def find(self, path: str | Path) -> Path:
        """The folder behind what the caller gave. Raises `AdapterFilesNotFound`, which never shows it."""
        if not str(path):
            raise AdapterFilesNotFound("lora_path is empty; give a folder", param="lora_path")
        try:
            folder = self._locate(str(path)).expanduser()
            is_allowed = self._allowed_roots is None or is_under(folder, self._allowed_roots)
            if is_allowed and folder.is_dir():
                return folder.absolute()
        except (OSError, ValueError, RuntimeError):
            pass
        where = "" if self._allowed_roots is None else " in the folders that adapters may be loaded from"
        raise AdapterFilesNotFound(f"no folder was found at lora_path{where}", param="lora_path")

    def read(self, folder: Path, kind: str, *, known_digest: str | None = None) -> tuple[Generation, float]:
        """A folder's content and the milliseconds that it took; `kind` of source is for the tally.

        `known_digest` is what the content was listed under before (see `read_generation`).
        """
        started = time.perf_counter()
        is_own = self._own_root is not None and is_under(folder, [self._own_root])
        roots = None if is_own else self._allowed_roots
        generation = read_generation(folder, self.surface, allowed_roots=roots, known_digest=known_digest)
        seconds = time.perf_counter() - started
        self._tally.count_load(kind, seconds)
        return generation, seconds * 1000.0
