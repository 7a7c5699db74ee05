"""What rank 0 tells its workers, in the order in which they must do it, and what they answer at start.

One-way but for the start: what a step computes goes through the process group, not through here. Messages are pickled between
processes of one program on one host; an adapter's numbers travel as an open file (`SharedSlab`), which is mapped, not copied.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection

import numpy as np
import torch

from engine.batch import Batch, PromptSlice
from engine.config import EngineConfig
from engine.parallel.shards import PackedPair
from kernels import LoraSegment


@dataclass(frozen=True)
class Setup:
    """The first message: what to load, and as which rank of how many. `store` is the file where ranks meet."""

    config: EngineConfig
    rank: int
    size: int
    store: str


@dataclass(frozen=True)
class Started:
    """A worker's first answer: it has read the model's config and has its device, and joins the group now."""


@dataclass(frozen=True)
class Loaded:
    """A worker's second answer: it has its share of the model, and so many bytes left for the KV cache."""

    kv_bytes: int


@dataclass(frozen=True)
class Layout:
    """What all ranks must have alike, settled by rank 0."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int


@dataclass(frozen=True)
class Ready:
    """A worker's last answer: everything is compiled and recorded."""


@dataclass(frozen=True)
class Failed:
    """A worker cannot go on; it ends after this."""

    reason: str


@dataclass(frozen=True)
class Step:
    """A step's batch as arrays, which are pickled faster than tensors; `is_recorded` replays a graph."""

    inputs: np.ndarray
    query_lens: list[int]
    kv_lens: list[int]
    block_table: np.ndarray
    lora_segments: tuple[LoraSegment, ...]
    logits_at: np.ndarray
    head_segments: tuple[LoraSegment, ...]
    prompt_slices: tuple[PromptSlice, ...]
    is_recorded: bool

    @classmethod
    def of(cls, batch: Batch, *, is_recorded: bool) -> Step:
        """The message for a batch of text."""
        assert batch.mutual_spans is None, "models with media are not split"
        return cls(
            batch.inputs.numpy(), batch.query_lens, batch.kv_lens, batch.block_table.numpy(), batch.lora_segments,
            batch.logits_at.numpy(), batch.head_segments, batch.prompt_slices, is_recorded,
        )  # fmt: skip

    def batch(self) -> Batch:
        """The batch again, without the requests behind it."""
        return Batch(
            inputs=torch.from_numpy(self.inputs), query_lens=self.query_lens, kv_lens=self.kv_lens,
            block_table=torch.from_numpy(self.block_table), lora_segments=self.lora_segments,
            logits_at=torch.from_numpy(self.logits_at), head_segments=self.head_segments, sampled=(),
            prompt_slices=self.prompt_slices,
        )  # fmt: skip


@dataclass(frozen=True)
class WriteRow:
    """Fill a LoRA row; the slab's file follows this message, unless there are no pairs."""

    lora_slot: int
    packed: list[PackedPair]
    num_elements: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ClearRow:
    """Make a LoRA row add nothing."""

    lora_slot: int


@dataclass(frozen=True)
class ClearBlocks:
    """Zero KV blocks."""

    blocks: list[int]


@dataclass(frozen=True)
class Stop:
    """End."""


Message = Setup | Started | Loaded | Layout | Ready | Failed | Step | WriteRow | ClearRow | ClearBlocks | Stop


def send(connection: Connection, message: Message) -> None:
    """Send a message. Raises OSError where nobody reads any more."""
    # Not `Connection.send`: torch would move each tensor and array to shared memory first.
    connection.send_bytes(pickle.dumps(message, protocol=5))


def receive(connection: Connection) -> Message:
    """Wait for a message. Raises EOFError where the other side has gone."""
    message: Message = pickle.loads(connection.recv_bytes())
    return message


class SharedSlab:
    """Memory that another process can map: an unnamed file in memory, or on disk where the system has no such thing.

    Attributes:
        tensor: [num_elements]; keeps the mapping alive.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, descriptor: int | None = None) -> None:
        num_bytes = num_elements * dtype.itemsize
        self._descriptor = _new_file(num_bytes) if descriptor is None else descriptor
        memory = np.frombuffer(mmap.mmap(self._descriptor, num_bytes), np.uint8)
        self.tensor = torch.from_numpy(memory).view(dtype)

    def send(self, connection: Connection, pid: int) -> None:
        """Hand the file to a process; it follows the latest message."""
        reduction.send_handle(connection, self._descriptor, pid)

    @classmethod
    def receive(cls, connection: Connection, num_elements: int, dtype: torch.dtype) -> SharedSlab:
        """Map the file that the other side sends."""
        slab = cls(num_elements, dtype, reduction.recv_handle(connection))
        slab.close()
        return slab

    def close(self) -> None:
        """Give the file up; what is mapped stays."""
        os.close(self._descriptor)


def _new_file(num_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("adapter")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
