"""LoRA of the decoder's embedding table: buffers, and the add after the base lookup.

One row of the buffers an adapter, as in `engine/lora_layers`. A is kept token by token, so that a token's numbers are
gathered at once. The model's own scale of embeddings (Gemma multiplies rows) is folded into B here, since it belongs to
the model and not to the adapter. Called by `engine/model` right after its lookup; decode steps in CUDA graphs read their
token ids from fixed buffers and the step's adapters from the metadata.

N LoRA rows, V tokens of the table, H its width, R rank of the buffers, T packed tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from kernels import LoraMetadata, lora_embedding_add_

if TYPE_CHECKING:
    from adapters.generation import Generation


class EmbeddingLora:
    """LoRA of one embedding; implements `adapters.slots.SlotWriter`.

    Args:
        name: the embedding's module name.
        embedding: the base's table [V, H].
        metadata: which packed tokens use which row.
        num_slots: N. max_rank: R. dtype: of the buffers.
    """

    def __init__(
        self,
        name: str,
        embedding: nn.Embedding,
        metadata: LoraMetadata,
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        num_tokens, width = embedding.weight.shape
        device = embedding.weight.device
        self._name = name
        self._metadata = metadata
        self._model_scale = embedding_scale(embedding)
        self._lora_a = torch.zeros(num_slots, num_tokens, max_rank, dtype=dtype, device=device)
        self._lora_b = torch.zeros(num_slots, width, max_rank, dtype=dtype, device=device)
        self._host_ranks = [0] * num_slots
        self._ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return self._lora_a.nbytes + self._lora_b.nbytes

    def add_(self, embeddings: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Add each token's own adapter to the base embeddings [T, H], in place; token_ids [T] int64 below V."""
        if self._metadata.segments:
            lora_embedding_add_(
                embeddings, token_ids, self._lora_a, self._lora_b, self._ranks, self._host_ranks, self._metadata
            )

    def write(self, lora_slot: int, generation: Generation) -> None:
        """Fill row `lora_slot`; rank 0 where the generation does not touch the embedding."""
        pair = generation.extras.embeddings.get(self._name)
        if pair is not None:
            self._lora_a[lora_slot, :, : pair.rank] = pair.a
            self._lora_b[lora_slot, :, : pair.rank] = pair.b.float() * self._model_scale
        self._set_rank(lora_slot, 0 if pair is None else pair.rank)

    def clear(self, lora_slot: int) -> None:
        """Row `lora_slot` adds nothing any more."""
        self._set_rank(lora_slot, 0)

    def _set_rank(self, lora_slot: int, rank: int) -> None:
        if self._host_ranks[lora_slot] != rank:
            self._host_ranks[lora_slot] = rank
            self._ranks[lora_slot] = rank


def embedding_scale(embedding: nn.Module) -> float:
    """What the embedding's own `forward` multiplies rows with: Gemma's square root of the width, else 1."""
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return 1.0
    return float(torch.as_tensor(scale).to(embedding.weight.dtype))  # type: ignore[arg-type]
