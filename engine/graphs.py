"""Steps as CUDA graphs: the launches of a whole forward pass recorded once, and replayed on each step's data.

Owns the recorded graphs. There are two kinds, each at a ladder of sizes: steps of decodes alone, by requests, and steps with
prompts or pieces of them, by tokens, since launching those kernel by kernel takes the host far longer than short prompts
take the device. Each is there in two families, with LoRA and without, so that a batch without adapters pays nothing for
them. A smaller step is padded to the next size; padding writes no keys and attends to none. Adapters may change between
replays, since only the contents of fixed buffers change. Called by `engine/runner`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from engine.attention import AttentionStep
from engine.batch import FLIGHT_ROWS, KV_INDEX, POSITIONS, TOKEN_IDS, Batch
from engine.flight import FlightTokens
from engine.model import BaseModel
from engine.scheduler import Plan
from engine.transfer import pinned
from kernels import AttentionBuffers, LoraMetadata, LoraSegment

logger = logging.getLogger(__name__)

_MIXED_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
"""Beyond these an H200 computes 8 billion parameters for as long as the host takes to launch each kernel."""


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Requests of recorded decode steps: powers of two to 8, then steps of 8 to 64 and of 16 above, up to `max_num_seqs`."""
    ladder = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    return sorted({size for size in ladder if size < max_num_seqs} | {max_num_seqs})


def mixed_sizes(max_tokens: int) -> list[int]:
    """Tokens of recorded steps with prompts, in a server whose steps have `max_tokens` at most."""
    return sorted({min(size, max_tokens) for size in _MIXED_SIZES})


