"""From what a caller gave (a folder, an id) to content: finds the folder, reads it, and counts what that took.

Holds who may read from where. Owned by `manager`; runs on its callers' threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from adapters.card import AdapterCard
from adapters.errors import AdapterFilesNotFound, AdapterRefused
from adapters.folder import is_under, stamp_of
from adapters.generation import Generation
from adapters.intake import read_generation
from adapters.located import Located
from adapters.readme import find_card
from adapters.records import AdapterEntry
from adapters.slab_pool import Memory
from adapters.surface import ModelSurface
from adapters.tally import Tally


class Reader:
    """Reads adapters for one model.

    Args:
        surface: what the model takes.
        locate: turns an address that `find` was given into a local folder, fetching it where need be; may raise
            `AdapterError`. None takes every address as a path.
        allowed_roots: folders that may be read from, None for any.
        own_root: the server's own adapter folder, which may always be read from; None where there is none.
        tally: counts the reads.
        memory: what adapters are read into.
    """

    def __init__(
        self,
        surface: ModelSurface,
        *,
        locate: Callable[[str], Located] | None,
        allowed_roots: Sequence[Path] | None,
        own_root: Path | None,
        tally: Tally,
        memory: Memory,
    ) -> None:
        self.surface = surface
        self.memory = memory
        self._locate = locate or (lambda address: Located(Path(address), address))
        self._allowed_roots = None if allowed_roots is None else list(allowed_roots)
        self._own_root = own_root
        self._tally = tally

    @contextmanager
    def located(self, path: str | Path | Located) -> Iterator[Located]:
        """The folder behind what the caller gave; what was fetched is given back at once where the block fails.

        Raises `AdapterFilesNotFound`, which never shows it, and what `locate` raises.
        """
        located = self._find(path)
        try:
            yield located
        except BaseException:
            if located.lease is not None:
                located.lease.release()
            raise

    def _find(self, path: str | Path | Located) -> Located:
        if not str(path):
            raise AdapterFilesNotFound("lora_path is empty; give a folder", param="lora_path")
        try:
            located = path if isinstance(path, Located) else self._locate(str(path))
            folder = located.folder.expanduser()
            is_allowed = self._allowed_roots is None or is_under(folder, self._allowed_roots)
            if is_allowed and folder.is_dir():
                return replace(located, folder=folder.absolute())
        except (OSError, ValueError, RuntimeError):
            pass
        where = "" if self._allowed_roots is None else " in the folders that adapters may be loaded from"
        raise AdapterFilesNotFound(
            f"no folder was found at lora_path{where}; give one adapter's folder, best by its absolute path on the server",
            param="lora_path",
        )

    def read(self, folder: Path, kind: str, *, known_digest: str | None = None) -> tuple[Generation, float]:
        """A folder's content and the milliseconds that it took; `kind` of source is for the tally.

        `known_digest` is what the content was listed under before (see `read_generation`).
        """
        started = time.perf_counter()
        roots = self._roots_of(folder)
        generation = read_generation(
            folder, self.surface, allowed_roots=roots, known_digest=known_digest, memory=self.memory
        )
        seconds = time.perf_counter() - started
        self._tally.count_load(kind, seconds)
        return generation, seconds * 1000.0

    def read_again(self, entry: AdapterEntry) -> tuple[Generation, float]:
        """What `read` gives for an entry whose content left memory.

        Files that hold other content by now are read once: as long as they look the same, by their sizes and times, the
        refusal is the same.

        Raises:
            AdapterRefused: its files have changed, or cannot be read.
            AdapterFilesNotFound: they are gone.
        """
        stamp = stamp_of(entry.folder)  # Before they are read, so that a later change is never missed.
        if stamp is None or stamp != entry.changed_stamp:
            kind = "upload" if entry.version else "path"
            generation, load_ms = self.read(entry.folder, kind, known_digest=entry.digest)
            if generation.digest == entry.digest:
                return generation, load_ms
            entry.changed_stamp = stamp
        raise AdapterRefused(["its files changed after it was loaded; load it again with load_inplace"])

    def card(self, folder: Path) -> AdapterCard | None:
        """The card that lies in a folder; raises `AdapterRefused`."""
        return find_card(folder, allowed_roots=self._roots_of(folder))

    def _roots_of(self, folder: Path) -> Sequence[Path] | None:
        """Where the links of a folder may lead; None for anywhere."""
        is_own = self._own_root is not None and is_under(folder, [self._own_root])
        return None if is_own else self._allowed_roots
