"""What an adapter holds beside LoRA pairs on linears, read and folded: output changes, embedding pairs, token rows.

DoRA's magnitudes and trained biases become a scale and a shift of a layer's output (`magnitude`); LoRA on an embedding
table becomes a pair whose A lies token by token; rows of added or replaced tokens stay rows. Everything is checked and
cast here, on loader threads, from what `plan` has laid out. Called by `weights`.

V tokens of an embedding table, H its width, R rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from adapters.errors import AdapterRefused
from adapters.magnitude import OutputChange, output_change, row_norms
from adapters.places import Place, TensorPlace
from adapters.planned import AdapterPlan, PlannedBias, PlannedEmbedding, PlannedPair
from adapters.surface import ModelSurface
from adapters.tokenizer_files import TOKENIZER_NAME


@dataclass(frozen=True)
class EmbeddingPair:
    """LoRA of an embedding table, on the CPU in the serving dtype: token t's row gets `b @ a[t]` added.

    Attributes:
        a: [V, R], the transpose of what the files hold.
        b: [H, R], the scale folded in; the model's own scale of embeddings is not.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[1]


@dataclass(frozen=True)
class TokenRows:
    """Rows [n, H] of an embedding or head that stand in place of the base's, or past its end, for `token_ids`."""

    token_ids: tuple[int, ...]
    rows: torch.Tensor


@dataclass(frozen=True)
class AdapterExtras:
    """Everything but the LoRA pairs, by module name; empty for a plain LoRA.

    Attributes:
        changes: what happens to the base layer's output before the LoRA product is added.
        embeddings: LoRA of embedding tables.
        rows: rows of added or replaced tokens.
        num_added_tokens: tokens past the base's vocabulary.
        tokenizer_files: file name -> content of the tokenizer that came with token rows; empty where the base's serves.
        is_zero: whether all of it changes nothing.
    """

    changes: Mapping[str, OutputChange] = field(default_factory=dict)
    embeddings: Mapping[str, EmbeddingPair] = field(default_factory=dict)
    rows: Mapping[str, TokenRows] = field(default_factory=dict)
    num_added_tokens: int = 0
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    is_zero: bool = True


def with_shared_heads(plan: AdapterPlan, surface: ModelSurface) -> AdapterPlan:
    """The plan with a pair for each head that shares its embedding's LoRA: logits get `a.T @ (b.T @ hidden)`, scaled."""
    shared = {}
    for planned in plan.embeddings.values():
        head = planned.site.tied_head
        if planned.also_head and head is not None and head not in plan.pairs:
            a, b = _transposed(planned.b), _transposed(planned.a)
            shared[head] = PlannedPair(surface.linears[head], planned.file_name, a, b, planned.rank, planned.scale)
    return replace(plan, pairs=dict(sorted({**plan.pairs, **shared}.items()))) if shared else plan


def read_extras(
    plan: AdapterPlan,
    lora_b: Mapping[str, torch.Tensor],
    surface: ModelSurface,
    digest: hashlib._Hash,
    read_tokenizer: Callable[[], Mapping[str, bytes]],
) -> AdapterExtras:
    """Read all that a plan holds beside its pairs, and fold DoRA's gains into the pairs' B.

    Args:
        lora_b: B [out, R] of each pair in the serving dtype, by module name; changed in place for layers with DoRA.
        digest: fed with everything that is read.
        read_tokenizer: gives the files of the tokenizer beside the adapter; called where it has token rows.

    Raises:
        AdapterRefused: a number is not finite or does not fit the serving dtype.
    """
    reader = _Reader(digest)
    gains = {
        name: _fold_gain(planned, planned.magnitude, lora_b[name], surface, reader)
        for name, planned in plan.pairs.items()
        if planned.magnitude is not None
    }
    changes = {}
    for name in sorted({*gains, *plan.biases}):
        change = _read_change(name, gains.get(name), plan.biases.get(name), surface, reader)
        if change is not None:
            changes[name] = change
    embeddings = {name: _read_embedding(item, surface, reader) for name, item in plan.embeddings.items()}
    rows = {
        name: TokenRows(
            item.token_ids,
            _cast(reader.read(item.rows, name, "rows", item.token_ids), surface.lora_dtype, item.file_name),
        )
        for name, item in plan.rows.items()
    }
    tokenizer_files = read_tokenizer() if rows else {}
    _check_tokenizer(tokenizer_files, plan.num_added_tokens, surface)
    for name, content in sorted(tokenizer_files.items()):
        digest.update(json.dumps([name, len(content)]).encode())
        digest.update(content)
    is_zero = (
        not rows
        and all(bool((change.scale == 1).all() and (change.shift == 0).all()) for change in changes.values())
        and all(not pair.a.any() or not pair.b.any() for pair in embeddings.values())
    )
    return AdapterExtras(changes, embeddings, rows, plan.num_added_tokens, tokenizer_files, is_zero)


