"""Executes a plan: batch, media features, decoder, head, sampler. Everything that touches the model is here.

Owns the step objects that the layers read and the encoder cache. Called by `engine/loop` on the engine thread.
"""

from __future__ import annotations

import torch

from engine.attention import AttentionStep
from engine.batch import Batch, build_batch
from engine.encoder_cache import EncoderCache
from engine.graphs import DecodeGraphs
from engine.model import BaseModel
from engine.request import TokenLogprob
from engine.sampler import Sampler
from engine.scheduler import Plan, PlanItem
from engine.state import MediaSpan, RequestState
from kernels import LoraMetadata, LoraSegment


class Runner:
    """Runs steps on one model.

    Args:
        model: the base model.
        attention_step: what the attention layers read.
        lora_metadata: what the LoRA-aware linears read, by part of the model; empty when adapters are off.
        encoder_cache: computed media features.
        sampler: chooses tokens.
        graphs: recorded decode steps; None runs every step launch by launch.
        block_size: tokens in a KV block.
    """

    def __init__(
        self,
        model: BaseModel,
        attention_step: AttentionStep,
        lora_metadata: dict[str, LoraMetadata],
        encoder_cache: EncoderCache,
        sampler: Sampler,
        block_size: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._attention_step = attention_step
        self._lora_metadata = lora_metadata
        self._encoder_cache = encoder_cache
        self._sampler = sampler
        self._block_size = block_size
        self._graphs = graphs

    @torch.inference_mode()
    def encode_media(self, item: PlanItem) -> None:
        """Have the features of the media that the item's chunk touches; the request keeps them."""
        for span in item.state.request.spans:
            if max(span.start, item.start) < min(span.end, item.end):
                self._features(item.state, span)

    @torch.inference_mode()
    def execute(self, plan: Plan) -> list[tuple[PlanItem, int, TokenLogprob | None]]:
        """Compute the plan; returns each sampled item's next token (-1 where its logits are not numbers)."""
        batch = build_batch(plan, self._block_size, self._model.device)
        if self._graphs is not None and self._graphs.can_run(batch):
            logits = self._graphs.run(batch)
        else:
            logits = self._forward(plan, batch)
        rows = [item.state.sampler_row for item in batch.sampled]
        token_ids, logprobs = self._sampler.sample(logits, rows)
        return list(zip(batch.sampled, token_ids, logprobs, strict=True))

    def _forward(self, plan: Plan, batch: Batch) -> torch.Tensor:
        """[R, V] float32 logits of the rows to sample, launch by launch."""
        embeddings = self._embed(plan, batch)
        self._attention_step.metadata = batch.attention
        self._attention_step.kv_index = batch.kv_index
        self._set_segments("decoder", batch.lora_segments, batch.token_ids.shape[0])
        hidden = self._model.decode(embeddings, batch.positions)
        self._set_segments("head", batch.head_segments, batch.logits_at.shape[0])
        return self._model.logits(hidden[batch.logits_at])

    def _embed(self, plan: Plan, batch: Batch) -> torch.Tensor:
        """[T, H]: token embeddings, with media features in place of their placeholders."""
        embeddings = self._model.embed(batch.token_ids)
        chunk_start = 0
        for item in plan.items:
            for span in item.state.request.spans:
                start, end = max(span.start, item.start), min(span.end, item.end)
                if start < end:
                    features = self._features(item.state, span)[start - span.start : end - span.start]
                    offset = chunk_start - item.start
                    embeddings[start + offset : end + offset] = features.to(embeddings.dtype)
            chunk_start += item.end - item.start
        return embeddings

    def _features(self, state: RequestState, span: MediaSpan) -> torch.Tensor:
        """[n, H] of a media item: computed once, cached, and kept by the request until it ends."""
        media = span.media
        features = state.media_features.get(media.digest)
        if features is None:
            key = (media.digest, _tower_digest(state))
            features = self._encoder_cache.get(key)
            if features is None:
                self._set_uniform_segment(state.lora_slot)
                features = self._model.encode_audio(media.features)
                assert features.shape[0] == media.num_tokens, "placeholders and features differ in number"
                self._encoder_cache.put(key, features)
            state.media_features[media.digest] = features
        return features

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
