"""The writers of LoRA rows beside the linears' own: what adapters hold beyond LoRA pairs. And all writers as one.

Decides which buffers a server has, from the model's surface. Called by `engine/engine`; the pool of rows calls the
writers through `adapters.slots.SlotWriter`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from adapters.slots import SlotWriter
from engine.added_tokens import AddedTokens
from engine.lora_embedding import EmbeddingLora
from engine.lora_scale_shift import ScaleShiftWriter
from kernels import LoraMetadata

if TYPE_CHECKING:
    from adapters.generation import Generation
    from adapters.slots import RowCopy
    from adapters.surface import ModelSurface
    from engine.lora_layers import LoraBuffers
    from engine.model import BaseModel


class SizedWriter(SlotWriter, Protocol):
    """A writer that says how much memory it takes."""

    @property
    def num_bytes(self) -> int:
        """Memory of its buffers."""
        ...


class SlotWriters:
    """Writes a generation into the same row of every writer, in order."""

    def __init__(self, writers: Sequence[SlotWriter]) -> None:
        self._writers = tuple(writers)

    def write(self, lora_slot: int, generation: Generation) -> RowCopy | None:
        """Fill the row everywhere; the first writer may go on in the background, the others are done on return."""
        for writer in self._writers[1:]:
            copy = writer.write(lora_slot, generation)
            assert copy is None, "only the first writer copies in the background"
        return self._writers[0].write(lora_slot, generation)

    def clear(self, lora_slot: int) -> None:
        """Make the row add nothing anywhere."""
        for writer in self._writers:
            writer.clear(lora_slot)


def make_extra_writers(
    base: BaseModel,
    buffers: LoraBuffers,
    surface: ModelSurface,
    metadata: Mapping[str, LoraMetadata],
    *,
    num_slots: int,
    has_graphs: bool,
) -> list[SizedWriter]:
    """Buffers for what the surface serves beside pairs on linears; the model is told of those that it applies itself."""
    writers: list[SizedWriter] = []
    if surface.serves_dora or surface.serves_bias:
        writers.append(ScaleShiftWriter(buffers.groups, num_slots, is_reserved=has_graphs))
    embedding = base.decoder.get_input_embeddings()
    if surface.is_targeted(base.embedding_name):
        base.embedding_lora = EmbeddingLora(
            base.embedding_name, embedding, metadata["decoder"], num_slots=num_slots, max_rank=surface.max_lora_rank,
            dtype=surface.lora_dtype,
        )  # fmt: skip
        writers.append(base.embedding_lora)
    if surface.extra_vocab_size:
        base.added_tokens = AddedTokens(
            base.embedding_name, embedding, metadata, num_slots=num_slots, num_rows=surface.extra_vocab_size,
            dtype=surface.lora_dtype,
        )  # fmt: skip
        writers.append(base.added_tokens)
    return writers