class Recording:
    """Launches recorded once, with the memory that they use.

    Args:
        compute: launches, all on fixed buffers; called twice.
        pool: memory of an earlier recording that may be used again.

    Attributes:
        pool: memory that later recordings may use again.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], pool: Any = None) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # Once outside the graph: kernels are compiled and libraries set up.
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # What other threads do meanwhile is no part of the graph, and no fault of it.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = compute()
        self.pool: Any = self._graph.pool()

    def replay(self) -> torch.Tensor:
        """What `compute` returned, computed anew; overwritten by the next replay of any recording with this memory."""
        self._graph.replay()
        return self._output


class StepGraphs:
    """Recorded steps of one model.

    Args:
        model: the base model, with its attention bound to `attention_step`.
        attention_step: what the attention layers read.
        lora_metadata: what the LoRA-aware linears read, by part; empty when adapters are off.
        flight_tokens: what the latest step sampled.
        max_num_seqs: most requests in a step.
        max_num_tokens: most tokens in a step.
        max_blocks: most KV blocks of a request.
        block_size: tokens in a KV block.
    """

    @torch.inference_mode()  # Compiled code tells inference tensors from others: all inputs must be of one kind.
    def __init__(
        self,
        model: BaseModel,
        attention_step: AttentionStep,
        lora_metadata: Mapping[str, LoraMetadata],
        flight_tokens: FlightTokens,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks: int,
        block_size: int,
    ) -> None:
        self._model = model
        self._attention_step = attention_step
        self._lora_metadata = lora_metadata
        self._flight_tokens = flight_tokens
        self._decode_sizes = decode_sizes(max_num_seqs)
        self._mixed_sizes = mixed_sizes(max_num_tokens)
        # One row more than requests, for the padding of steps with prompts.
        self._buffers = AttentionBuffers(max_num_seqs + 1, max_blocks, block_size, model.device)
        self._num_rows = POSITIONS + model.num_position_rows
        most = max(max_num_seqs, self._mixed_sizes[-1])
        self._inputs = torch.zeros(self._num_rows * most, dtype=torch.int64, device=model.device)
        self._recordings: dict[tuple[bool, int, bool], Recording] = {}

    @torch.inference_mode()
    def record(self) -> None:
        """Record all graphs, the largest first, so that the smaller ones share its memory."""
        started = time.perf_counter()
        families = (False, True) if self._lora_metadata else (False,)
        pool: Any = None
        with _nothing_collected(), recording_lora(self._lora_metadata):
            for is_decode, sizes in ((False, self._mixed_sizes), (True, self._decode_sizes)):
                for size in reversed(sizes):
                    for has_lora in families:
                        self._prepare(size, is_decode=is_decode, has_lora=has_lora)
                        recording = Recording(functools.partial(self.launch, size, is_decode), pool)
                        pool = recording.pool
                        self._recordings[is_decode, size, has_lora] = recording
                    kind = "decodes" if is_decode else "tokens"
                    logger.info("event=graph_recorded %s=%d families=%d", kind, size, len(families))
        self._update_lora(("decoder", "head"), (), 0)
        logger.info("event=graphs_ready graphs=%d seconds=%.1f", len(self._recordings), time.perf_counter() - started)

    @property
    def max_mixed_tokens(self) -> int:
        """Of recorded steps with prompts."""
        return self._mixed_sizes[-1]

    def size_for(self, plan: Plan) -> int | None:
        """Tokens of the graph for a plan, padding included; None where it is too large, or touches media."""
        if any(item.state.request.spans and any(True for _ in item.media()) for item in plan.items):
            return None
        num_tokens = plan.num_tokens
        is_decode = num_tokens == len(plan.items) and all(item.is_sampled for item in plan.items)
        sizes = self._decode_sizes if is_decode else self._mixed_sizes
        return next((size for size in sizes if size >= num_tokens), None)

    def run(self, batch: Batch) -> torch.Tensor:
        """What a step gives that `size_for` has a size for, to which it is padded.

        Returns:
            [R, V] float32 logits of decodes; [T, H] hidden states of steps with prompts. The memory is the graph's own, and
            lasts until the next replay.
        """
        size, is_decode, device = batch.num_tokens, batch.is_decode, self._model.device
        inputs = self._inputs_of(size)
        inputs.copy_(pinned(batch.inputs, device), non_blocking=True)
        self._attention_step.kv_index = inputs[KV_INDEX]
        fill = self._buffers.fill if is_decode else self._buffers.fill_open
        self._attention_step.metadata = fill(batch.query_lens, batch.kv_lens, batch.block_table, size)
        has_lora = bool(batch.lora_segments)
        if has_lora:
            self._update_lora(("decoder", "head") if is_decode else ("decoder",), batch.lora_segments, size)
        output = self._recordings[is_decode, size, has_lora].replay()
        return output[: len(batch.logits_at)] if is_decode else output

    def launch(self, size: int, is_decode: bool) -> torch.Tensor:
        """What a replay computes from the buffers, launch by launch.

        Returns:
            [size, V] float32 logits of decodes; [size, H] hidden states of steps with prompts, whose rows to sample differ.
        """
        inputs = self._inputs_of(size)
        token_ids = self._flight_tokens.fill_in(inputs[TOKEN_IDS], inputs[FLIGHT_ROWS])
        hidden = self._model.decode(self._model.embed(token_ids), inputs[POSITIONS:])
        return self._model.logits(hidden) if is_decode else hidden

    def _inputs_of(self, size: int) -> torch.Tensor:
        """The rows of `Batch.inputs` for `size` tokens: the beginning of a buffer that all sizes share."""
        return self._inputs[: self._num_rows * size].view(self._num_rows, size)

    def _prepare(self, size: int, *, is_decode: bool, has_lora: bool) -> None:
        """Inputs for recording: padding alone, and one adapter segment where the family has LoRA."""
        nothing = torch.zeros(0, 1, dtype=torch.int64)
        inputs = self._inputs_of(size)
        inputs.zero_()
        inputs[KV_INDEX : FLIGHT_ROWS + 1] = -1
        fill = self._buffers.fill if is_decode else self._buffers.fill_open
        self._attention_step.metadata = fill([], [], nothing, size)
        self._attention_step.kv_index = inputs[KV_INDEX]
        parts = ("decoder", "head") if is_decode else ("decoder",)
        self._update_lora(parts, (LoraSegment(0, 0, 1),) if has_lora else (), size)

    def _update_lora(self, parts: tuple[str, ...], segments: tuple[LoraSegment, ...], num_tokens: int) -> None:
        for part in parts:
            if part in self._lora_metadata:
                self._lora_metadata[part].update(segments, num_tokens)


@contextlib.contextmanager
def recording_lora(lora_metadata: Mapping[str, LoraMetadata]) -> Iterator[None]:
    """LoRA is told that its launches are those of a graph."""
    with contextlib.ExitStack() as stack:
        for metadata in lora_metadata.values():
            stack.enter_context(metadata.recording())
        yield


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """What the garbage collector finds while a graph is recorded may belong to the device, and freeing it breaks the graph."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
