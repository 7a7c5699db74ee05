"""Memory of the machine as far as this process may use it: Linux control groups, which containers are made of, bound it.

Reads the files of both of their versions (the kernel's admin guide, cgroup-v2 and cgroup-v1/memory) along the process's own
path. Used by `cpu_linear` and `page_lock`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class _Names:
    """Where a version of control groups is mounted, and what it calls the figures."""

    mount: str
    limit: str
    used: str
    droppable: str
    """In `memory.stat`: page cache that goes when memory is short."""


_V1 = _Names("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def total_bytes(root: Path = _ROOT) -> int:
    """Memory of the machine, or the least limit on a group that this process is in, in bytes.

    Args:
        root: where /proc and /sys lie.
    """
    limits = [limit for _, _, limit in _limited_groups(root)]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def free_bytes(root: Path = _ROOT) -> int | None:
    """Memory that this process may still take, in bytes; None where the system does not say.

    Args:
        root: where /proc and /sys lie.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    for group, names, limit in _limited_groups(root):
        try:
            used = int((group / names.used).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            droppable = next(int(line.split()[1]) for line in lines if line.startswith(f"{names.droppable} "))
        except (OSError, ValueError, StopIteration):
            continue
        free = min(free, limit - used + droppable)
    return max(0, free)


def _limited_groups(root: Path) -> Iterator[tuple[Path, _Names, int]]:
    """Folder, names and limit in bytes of each group above this process that bounds its memory."""
    for group, names in _groups(root):
        try:
            limit = int((group / names.limit).read_text())
        except (OSError, ValueError):  # no such group here, or no limit ("max")
            continue
        if limit > 0:
            yield group, names, limit


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """Folders of the groups that this process is in, and of those around them.

    A container may see its own group as the top of the mount but its path from the host's: folders on the path that are not
    there are passed over, and the top comes last.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:  # "0::/path" (version 2), "4:memory:/path" (version 1)
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            names = _V1
        elif number == "0" and not controllers:
            names = _V2
        else:
            continue
        top = root / names.mount
        inner = Path(path.lstrip("/"))
        if ".." not in inner.parts:  # else it lies outside what can be seen
            yield from ((top / folder, names) for folder in (inner, *inner.parents) if folder != Path())
        yield top, names
