"""What a plan is made of: everything that an adapter's files hold, each with the layer that it lands on.

Made by `plan`; the numbers are read later, through places. A plan holds only what the running model can serve
(`ModelSurface.serves_dora` and its neighbours): what it cannot serve was refused, so an empty field means that the
adapter has nothing of the kind.

R rank, V rows of an embedding table (tokens), H its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from adapters.places import Place, TensorPlace
from adapters.spec import AdapterSpec
from adapters.surface import EmbeddingSite, LinearSite


@dataclass(frozen=True)
class PlannedPair:
    """LoRA of a linear layer that will be read: the layer adds `scale * b @ (a @ x)`.

    Attributes:
        file_name: the module's name in the files.
        a: [R, in]. b: [out, R].
        rank: R. scale: not yet folded in.
        magnitude: [out], DoRA's magnitude vector; None for plain LoRA. With it the layer gives
            `magnitude / |W + scale * b @ a|` times what it gives without, row by row, the norm over input features
            (https://arxiv.org/abs/2402.09353); the base's own bias is added after that.
    """

    site: LinearSite
    file_name: str
    a: Place
    b: Place
    rank: int
    scale: float
    magnitude: Place | None = None


@dataclass(frozen=True)
class PlannedBias:
    """A trained bias of a layer.

    Attributes:
        bias: [out].
        scale: what the bias is multiplied by before it is added: the pair's scale for a bias of lora_B (`lora_bias`),
            1 for a bias that replaces the layer's own.
        replaces: the layer's own bias is left out (config field `bias`); False where this one is added to it.
    """

    name: str
    file_name: str
    bias: Place
    scale: float
    replaces: bool


@dataclass(frozen=True)
class PlannedEmbedding:
    """LoRA of an embedding table: a token's row of the table gets `scale * b @ a[:, token]` added, and with it whatever
    the model's own embedding layer does to a row (Gemma multiplies it).

    Attributes:
        a: [R, V]. b: [H, R].
        also_head: the head shares the table and its LoRA, and the files hold no pair of its own for it: logits get
            `scale * a.T @ (b.T @ hidden)` added.
    """

    site: EmbeddingSite
    file_name: str
    a: Place
    b: Place
    rank: int
    scale: float
    also_head: bool = False


@dataclass(frozen=True)
class PlannedRows:
    """Rows of an embedding table or a head that the adapter replaces or adds.

    Attributes:
        name: the embedding's or the head's name in the model.
        token_ids: n tokens; those at or past the base's V are added ones.
        rows: [n, H], whole rows, not differences.
    """

    name: str
    file_name: str
    token_ids: tuple[int, ...]
    rows: Place


@dataclass(frozen=True)
class PlannedCopy:
    """A full tensor in the files that must equal the base model's own: compared when the numbers are read.

    Attributes:
        tensor_name: name of the running model's parameter.
        copy: the same shape; for embeddings and heads the rows that both have.
        remedy: what to do where they differ; ends the refusal's sentence.
    """

    tensor_name: str
    file_name: str
    copy: TensorPlace
    remedy: str


@dataclass(frozen=True)
class AdapterPlan:
    """A validated adapter whose numbers have not been read.

    Attributes:
        pairs: by layer name, sorted.
        biases, embeddings, rows: by layer name, sorted; empty unless the surface serves them.
        copies: what must be compared with the base model before anything is served.
        num_added_tokens: tokens past the base's table, at most `ModelSurface.extra_vocab_size`.
    """

    spec: AdapterSpec
    pairs: Mapping[str, PlannedPair]
    warnings: list[str]
    biases: Mapping[str, PlannedBias] = field(default_factory=dict)
    embeddings: Mapping[str, PlannedEmbedding] = field(default_factory=dict)
    rows: Mapping[str, PlannedRows] = field(default_factory=dict)
    copies: tuple[PlannedCopy, ...] = ()
    num_added_tokens: int = 0

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of everything that is kept for serving, in `dtype`."""
        count = sum(pair.rank * (pair.site.in_features + pair.site.out_features) for pair in self.pairs.values())
        count += sum(pair.site.out_features for pair in self.pairs.values() if pair.magnitude is not None)
        count += sum(bias.bias.shape[0] for bias in self.biases.values())
        count += sum(pair.rank * (pair.site.num_tokens + pair.site.width) for pair in self.embeddings.values())
        count += sum(rows.rows.shape[0] * rows.rows.shape[1] for rows in self.rows.values())
        return count * dtype.itemsize
