"""Executes a plan: batch, media features, decoder, head, sampler. Everything that touches the model is here.

Owns the step objects that the layers read and the encoder cache. Called by `engine/loop` on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention import AttentionStep
from engine.batch import FLIGHT_ROWS, KV_INDEX, POSITIONS, TOKEN_IDS, Batch, PromptSlice, build_batch
from engine.encoder_cache import EncoderCache
from engine.flight import FlightTokens
from engine.graphs import StepGraphs
from engine.logprobs import PackedPart, PromptLogprobs, pack_logprobs
from engine.model import BaseModel
from engine.request import TokenLogprob
from engine.sampler import Choice, Sampler
from engine.scheduler import Plan, PlanItem
from engine.state import MediaInput, RequestState
from engine.transfer import to_device
from kernels import NULL_BLOCK, AttentionMetadata, LoraMetadata, LoraSegment

_MAX_ENCODED = 8
"""Media items that a tower takes in one call; bounds its memory."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step that the device may still be computing: the items that it samples, and what it chose for each."""

    sampled: tuple[PlanItem, ...]
    choice: Choice
    prompt_logprobs: PromptLogprobs | None

    def read(self) -> list[tuple[PlanItem, int, TokenLogprob | None]]:
        """Each sampled item's next token (-1 where its logits are not numbers); waits until the device has them."""
        token_ids, logprobs = self.choice.read()
        return list(zip(self.sampled, token_ids, logprobs, strict=True))

    def read_prompts(self) -> list[tuple[RequestState, PackedPart]]:
        """Log probabilities of the prompt tokens that the step has scored, in order; there once `read` has returned."""
        return [] if self.prompt_logprobs is None else list(self.prompt_logprobs.read())


@dataclass(frozen=True)
class _Encoding:
    """A media item whose features must be computed: the adapter that changes them, if any, and who waits for them."""

    media: MediaInput
    tower_digest: str | None
    lora_slot: int
    states: list[RequestState]


