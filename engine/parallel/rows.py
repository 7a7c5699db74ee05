"""What changes on all ranks between steps: LoRA rows and cleared KV blocks, in the order in which rank 0 decides them.

A worker hears of a row before it hears of a step that reads it, and of a cleared block before that is handed out again.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.config import EngineConfig
from engine.errors import WorkerLost
from engine.kv_cache import KVCache
from engine.lora_layers import LoraBuffers
from engine.parallel.messages import ClearBlocks, ClearRow, SharedSlab, WriteRow
from engine.parallel.shards import Share, lay_out, pack, unpack
from engine.parallel.split import Split
from engine.parallel.team import Team

if TYPE_CHECKING:
    from adapters.generation import Generation
    from adapters.slots import RowCopy


class RowMirror:
    """Writes adapters into the rows of all ranks, in order, on a thread of its own; implements `adapters.slots.SlotWriter`.

    Args:
        config: the settings.
        team: the workers.
        buffers: this rank's rows.
        split: how the model is cut.
    """

    def __init__(self, config: EngineConfig, team: Team, buffers: LoraBuffers, split: Split) -> None:
        self._team = team
        self._buffers = buffers
        self._shards = split.shards
        rank = config.max_lora_rank if config.fully_sharded_loras else None
        self._shares = [Share(number, split.group.size, rank) for number in range(split.group.size)]
        self._in_order = ThreadPoolExecutor(1, thread_name_prefix="lora-ranks")

    def write(self, lora_slot: int, generation: Generation) -> MirroredCopy:
        """Begin to fill the row everywhere."""
        return MirroredCopy(self._in_order.submit(self._write, lora_slot, generation))

    def clear(self, lora_slot: int) -> None:
        """Make the row add nothing anywhere."""
        self._in_order.submit(self._clear, lora_slot)

    def _write(self, lora_slot: int, generation: Generation) -> RowCopy | None:
        pairs = generation.pairs
        dtype = next((pair.a.dtype for pair in pairs.values()), torch.float32)

        def message_of(rank: int) -> tuple[WriteRow, SharedSlab | None]:
            share = self._shares[rank]
            _, length = lay_out(pairs, self._shards, share)
            if not length:
                return WriteRow(lora_slot, [], 0, dtype), None
            slab = SharedSlab(length, dtype)
            return WriteRow(lora_slot, pack(pairs, self._shards, share, slab.tensor), length, dtype), slab

        self._team.send_row(message_of)
        _, length = lay_out(pairs, self._shards, self._shares[0])
        own = torch.from_numpy(np.empty(length * dtype.itemsize, np.uint8)).view(dtype)
        return self._buffers.write(lora_slot, unpack(pack(pairs, self._shards, self._shares[0], own), own))

    def _clear(self, lora_slot: int) -> None:
        self._buffers.clear(lora_slot)
        with contextlib.suppress(WorkerLost):
            self._team.send(ClearRow(lora_slot))


class MirroredCopy:
    """A row that is being filled on all ranks; see `adapters.slots.RowCopy`.

    Workers get the row before they get a step that reads it, and see to the rest themselves.
    """

    def __init__(self, sent: Future[RowCopy | None]) -> None:
        self._sent = sent

    def is_ready(self) -> bool:
        """Whether it was sent, and this rank's row can be read."""
        if not self._sent.done():
            return False
        own = self._sent.result()
        return own is None or own.is_ready()

    def has_failed(self) -> bool:
        """Whether it has ended in a fault."""
        if not self._sent.done():
            return False
        if self._sent.exception() is not None:
            return True
        own = self._sent.result()
        return own is not None and own.has_failed()

    def wait(self) -> None:
        """Return once steps that start from now on find the row filled."""
        own = self._sent.result()
        if own is not None:
            own.wait()


class BlockMirror:
    """Zeroes KV blocks on all ranks."""

    def __init__(self, team: Team, cache: KVCache) -> None:
        self._team = team
        self._cache = cache

    def clear(self, blocks: list[int]) -> None:
        """As `KVCache.clear`; nothing where a worker has gone, since no step will read them."""
        if self._team.is_whole:
            self._team.send(ClearBlocks(blocks))
            self._cache.clear(blocks)
