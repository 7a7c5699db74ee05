"""Tile choices of the LoRA kernels: one table by device family, kind of step, rank and width; nothing is tuned while serving.

Owns the table and how a step's size selects a row. `python -m benchmarks.kernels --tune` measures candidates on the
device at hand and prints rows for it. Used by `kernels/lora` and, for the size of token tiles, by `kernels/metadata`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

TileT = TypeVar("TileT")


class Kind(NamedTuple):
    """A range of step sizes with the same tiles: steps of at most `max_tokens` tokens, cut in tiles of `block_tokens`."""

    name: str
    max_tokens: int | None
    block_tokens: int


KINDS = (
    Kind("decode", 64, 16),
    Kind("batch", 256, 16),
    Kind("chunk", 512, 32),
    Kind("prefill", 2048, 64),
    Kind("long", None, 128),
)
"""Chosen by the step's token count alone, which is fixed in a captured graph while adapters and segments change."""


class ShrinkTile(NamedTuple):
    """How `x @ A.T` is cut.

    Attributes:
        block_rank: rows of A a program handles.
        block_in: input columns of one step of one group.
        num_groups: groups of warps that take different columns of a step (1: all warps share one tensor-core tile).
        split_len: input columns of a program, a multiple of `block_in * num_groups`; equal means one step, no loop.
        num_warps, num_stages: of the program and of its loop.
        programs_per_sm: limit of the grid; programs beyond it are taken in turns.
    """

    block_rank: int
    block_in: int
    num_groups: int
    split_len: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


class ExpandTile(NamedTuple):
    """How `output += h @ B.T` is cut.

    Attributes:
        block_out: output columns of a step.
        num_warps: of a program.
        num_stages: 0: a program takes one block at a time, with the first on its way before `h` is there; more: it runs
            along many with that many loads in advance (ranks up to 64 only).
        programs_per_sm: limit of the grid.
    """

    block_out: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


SHRINK_TILES = {
    # (family, kind, rank up to, width up to; None: any): tile
    ("sm90", "decode", 16, 8192): ShrinkTile(16, 128, 1, 512, 4, 4, 16),
    ("sm90", "decode", 16, None): ShrinkTile(16, 256, 1, 1024, 2, 3, 16),
    ("sm90", "decode", None, 8192): ShrinkTile(64, 128, 1, 1024, 4, 4, 16),
    ("sm90", "decode", None, None): ShrinkTile(64, 128, 1, 1024, 4, 4, 16),
    ("sm90", "batch", 16, 8192): ShrinkTile(16, 128, 1, 512, 4, 4, 16),
    ("sm90", "batch", 16, None): ShrinkTile(16, 128, 1, 1024, 4, 4, 16),
    ("sm90", "batch", None, 8192): ShrinkTile(64, 128, 1, 1024, 4, 4, 16),
    ("sm90", "batch", None, None): ShrinkTile(64, 128, 1, 2048, 4, 4, 16),
    ("sm90", "chunk", 16, 8192): ShrinkTile(16, 128, 1, 512, 4, 4, 16),
    ("sm90", "chunk", 16, None): ShrinkTile(16, 128, 1, 1024, 4, 4, 16),
    ("sm90", "chunk", None, 8192): ShrinkTile(64, 128, 1, 2048, 4, 4, 16),
    ("sm90", "chunk", None, None): ShrinkTile(64, 128, 1, 2048, 4, 4, 16),
    ("sm90", "prefill", 16, 8192): ShrinkTile(16, 64, 1, 1024, 4, 4, 16),
    ("sm90", "prefill", 16, None): ShrinkTile(16, 128, 1, 2048, 4, 3, 16),
    ("sm90", "prefill", None, 8192): ShrinkTile(64, 128, 1, 2048, 4, 3, 16),
    ("sm90", "prefill", None, None): ShrinkTile(64, 128, 1, 2048, 4, 3, 16),
    ("sm90", "long", 16, 8192): ShrinkTile(16, 128, 1, 4096, 8, 3, 16),
    ("sm90", "long", 16, None): ShrinkTile(16, 128, 1, 4096, 8, 3, 16),
    ("sm90", "long", None, 8192): ShrinkTile(64, 64, 1, 4096, 4, 4, 16),
    ("sm90", "long", None, None): ShrinkTile(64, 128, 1, 4096, 8, 3, 16),
    ("any", "decode", None, None): ShrinkTile(16, 64, 4, 512, 4, 2, 16),
    ("any", "batch", None, None): ShrinkTile(16, 64, 4, 512, 4, 2, 16),
    ("any", "chunk", None, None): ShrinkTile(16, 64, 4, 512, 4, 2, 16),
    ("any", "prefill", None, None): ShrinkTile(32, 64, 1, 1024, 4, 2, 16),
    ("any", "long", None, None): ShrinkTile(32, 64, 1, 4096, 4, 2, 16),
}

