"""Whether the pieces that landed on a layer fit it, and with which scale: the planned pair, or the sentence that says no.

Called by `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence

from adapters.landing import Piece, short_model_name
from adapters.places import BlockPlace, Place, TensorPlace
from adapters.planned import PlannedBias, PlannedEmbedding, PlannedPair
from adapters.spec import AdapterSpec, declared_ranks, scale_for
from adapters.surface import PACKED_SUFFIXES, EmbeddingSite, LinearSite, ModelSurface
from adapters.tensor_file import FLOAT_DTYPES


class Misfit(Exception):
    """A layer's pieces do not fit it; the text is a sentence for the person who made them."""


def plan_linear(
    spec: AdapterSpec, site: LinearSite, pieces: Sequence[Piece], surface: ModelSurface
) -> tuple[PlannedPair, PlannedBias | None]:
    """The pair of one linear layer and, with `lora_bias`, its bias; raises `Misfit`."""
    for piece in pieces:
        _check_piece(piece, site.in_features, _rows_of(piece, site, pieces), spec, surface, site.name)
    scales = {scale_for(spec, piece.file_name, piece.a.shape[0], site.name) for piece in pieces}
    if len(scales) > 1:
        raise Misfit(
            f"{site.name}: its parts have different scales ({', '.join(f'{scale:.6g}' for scale in sorted(scales))}), "
            "which a fused layer cannot take; give them one rank and alpha"
        )
    scale, first = scales.pop(), pieces[0]
    if first.member is None:
        pair = PlannedPair(site, first.file_name, first.a, first.b, first.a.shape[0], scale, first.magnitude)
        bias = first.lora_bias
        return pair, None if bias is None else PlannedBias(site.name, first.file_name, bias, scale, replaces=False)
    if any(piece.magnitude is not None or piece.lora_bias is not None for piece in pieces):
        raise Misfit(
            f"{site.name}: DoRA and biases of separate layers ({first.file_name}) are not served on a fused one; merge "
            "the adapter into the model"
        )
    a, b = _joined(pieces, site)
    return PlannedPair(site, first.file_name, a, b, a.shape[0], scale), None


def plan_embedding(
    spec: AdapterSpec, site: EmbeddingSite, piece: Piece, surface: ModelSurface, *, also_head: bool
) -> PlannedEmbedding:
    """The pair of an embedding table; raises `Misfit`."""
    if piece.magnitude is not None or piece.lora_bias is not None:
        raise Misfit(f"{piece.file_name}: DoRA and biases on embeddings are not served; leave it out of target_modules")
    _check_piece(piece, site.num_tokens, site.width, spec, surface, site.name)
    rank = piece.a.shape[0]
    scale = scale_for(spec, piece.file_name, rank, site.name)
    return PlannedEmbedding(site, piece.file_name, piece.a, piece.b, rank, scale, also_head)


def _check_piece(
    piece: Piece, num_columns: int, num_rows: int, spec: AdapterSpec, surface: ModelSurface, name: str
) -> None:
    a, b = piece.a.shape, piece.b.shape
    both = f"{piece.file_name}: lora_A {list(a)} and lora_B {list(b)}"
    for half in (piece.a, piece.b, piece.magnitude, piece.lora_bias):
        if half is not None:
            check_numbers(half)
    if len(a) != 2 or len(b) != 2:
        raise Misfit(f"{both} must have two dimensions each")
    rank = a[0]
    if b[1] != rank:
        raise Misfit(f"{both} disagree about the rank: {rank} and {b[1]}")
    if a[1] != num_columns or b[0] != num_rows:
        declared = short_model_name(spec.base_model_name_or_path)
        trained = f"; the adapter says that it was trained on {declared!r}" if declared else ""
        raise Misfit(
            f"{both} do not fit the model {short_model_name(surface.model_name)!r}, which needs "
            f"[{rank}, {num_columns}] and [{num_rows}, {rank}] there{trained}"
        )
    for vector in (piece.magnitude, piece.lora_bias):
        if vector is not None and vector.shape != (num_rows,):
            raise Misfit(f"tensor {vector.name} is {list(vector.shape)}, but the model needs [{num_rows}] there")
    ranks = declared_ranks(spec, piece.file_name, name)
    if rank not in ranks:
        raise Misfit(f"{both} have rank {rank}, but adapter_config.json gives rank {ranks[0]} (r or rank_pattern)")


def check_numbers(place: TensorPlace) -> None:
    """Raise `Misfit` for a tensor that is empty or holds no floating-point numbers."""
    if 0 in place.shape:
        raise Misfit(
            f"tensor {place.name} is empty ({list(place.shape)}); the checkpoint was probably saved from a sharded "
            "trainer (ZeRO-3, FSDP) without gathering the weights, save it again"
        )
    if place.dtype not in FLOAT_DTYPES:
        raise Misfit(f"tensor {place.name} is {place.dtype}; save it as one of {', '.join(FLOAT_DTYPES)}")


def _rows_of(piece: Piece, site: LinearSite, pieces: Sequence[Piece]) -> int:
    """Output features that a piece's B must have: all of the layer's, or those of its part."""
    if piece.member is None:
        return site.out_features
    sizes = _member_sizes(pieces, site)
    return sizes[piece.member]


def _member_sizes(pieces: Sequence[Piece], site: LinearSite) -> dict[str, int]:
    """Rows of each part of a fused layer, from the parts that the files hold; k and v are always of one size."""
    members = PACKED_SUFFIXES[site.name.rpartition(".")[2]]
    given = {piece.member: piece.b.shape[0] for piece in pieces if piece.member is not None and piece.b.shape}
    out = site.out_features
    if len(members) == 2:
        sizes = dict.fromkeys(members, out // 2)
    else:
        query, key, value = members
        narrow = given.get(key, given.get(value))
        if narrow is None:
            narrow = (out - given[query]) // 2
        sizes = {query: out - 2 * narrow, key: narrow, value: narrow}
    if sum(sizes.values()) != out or min(sizes.values()) < 1:
        raise Misfit(f"{pieces[0].file_name}: its parts do not add up to the {out} output features of {site.name}")
    return sizes


def _joined(pieces: Sequence[Piece], site: LinearSite) -> tuple[Place, Place]:
    """A below A, and B as blocks at their own rows: what the parts do apart, in one pair of summed rank."""
    sizes = _member_sizes(pieces, site)
    starts, start = {}, 0
    for member, size in sizes.items():
        starts[member] = start
        start += size
    if len({piece.a.dtype for piece in pieces}) > 1 or len({piece.b.dtype for piece in pieces}) > 1:
        raise Misfit(f"{pieces[0].file_name}: the parts of {site.name} are of different types; save them as one")
    offsets = tuple(starts[str(piece.member)] for piece in pieces)
    a = BlockPlace(tuple(piece.a for piece in pieces))
    return a, BlockPlace(tuple(piece.b for piece in pieces), offsets, site.out_features)