class Runner:
    """Runs steps on one model.

    Args:
        model: the base model.
        attention_step: what the attention layers read.
        lora_metadata: what the LoRA-aware linears read, by part of the model; empty when adapters are off.
        encoder_cache: computed media features.
        sampler: chooses tokens.
        block_size: tokens in a KV block.
        flight_tokens: what the latest step sampled.
        graphs: recorded steps; None runs every step launch by launch.
    """

    def __init__(
        self,
        model: BaseModel,
        attention_step: AttentionStep,
        lora_metadata: dict[str, LoraMetadata],
        encoder_cache: EncoderCache,
        sampler: Sampler,
        block_size: int,
        flight_tokens: FlightTokens,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._model = model
        self._attention_step = attention_step
        self._lora_metadata = lora_metadata
        self._encoder_cache = encoder_cache
        self._sampler = sampler
        self._block_size = block_size
        self._flight_tokens = flight_tokens
        self._graphs = graphs

    @torch.inference_mode()
    def encode_media(self, items: Sequence[PlanItem]) -> None:
        """Have the features of the media that the items' chunks touch; the requests keep them until they end.

        Media of equal shape and adapter are computed in one call, whoever sent them.
        """
        batches: dict[tuple[object, ...], dict[str, _Encoding]] = {}
        for item in items:
            for span, _, _ in item.media():
                self._find_features(item.state, span.media, batches)
        for batch in batches.values():
            waiting = list(batch.values())
            for start in range(0, len(waiting), _MAX_ENCODED):
                self._encode(waiting[start : start + _MAX_ENCODED])

    def is_recorded(self, plan: Plan) -> bool:
        """Whether the plan is launched as one graph, in no time; kernel by kernel, and media, take tens of milliseconds."""
        return self._graphs is not None and self._graphs.size_for(plan) is not None

    @torch.inference_mode()
    def launch(self, plan: Plan) -> LaunchedStep:
        """Start computing the plan; on a GPU this returns long before the device is done.

        Where it raises, it may be called again for these items: nothing has changed but keys and values of their chunks.
        """
        graphs = self._graphs
        graph_size = None if graphs is None else graphs.size_for(plan)
        batch = build_batch(plan, self._block_size, graph_size, num_position_rows=self._model.num_position_rows)
        logits, packed = self._compute(plan, batch, is_recorded=graph_size is not None)
        # Before the choice, whose arrival on the host is waited for.
        prompt_logprobs = PromptLogprobs(packed, batch.prompt_parts) if batch.prompt_parts else None
        choice = self._sampler.choose(logits, [item.state.sampler_row for item in batch.sampled])
        self._flight_tokens.keep(choice.token_ids)
        # Last, so that a step that fails and is computed again shows its logits once.
        for row, item in enumerate(batch.sampled):
            if item.state.request.on_logits is not None:
                item.state.request.on_logits(logits[row])
        return LaunchedStep(batch.sampled, choice, prompt_logprobs)

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, *, num_cached: int = 0, has_lora: bool = False) -> None:
        """Compute a prompt of padding that belongs to no request and writes no keys.

        Args:
            num_tokens: of the step.
            num_cached: tokens before them, as if their keys were cached.
            has_lora: as if all tokens used the first LoRA row.
        """
        device, num_keys = self._model.device, num_cached + num_tokens
        token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        table = torch.full((1, -(-num_keys // self._block_size)), NULL_BLOCK, dtype=torch.int32)
        self._attention_step.metadata = AttentionMetadata([num_tokens], [num_keys], table, self._block_size).on(device)
        self._attention_step.kv_index = torch.full_like(token_ids, -1)
        self._set_segments("decoder", (LoraSegment(0, 0, num_tokens),) if has_lora else (), num_tokens)
        self._model.decode(self._model.embed(token_ids), token_ids.repeat(self._model.num_position_rows, 1))

    @torch.inference_mode()
    def warm_up_head(self, num_rows: int, *, has_lora: bool = False) -> None:
        """Compute logits of that many rows that belong to no request, with `has_lora` as if all used the first LoRA row."""
        self._set_segments("head", (LoraSegment(0, 0, num_rows),) if has_lora else (), num_rows)
        model = self._model
        model.logits(torch.zeros(num_rows, model.text_config.hidden_size, dtype=model.dtype, device=model.device))

    def _compute(self, plan: Plan, batch: Batch, *, is_recorded: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[R, V] float32 logits of the rows to sample; and what `pack_logprobs` makes of the prompt tokens to be scored."""
        if not is_recorded:
            hidden = self._forward(plan, batch)
        else:
            assert self._graphs is not None, "nothing was recorded"
            output = self._graphs.run(batch)
            if batch.is_decode:
                assert not batch.prompt_slices, "the last token of a prompt scores none of its own"
                return output, None
            hidden = output
        packed = self._score(hidden, batch.prompt_slices)
        return self._logits(hidden, batch.logits_at, batch.head_segments), packed

    def _score(self, hidden: torch.Tensor, slices: Sequence[PromptSlice]) -> torch.Tensor | None:
        """What `pack_logprobs` makes of all slices; None where there are none. `hidden` is the step's, [T, H]."""
        packed = [
            pack_logprobs(
                self._slice_logits(hidden, each),
                to_device(torch.from_numpy(each.token_ids), torch.int64, hidden.device), each.num_top,
            )
            for each in slices
        ]  # fmt: skip
        return torch.cat(packed) if packed else None

    def _slice_logits(self, hidden: torch.Tensor, part: PromptSlice) -> torch.Tensor:
        """[S, V] float32 logits of a slice's prompt tokens."""
        return self._logits(hidden, torch.from_numpy(part.rows), part.head_segments)

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor, segments: tuple[LoraSegment, ...]) -> torch.Tensor:
        """[R, V] float32 logits of R rows, on the host, of the hidden states [T, H]; `segments` are the rows' adapters."""
        self._set_segments("head", segments, len(rows))
        return self._model.logits(hidden[to_device(rows, torch.int64, hidden.device)])

    def _forward(self, plan: Plan, batch: Batch) -> torch.Tensor:
        """[T, H] hidden states, launch by launch."""
        device = self._model.device
        inputs = to_device(batch.inputs, torch.int64, device)
        token_ids = self._flight_tokens.fill_in(inputs[TOKEN_IDS], inputs[FLIGHT_ROWS])
        self._set_segments("decoder", batch.lora_segments, batch.num_tokens)
        embeddings = self._embed(plan, token_ids)
        self._attention_step.metadata = AttentionMetadata(
            batch.query_lens, batch.kv_lens, to_device(batch.block_table, torch.int32, device), self._block_size,
            mutual_spans=None if batch.mutual_spans is None else to_device(batch.mutual_spans, torch.int32, device),
        )  # fmt: skip
        self._attention_step.kv_index = inputs[KV_INDEX]
        return self._model.decode(embeddings, inputs[POSITIONS:])

    def _embed(self, plan: Plan, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, H]: token embeddings, with media features in place of their placeholders."""
        embeddings = self._model.embed(token_ids)
        chunk_start = 0
        for item in plan.items:
            for span, start, end in item.media():
                features = item.state.media_features[span.media.digest][start - span.start : end - span.start]
                offset = chunk_start - item.start
                embeddings[start + offset : end + offset] = features.to(embeddings.dtype)
            chunk_start += item.end - item.start
        return embeddings

    def _find_features(
        self, state: RequestState, media: MediaInput, batches: dict[tuple[object, ...], dict[str, _Encoding]]
    ) -> None:
        """Give the request what is known of a media item's features, or note in `batches` what must be computed."""
        if media.digest in state.media_features:
            return
        tower_digest = _tower_digest(state)
        lora_slot = -1 if tower_digest is None else state.lora_slot
        batch = batches.setdefault((lora_slot, media.batch_key), {})
        if media.digest in batch:
            batch[media.digest].states.append(state)
            return
        features = self._encoder_cache.get((media.digest, tower_digest))
        if features is None:
            batch[media.digest] = _Encoding(media, tower_digest, lora_slot, [state])
        else:
            state.media_features[media.digest] = features

    def _encode(self, batch: Sequence[_Encoding]) -> None:
        """Compute the features of items of equal shape under one adapter."""
        first = batch[0]
        self._set_uniform_segment(first.lora_slot)
        outputs = self._model.encode(first.media.modality, [encoding.media.features for encoding in batch])
        for encoding, features in zip(batch, outputs, strict=True):
            media = encoding.media
            assert features.shape[0] == media.num_tokens, "placeholders and features differ in number"
            # A copy, as a view would keep the features of the whole batch.
            features = features.clone() if len(batch) > 1 else features
            self._encoder_cache.put((media.digest, encoding.tower_digest), features)
            for state in encoding.states:
                state.media_features[media.digest] = features

    def _set_uniform_segment(self, lora_slot: int) -> None:
        segments = () if lora_slot < 0 else (LoraSegment(lora_slot, 0, None),)
        for part in ("tower", "connector"):
            self._set_segments(part, segments, 0)

    def _set_segments(self, part: str, segments: tuple[LoraSegment, ...], num_tokens: int) -> None:
        if self._lora_metadata:
            self._lora_metadata[part].update(segments, num_tokens)


def _tower_digest(state: RequestState) -> str | None:
    """The adapter's digest when it changes the tower or connector, so that its features are its own."""
    handle = state.request.handle
    return handle.generation.digest if handle is not None and handle.generation.touches_tower else None
