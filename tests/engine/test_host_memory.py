"""What a container may take of its host's memory, against trees of files as Linux shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.host_memory import free_bytes, total_bytes

HOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 2**20
GROUPS = "sys/fs/cgroup"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/", {"memory.max": 64 * MIB}, 64 * MIB),
        ("0::/a/b", {"a/b/memory.max": 64 * MIB, "a/memory.max": 32 * MIB, "c/memory.max": MIB}, 32 * MIB),
        ("0::/a/b", {"a/b/memory.max": 64 * MIB, "a/memory.max": "max"}, 64 * MIB),
        ("0::/outside/the/container", {"memory.max": 64 * MIB}, 64 * MIB),
        ("0::/../other", {"memory.max": 64 * MIB, "../other/memory.max": MIB}, 64 * MIB),
        ("4:cpu,memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": 64 * MIB}, 64 * MIB),
        ("4:cpu,memory:/out/side\n0::/", {"memory/memory.limit_in_bytes": 64 * MIB}, 64 * MIB),
        ("4:cpuset:/a\n0::/", {"memory/a/memory.limit_in_bytes": 64 * MIB}, HOST),
        ("4:memory:/\n0::/", {"memory/memory.limit_in_bytes": 2**63 - 4096}, HOST),
        ("0::/", {"memory.max": "max"}, HOST),
        ("0::/", {"memory.max": 0}, HOST),
        ("0::/", {"memory.max": "?"}, HOST),
        ("nonsense", {}, HOST),
    ],
)
def test_the_least_limit_on_the_process_is_what_it_has(
    tmp_path: Path, membership: str, limits: dict[str, object], expected: int
) -> None:
    write(tmp_path, {"proc/self/cgroup": membership, **{f"{GROUPS}/{name}": limit for name, limit in limits.items()}})
    assert total_bytes(tmp_path) == expected


def test_a_system_that_says_nothing_has_what_is_built_in(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) == HOST and free_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {}, 900 * MIB),
        ("0::/a", {"a/memory.max": "max", "a/memory.current": 5 * MIB, "a/memory.stat": ""}, 900 * MIB),
        ("0::/a", {"a/memory.max": 64 * MIB}, 900 * MIB),
        (
            "0::/a",
            {
                "a/memory.max": 64 * MIB,
                "a/memory.current": 50 * MIB,
                "a/memory.stat": f"anon 1\ninactive_file {7 * MIB}",
            },
            21 * MIB,
        ),
        (
            "4:memory:/a",
            {
                "memory/a/memory.limit_in_bytes": 64 * MIB,
                "memory/a/memory.usage_in_bytes": 50 * MIB,
                "memory/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {7 * MIB}",
            },
            21 * MIB,
        ),
        ("0::/", {"memory.max": MIB, "memory.current": 9 * MIB, "memory.stat": "inactive_file 0"}, 0),
    ],
)
def test_what_is_free_is_bounded_by_what_the_group_has_left(
    tmp_path: Path, membership: str, files: dict[str, object], expected: int
) -> None:
    write(tmp_path, {"proc/self/cgroup": membership, "proc/meminfo": f"MemFree: 1 kB\nMemAvailable: {900 * 1024} kB"})
    write(tmp_path, {f"{GROUPS}/{name}": content for name, content in files.items()})
    assert free_bytes(tmp_path) == expected
