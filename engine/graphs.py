"""Decode steps as CUDA graphs: the launches of a whole forward pass recorded once, and replayed on each step's data.

Owns the recorded graphs, at a ladder of batch sizes and in two families: with LoRA, and without, so that a batch without
adapters pays nothing for them. A step of fewer requests is padded to the next size; padding writes no keys and attends to
none. Adapters may change between replays, since only the contents of fixed buffers change. Called by `engine/runner`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import torch

from engine.attention import AttentionStep
from engine.batch import FLIGHT_ROWS, KV_INDEX, POSITIONS, TOKEN_IDS, Batch
from engine.flight import FlightTokens
from engine.model import BaseModel
from engine.scheduler import Plan
from engine.transfer import pinned
from kernels import AttentionBuffers, LoraMetadata, LoraSegment

logger = logging.getLogger(__name__)


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The ladder: powers of two to 8, then steps of 8 to 64 and of 16 above, up to `max_num_seqs`."""
    ladder = [1, 2, 4, *range(8, 65, 8), *range(80, max_num_seqs + 1, 16)]
    return sorted({size for size in ladder if size < max_num_seqs} | {max_num_seqs})


class DecodeGraphs:
    """Recorded decode steps of one model.

    Args:
        model: the base model, with its attention bound to `attention_step`.
        attention_step: what the attention layers read.
        lora_metadata: what the LoRA-aware linears read, by part; empty when adapters are off.
        flight_tokens: what the latest step sampled.
        max_num_seqs: most requests in a step.
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
        max_blocks: int,
        block_size: int,
    ) -> None:
        self._model = model
        self._attention_step = attention_step
        self._lora_metadata = lora_metadata
        self._flight_tokens = flight_tokens
        self._sizes = batch_sizes(max_num_seqs)
        self._buffers = AttentionBuffers(max_num_seqs, max_blocks, block_size, model.device)
        self._num_rows = POSITIONS + model.num_position_rows
        self._inputs = torch.zeros(self._num_rows * max_num_seqs, dtype=torch.int64, device=model.device)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @torch.inference_mode()
    def record(self) -> None:
        """Record all graphs, the largest first, so that the smaller ones share its memory."""
        started = time.perf_counter()
        pool = None
        families = (False, True) if self._lora_metadata else (False,)
        for size in reversed(self._sizes):
            for has_lora in families:
                self._prepare(size, has_lora)
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):  # Once outside the graph: kernels are compiled and libraries set up.
                    self._forward(size)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    logits = self._forward(size)
                pool = graph.pool()
                self._graphs[size, has_lora] = (graph, logits)
            logger.info("event=graph_recorded batch=%d families=%d", size, len(families))
        self._update_lora((), 0)
        logger.info("event=graphs_ready graphs=%d seconds=%.1f", len(self._graphs), time.perf_counter() - started)

    def size_for(self, plan: Plan) -> int | None:
        """Tokens of the graph for a plan, padding included; None where it is not decodes alone, or has media."""
        num_tokens = len(plan.items)
        if num_tokens > self._sizes[-1] or plan.num_tokens != num_tokens:
            return None
        for item in plan.items:
            if not item.is_sampled or (item.state.request.spans and item.start < item.state.prompt_len):
                return None
        return next(size for size in self._sizes if size >= num_tokens)

    def run(self, batch: Batch) -> torch.Tensor:
        """[B, V] float32 logits of a decode step; the memory is the graph's own and lasts until the next replay."""
        size = batch.num_tokens
        self._inputs_of(size).copy_(pinned(batch.inputs, self._model.device), non_blocking=True)
        self._buffers.fill(batch.query_lens, batch.kv_lens, batch.block_table, size)
        has_lora = bool(batch.lora_segments)
        if has_lora:
            self._update_lora(batch.lora_segments, size)
        graph, logits = self._graphs[size, has_lora]
        graph.replay()
        return logits[: len(batch.logits_at)]

    def _inputs_of(self, size: int) -> torch.Tensor:
        """The rows of `Batch.inputs` for `size` tokens: the beginning of a buffer that all sizes share."""
        return self._inputs[: self._num_rows * size].view(self._num_rows, size)

    def _prepare(self, size: int, has_lora: bool) -> None:
        """Inputs for recording: padding alone, and one adapter segment where the family has LoRA."""
        nothing = torch.zeros(0, 1, dtype=torch.int64)
        inputs = self._inputs_of(size)
        inputs.zero_()
        inputs[KV_INDEX : FLIGHT_ROWS + 1] = -1
        self._attention_step.metadata = self._buffers.fill([], [], nothing, size)
        self._attention_step.kv_index = inputs[KV_INDEX]
        self._update_lora((LoraSegment(0, 0, 1),) if has_lora else (), size)

    def _update_lora(self, segments: tuple[LoraSegment, ...], num_tokens: int) -> None:
        for part in ("decoder", "head"):
            if part in self._lora_metadata:
                self._lora_metadata[part].update(segments, num_tokens)

    def _forward(self, size: int) -> torch.Tensor:
        inputs = self._inputs_of(size)
        token_ids = self._flight_tokens.fill_in(inputs[TOKEN_IDS], inputs[FLIGHT_ROWS])
        return self._model.logits(self._model.decode(self._model.embed(token_ids), inputs[POSITIONS:]))