EXPAND_TILES = {
    ("sm90", "decode", 16, 8192): ExpandTile(256, 8, 0, 16),
    ("sm90", "decode", 16, None): ExpandTile(128, 4, 4, 4),
    ("sm90", "decode", None, 8192): ExpandTile(256, 4, 0, 16),
    ("sm90", "decode", None, None): ExpandTile(128, 8, 3, 2),
    ("sm90", "batch", 16, 8192): ExpandTile(256, 8, 0, 16),
    ("sm90", "batch", 16, None): ExpandTile(128, 4, 4, 4),
    ("sm90", "batch", None, 8192): ExpandTile(256, 4, 0, 16),
    ("sm90", "batch", None, None): ExpandTile(128, 8, 3, 2),
    ("sm90", "chunk", 16, 8192): ExpandTile(256, 4, 0, 16),
    ("sm90", "chunk", 16, None): ExpandTile(128, 4, 3, 6),
    ("sm90", "chunk", None, 8192): ExpandTile(256, 4, 0, 16),
    ("sm90", "chunk", None, None): ExpandTile(128, 4, 3, 2),
    ("sm90", "prefill", 16, 8192): ExpandTile(64, 8, 3, 3),
    ("sm90", "prefill", 16, None): ExpandTile(64, 8, 3, 3),
    ("sm90", "prefill", None, 8192): ExpandTile(64, 4, 3, 4),
    ("sm90", "prefill", None, None): ExpandTile(128, 8, 3, 2),
    ("sm90", "long", 16, 8192): ExpandTile(64, 4, 3, 4),
    ("sm90", "long", 16, None): ExpandTile(128, 8, 3, 2),
    ("sm90", "long", None, 8192): ExpandTile(64, 4, 3, 4),
    ("sm90", "long", None, None): ExpandTile(128, 8, 3, 2),
    ("any", "decode", None, None): ExpandTile(128, 4, 0, 16),
    ("any", "batch", None, None): ExpandTile(128, 4, 0, 16),
    ("any", "chunk", None, None): ExpandTile(128, 4, 0, 16),
    ("any", "prefill", None, None): ExpandTile(64, 4, 0, 16),
    ("any", "long", None, None): ExpandTile(32, 4, 0, 16),
}


def kind_of(num_tokens: int) -> Kind:
    """The row of `KINDS` for a step of `num_tokens` tokens."""
    return next(kind for kind in KINDS if kind.max_tokens is None or num_tokens <= kind.max_tokens)


def num_tiles_of(num_tokens: int, max_segments: int) -> int:
    """The most token tiles that at most `max_segments` segments within `num_tokens` tokens can need."""
    num_segments = min(num_tokens, max_segments)
    return num_segments + (num_tokens - num_segments) // kind_of(num_tokens).block_tokens


def step_sizes(max_tokens: int) -> list[int]:
    """The largest step of each kind within `max_tokens`."""
    limits = [max_tokens if kind.max_tokens is None else min(kind.max_tokens, max_tokens) for kind in KINDS]
    return sorted(set(limits))


def device_family(capability: tuple[int, int] | None) -> str:
    """The table's name for a device: `sm90` for Hopper, `any` for all others."""
    return "sm90" if capability is not None and capability[0] == 9 else "any"


def shrink_tile(family: str, kind: str, rank: int, width: int) -> ShrinkTile:
    """The row for buffers of `rank` rows and `width` input columns."""
    return _lookup(SHRINK_TILES, family, kind, rank, width)


def expand_tile(family: str, kind: str, rank: int, width: int) -> ExpandTile:
    """The row for buffers of `rank` columns and groups of `width` output columns."""
    return _lookup(EXPAND_TILES, family, kind, rank, width)


def scratch_rows(max_tokens: int, max_in: int) -> int:
    """Rows of scratch (splits x tokens) that no step of at most `max_tokens` tokens on `max_in` columns exceeds."""
    split_lens = {
        kind.name: min(tile.split_len for key, tile in SHRINK_TILES.items() if key[1] == kind.name) for kind in KINDS
    }
    return max(size * -(-max_in // split_lens[kind_of(size).name]) for size in step_sizes(max_tokens))


def _lookup(
    table: dict[tuple[str, str, int | None, int | None], TileT], family: str, kind: str, rank: int, width: int
) -> TileT:
    return next(
        tile
        for (row_family, row_kind, max_rank, max_width), tile in table.items()
        if (row_family, row_kind) == (family, kind)
        and (max_rank is None or rank <= max_rank)
        and (max_width is None or width <= max_width)
    )
