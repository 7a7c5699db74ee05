"""Rows of one embedding table or head that come from several tensors of an adapter's files: which of them count.

PEFT saves a resized table whole, the rows of trained tokens beside it, and modules that it trained whole up to three times
over; a token's row is that of the tensor which PEFT itself would use. Also which combinations of what was trained beside
plain LoRA are not served. Called by `full_tensors` and `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from adapters.places import BlockPlace, Place, TensorPlace
from adapters.planned import PlannedBias, PlannedEmbedding, PlannedPair, PlannedRows
from adapters.surface import ModelSurface

# The most telling first: rows of trained tokens, then a table that was trained, then tables that were only resized.
_ORDER = ("trainable_tokens_delta", "modules_to_save", "", "base_layer", "original_module")


@dataclass(frozen=True)
class RowSource:
    """A tensor's rows [n, H] for n tokens of a table; `raw` is its name in the files."""

    file_name: str
    raw: str
    token_ids: tuple[int, ...]
    place: TensorPlace

    @property
    def order(self) -> int:
        """0 for what counts before all others."""
        levels = self.raw.split(".")
        return next((place for place, level in enumerate(_ORDER) if level and level in levels), _ORDER.index(""))


def merge_rows(table: str, sources: Sequence[RowSource]) -> PlannedRows:
    """One row for each token, from the first source in `_ORDER` that has it."""
    token_ids: list[int] = []
    parts: list[TensorPlace] = []
    taken: set[int] = set()
    for source in sorted(sources, key=lambda one: one.order):
        for start, end in _runs([token_id not in taken for token_id in source.token_ids]):
            token_ids += source.token_ids[start:end]
            parts.append(source.place.cut(start, end))
        taken.update(source.token_ids)
    place: Place = parts[0] if len(parts) == 1 else BlockPlace(tuple(parts))
    return PlannedRows(table, min(sources, key=lambda one: one.order).file_name, tuple(token_ids), place)


def refused_combinations(
    pairs: Mapping[str, PlannedPair],
    biases: Mapping[str, PlannedBias],
    embeddings: Mapping[str, PlannedEmbedding],
    rows: Mapping[str, PlannedRows],
    surface: ModelSurface,
) -> list[str]:
    """Why what was trained beside plain LoRA cannot be served together, or not on this model's layers."""
    reasons = []
    for name, pair in pairs.items():
        if pair.magnitude is None:
            continue
        if name in biases and not biases[name].replaces:
            reasons.append(
                f"{pair.file_name}: PEFT does not say what DoRA with a bias of lora_B (lora_bias) means, so it is not "
                "served; train with lora_bias=False"
            )
        weight = surface.base_tensor(f"{name}.weight")
        if surface.base_tensor_names and (weight is None or not weight.is_floating_point()):
            reasons.append(
                f"{pair.file_name}: DoRA needs the layer's own weight, which this model holds in a quantised form; serve "
                "the model in full precision, or merge the adapter into it"
            )
    for name, bias in biases.items():
        if bias.replaces and surface.base_tensor_names and surface.base_tensor(f"{name}.bias") is None:
            reasons.append(f"{bias.file_name}: the files hold a bias, but the model's layer has none")
    for name in rows:
        if name in embeddings or name in pairs:
            reasons.append(
                f"{rows[name].file_name} has both LoRA and rows of its own for single tokens, which is not served; leave "
                "it out of target_modules, or merge the adapter into the model"
            )
    for embedding in embeddings.values():
        head = embedding.site.tied_head
        if embedding.also_head and head is not None and not surface.is_targeted(head):
            reasons.append(
                f"the LoRA of {embedding.file_name} also holds for {head}, which shares its table, but this server takes "
                f"LoRA on {', '.join(surface.target_suffixes)} only (--lora-target-modules)"
            )
    reasons += _missing_rows(rows, surface)
    num_rows = max((len(one.token_ids) for one in rows.values()), default=0)
    if num_rows > surface.extra_vocab_size:
        reasons.append(
            f"the adapter adds or replaces the rows of {num_rows} tokens, but this server has room for "
            f"{surface.extra_vocab_size}; start it with --lora-extra-vocab-size {num_rows}"
        )
    return reasons


def _missing_rows(rows: Mapping[str, PlannedRows], surface: ModelSurface) -> list[str]:
    """Every added token up to the last needs a row of the embedding, or nobody could read it."""
    reasons = []
    for site in surface.embeddings.values():
        added = {token_id for one in rows.values() for token_id in one.token_ids if token_id >= site.num_tokens}
        own = set(rows[site.name].token_ids) if site.name in rows else set()
        missing = sorted(set(range(site.num_tokens, max(added, default=-1) + 1)) - own)
        if missing:
            reasons.append(
                f"the adapter adds tokens, but the files hold no row of {site.name} for {len(missing)} of them, the first "
                f"is {missing[0]}; save it again with save_embedding_layers=True"
            )
    return reasons


def _runs(is_wanted: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of neighbours that are wanted."""
    start = None
    for position, wanted in enumerate([*is_wanted, False]):
        if wanted and start is None:
            start = position
        elif not wanted and start is not None:
            yield start, position
            start = None