def _check_tokenizer(files: Mapping[str, bytes], num_added: int, surface: ModelSurface) -> None:
    if files:
        why = surface.why_tokenizer_unfit(files, num_added)
        if why is not None:
            raise AdapterRefused([f"the adapter has token rows of its own, but {why}"])
    elif num_added:
        raise AdapterRefused(
            [
                f"the adapter adds {num_added} tokens, but no {TOKENIZER_NAME} lies beside it, so no text could hold them; "
                "save the tokenizer that it was trained with into the same folder"
            ]
        )


class _Reader:
    """Reads places, checks their numbers, and feeds a digest with all that was read."""

    def __init__(self, digest: hashlib._Hash) -> None:
        self._digest = digest

    def read(self, place: Place, *facts: object) -> torch.Tensor:
        """A place's numbers in the stored dtype; `facts` say what it is for, and go into the digest with it."""
        tensor = place.read()
        self._digest.update(json.dumps([*facts, place.dtype, list(place.shape)]).encode())
        self._digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        if not torch.isfinite(tensor).all():
            raise AdapterRefused([f"tensor {place.name} holds NaN or infinity; the training run went wrong"])
        return tensor


def _fold_gain(
    planned: PlannedPair, magnitude: Place, lora_b: torch.Tensor, surface: ModelSurface, reader: _Reader
) -> torch.Tensor:
    """DoRA's gain of one layer, [out] float32, also multiplied into its B; all of it computed from the stored numbers."""
    weight = surface.base_tensor(planned.site.name + ".weight")
    m = reader.read(magnitude, planned.site.name, "magnitude").float()
    if weight is None or weight.is_meta:  # A base without numbers: files are judged, but nothing will be computed.
        return torch.ones_like(m)
    b = planned.b.read().float() * planned.scale
    norms = row_norms(weight.detach(), planned.a.read().float(), b)
    if not (norms > 0).all():
        raise AdapterRefused(
            [f"{planned.file_name}: a row of the layer's weight is zero, so its DoRA magnitude scales nothing"]
        )
    gain = m / norms
    lora_b.copy_(_cast(gain[:, None] * b, lora_b.dtype, planned.file_name))
    return gain


def _read_change(
    name: str, gain: torch.Tensor | None, planned: PlannedBias | None, surface: ModelSurface, reader: _Reader
) -> OutputChange | None:
    base_bias = surface.base_tensor(name + ".bias")
    if base_bias is not None and base_bias.is_meta:
        base_bias = torch.zeros(base_bias.shape)
    base_bias = None if base_bias is None else base_bias.detach()
    bias = None
    if planned is not None:
        bias = reader.read(planned.bias, name, "bias", planned.replaces, repr(planned.scale)).float() * planned.scale
    return output_change(
        len(gain if gain is not None else bias),  # type: ignore[arg-type]
        gain=gain,
        base_bias=base_bias,
        trained_bias=bias if planned is not None and planned.replaces else None,
        added_bias=bias if planned is not None and not planned.replaces else None,
    )


def _read_embedding(planned: PlannedEmbedding, surface: ModelSurface, reader: _Reader) -> EmbeddingPair:
    facts = (planned.site.name, "embedding", repr(planned.scale), planned.also_head)
    a = reader.read(planned.a, *facts).T
    b = reader.read(planned.b, *facts).float() * planned.scale
    return EmbeddingPair(
        _cast(a, surface.lora_dtype, planned.file_name).contiguous(), _cast(b, surface.lora_dtype, planned.file_name)
    )


def _cast(tensor: torch.Tensor, dtype: torch.dtype, file_name: str) -> torch.Tensor:
    cast = tensor.to(dtype, copy=True)
    if not torch.isfinite(cast).all():
        raise AdapterRefused([f"{file_name} does not fit {str(dtype).removeprefix('torch.')} (numbers too large)"])
    return cast


def _transposed(place: Place) -> Place:
    assert isinstance(place, TensorPlace) and place.rows is None, "an embedding's halves are whole tensors"
    return replace(place, is_transposed=not place.is_transposed)
