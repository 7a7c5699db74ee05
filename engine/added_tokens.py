"""Token rows of adapters: rows of the embedding and the head that an adapter adds past the vocabulary, or replaces.

Each LoRA row has room for the same number of token rows. A token of an adapter's request that has a row there gets it in
place of the base's embedding, and its logit from the adapter's row of the head. Tokens past the vocabulary that a
request's adapter does not have get a logit of minus infinity, so nobody can sample another's tokens. Called by
`engine/model`; all of it is tensor arithmetic on fixed buffers, so recorded decode steps follow the step's adapters.

N LoRA rows, X token rows of each, V vocabulary of the base, H width, T packed tokens, R rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.lora_embedding import embedding_scale
from engine.transfer import pinned, to_device
from kernels import LoraMetadata, LoraSegment

if TYPE_CHECKING:
    from adapters.extras import TokenRows
    from adapters.generation import Generation

HEAD_NAME = "lm_head"


class SlotMetadata(LoraMetadata):
    """Step metadata that also has the LoRA row of each token, at a fixed address.

    Attributes:
        token_slots: [max_tokens] int64, -1 for tokens of the base model and padding.
    """

    def __init__(self, max_tokens: int, max_segments: int, device: torch.device, **settings: Any) -> None:
        super().__init__(max_tokens, max_segments, device, **settings)
        self.token_slots = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)

    def update(self, segments: Sequence[LoraSegment], num_tokens: int) -> None:
        """As `LoraMetadata.update`; one more asynchronous copy."""
        super().update(segments, num_tokens)
        slots = torch.full((num_tokens,), -1, dtype=torch.int64)
        for lora_slot, token_start, token_end in segments:
            slots[token_start:token_end] = lora_slot
        self.token_slots[:num_tokens].copy_(pinned(slots, self.token_slots.device), non_blocking=True)


class AddedTokens:
    """Token rows of one model; implements `adapters.slots.SlotWriter`.

    Args:
        embedding_name: the embedding's module name.
        embedding: the base's table [V, H].
        metadata: `SlotMetadata` of the parts `decoder` and `head`.
        num_slots: N. num_rows: X. dtype: of the rows.
    """

    def __init__(
        self,
        embedding_name: str,
        embedding: nn.Embedding,
        metadata: Mapping[str, LoraMetadata],
        *,
        num_slots: int,
        num_rows: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_rows = num_rows
        self._name = embedding_name
        self._metadata = metadata
        self._vocab_size, width = embedding.weight.shape
        self._model_scale = embedding_scale(embedding)
        device = embedding.weight.device
        self._embedding_rows = torch.zeros(num_slots, num_rows, width, dtype=dtype, device=device)
        self._head_rows = torch.zeros(num_slots, num_rows, width, dtype=dtype, device=device)
        # One row more, which index -1 (the base model) reads: it has nothing.
        self._row_of = torch.full((num_slots + 1, self._vocab_size + num_rows), -1, dtype=torch.int32, device=device)
        # Unused rows of the head write to a column behind the last, which is cut off.
        self._nowhere = self._vocab_size + num_rows
        self._head_ids = torch.full((num_slots + 1, num_rows), self._nowhere, dtype=torch.int64, device=device)
        self._is_used = [False] * num_slots

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        buffers = (self._embedding_rows, self._head_rows, self._row_of, self._head_ids)
        return sum(buffer.nbytes for buffer in buffers)

    def replace_(self, embeddings: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Put adapters' rows in place of embeddings [T, H]; token_ids [T] int64, the prompt's own."""
        if not self._metadata["decoder"].segments:
            return
        slots = self._slots("decoder", token_ids.shape[0])
        row = self._row_of[slots, token_ids.clamp(max=self._row_of.shape[1] - 1)].long()
        own = self._embedding_rows[slots.clamp(min=0), row.clamp(min=0)]
        embeddings.copy_(torch.where((row >= 0)[:, None], own, embeddings))

    def extend(
        self, logits: torch.Tensor, hidden: torch.Tensor, finish: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Logits [R, V + X] float32 of a batch with adapters; [R, V] as they are where there are none.

        Args:
            logits: [R, V] float32, finished.
            hidden: [R, H].
            finish: what the architecture does to logits; for those of the adapters' rows.
        """
        if not self._metadata["head"].segments:
            return logits
        num_logits = logits.shape[0]
        slots = self._slots("head", num_logits)
        # All adapters' rows at once: a small product, whatever the mix.
        products = (hidden @ self._head_rows.flatten(0, 1).T).view(num_logits, *self._head_rows.shape[:2])
        own = products.gather(1, slots.clamp(min=0)[:, None, None].expand(-1, 1, self.num_rows))[:, 0]
        extended = logits.new_full((num_logits, self._nowhere + 1), -torch.inf)
        extended[:, : self._vocab_size] = logits
        extended.scatter_(1, self._head_ids[slots], finish(own).float())
        return extended[:, : self._nowhere]

    def write(self, lora_slot: int, generation: Generation) -> None:
        """Fill row `lora_slot` with the generation's token rows."""
        self.clear(lora_slot)
        rows = generation.extras.rows
        self._is_used[lora_slot] = bool(rows)
        embedding, head = rows.get(self._name), rows.get(HEAD_NAME)
        if embedding is not None:
            count, ids = self._ids(embedding)
            scaled = embedding.rows.float() * self._model_scale
            self._embedding_rows[lora_slot, :count] = to_device(scaled, self._embedding_rows.dtype, ids.device)
            self._row_of[lora_slot, ids] = torch.arange(count, dtype=torch.int32, device=ids.device)
        if head is not None:
            count, ids = self._ids(head)
            self._head_rows[lora_slot, :count] = to_device(head.rows, self._head_rows.dtype, ids.device)
            self._head_ids[lora_slot, :count] = ids

    def clear(self, lora_slot: int) -> None:
        """Row `lora_slot` has no tokens of its own any more."""
        if self._is_used[lora_slot]:
            self._is_used[lora_slot] = False
            self._row_of[lora_slot] = -1
            self._head_ids[lora_slot] = self._nowhere

    def _ids(self, rows: TokenRows) -> tuple[int, torch.Tensor]:
        assert len(rows.token_ids) <= self.num_rows, "an adapter with more tokens than there is room for was let in"
        return len(rows.token_ids), to_device(rows.token_ids, torch.int64, self._row_of.device)

    def _slots(self, part: str, num_tokens: int) -> torch.Tensor:
        metadata = self._metadata[part]
        assert isinstance(metadata, SlotMetadata), "token rows need each token's LoRA row"
        return metadata.token_slots[:num_tokens]
