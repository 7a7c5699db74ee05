"""Faults of the disk that uploads and downloads land on, in words that hold no path. Used where such files are written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from adapters.errors import AdapterStoreFault, StorageFull

# The last is a limit on the size of this process's files (`ulimit -f`).
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def storage_faults(what: str) -> Iterator[None]:
    """Turns the system's errors into `StorageFull` or `AdapterStoreFault`; `what` is the thing that was written."""
    try:
        yield
    except OSError as error:
        raise_if_full(error, what)
        raise AdapterStoreFault(
            f"the folder for {what} cannot be used ({error.strerror or type(error).__name__}); choose another "
            "--adapter-dir"
        ) from error


def raise_if_full(error: OSError, what: str) -> None:
    """Raise `StorageFull` where the disk, or the share of it that this server may use, has no room left."""
    if error.errno in _NO_ROOM:
        raise StorageFull(f"the disk is full, so the {what} could not be stored; make room and try again") from error
