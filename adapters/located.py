"""Where an adapter's files are on this machine, and what is known of where they came from. Made by `resolvers`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class Lease:
    """Keeps fetched files from being deleted, until it is released or nobody has it any more."""

    def __init__(self, release: Callable[[], None]) -> None:
        """`release` is called once, but not at the program's end: downloads outlive it, and the next start finds them."""
        self._finalizer = weakref.finalize(self, release)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Nobody reads the files any more."""
        self._finalizer()


@dataclass(frozen=True)
class Located:
    """A folder of this machine that an address led to.

    Attributes:
        folder: where the files are.
        source: the address, as lists show it.
        revision: the commit that a hub address was pinned to; None where the source knows no revisions.
        lease: to be kept for as long as somebody may read the folder; None where it is not ours to delete.
    """

    folder: Path
    source: str
    revision: str | None = None
    lease: Lease | None = None
