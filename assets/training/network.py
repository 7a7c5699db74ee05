"""The demo model in training: its losses over text, over clips, over conversations that hold clips, and its greedy answers.

Owns the model, what only training needs of it, and the arithmetic of a step; knows nothing of phases, files or time.
Letters: `C` clips, `F` encoder frames, `R` rows, `L` tokens of a row, `n` projected vectors a clip.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import data
from .ctc import ctc_loss
from .graphs import Inputs
from .model import ENCODER_HIDDEN, HIDDEN, build_model
from .tokenizer import AUDIO_ID, EOS_ID, VOCAB_SIZE


class Heads(nn.Module):
    """What only training needs: the encoder's and the projector's readings as the language model's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(ENCODER_HIDDEN, HIDDEN)
        self.encoder_gain = nn.Parameter(torch.ones(HIDDEN))
        self.projector_gain = nn.Parameter(torch.ones(HIDDEN))

    @staticmethod
    def token_log_probs(x: Tensor, gain: Tensor, embedding: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, V] float32, against the frozen embedding."""
        x = F.rms_norm(x.float(), (x.shape[-1],)) * gain
        return F.linear(x.to(torch.bfloat16), embedding.to(torch.bfloat16)).float().log_softmax(-1)


class Network:
    """The model with its training heads on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.model = build_model().to(device)
        self.language_model = self.model.model.language_model
        self.encoder, self.projector = self.model.model.encoder, self.model.model.projector
        self.heads = Heads().to(device)
        self._attention_dists = self.encoder.attention_dists

    def language_state(self) -> dict[str, Tensor]:
        """The language model's tensors by the whole model's names; without adapters."""
        return {k: v for k, v in self.model.state_dict().items() if ".language_model." in k}

    def hearing_state(self) -> dict[str, Tensor]:
        """All other tensors but the head, which is the embedding."""
        state = self.model.state_dict()
        return {k: v for k, v in state.items() if ".language_model." not in k and k != "lm_head.weight"}

    def autocast(self) -> torch.autocast:
        """bfloat16 arithmetic; weights stay float32."""
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False, enabled=self.device.type == "cuda")

    def hidden(self, embeds: Tensor) -> Tensor:
        """The language model over [R, L, H] embeddings, causal, without a mask."""
        model = self.language_model
        x = embeds * model.embedding_multiplier
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = model.rotary_emb(x, positions)
        for layer in model.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
            x = x[0] if isinstance(x, tuple) else x
        return model.norm(x)

    def token_loss(self, x: Tensor, ids: Tensor, is_target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of the target tokens, and the share of them that is right."""
        logits = F.linear(x[:, :-1], self.language_model.embed_tokens.weight).float()
        wanted, weight = ids[:, 1:], is_target[:, 1:].float()
        losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none", label_smoothing=smoothing)
        count = weight.sum().clamp(min=1.0)
        right = (logits.detach().argmax(-1) == wanted).float()
        return (losses * weight.flatten()).sum() / count, (right * weight).sum() / count

    def text_embeds(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and embeddings of stored documents; what stands for audio is blurred, as projected audio is."""
        is_audio = stored >= VOCAB_SIZE
        ids = stored.long() % VOCAB_SIZE
        weight = self.language_model.embed_tokens.weight
        embeds = _embed(ids, weight)
        size = weight.detach().float().pow(2).mean().sqrt()
        shape = (ids.shape[0], 1, 1)
        blur = torch.rand(shape, device=ids.device)
        other = F.embedding(torch.randint_like(ids, VOCAB_SIZE), weight.detach())
        mixed = torch.lerp(embeds, other.to(embeds.dtype), 0.35 * blur * torch.rand_like(embeds[..., :1]))
        blurred = mixed + 0.6 * blur * size * torch.randn_like(embeds)
        return ids, torch.where(is_audio[..., None], blurred, embeds)

    def text_loss(self, key: Hashable, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """A step on text documents."""
        with self.autocast():
            ids, embeds = self.text_embeds(inputs["ids"])
            loss, right = self.token_loss(self.hidden(embeds), ids, inputs["is_target"], 0.0)
        return loss, torch.stack([loss, right])

    def encode(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """[C, F, 160] -> last hidden states [C, F, H] and character logits [C, F, 29]."""
        context = min(features.shape[1], self._attention_dists.shape[0])
        dists = self._attention_dists[:context, :context]
        x = self.encoder.input_linear(features)
        middle = len(self.encoder.layers) // 2
        for index, layer in enumerate(self.encoder.layers, start=1):
            # A clip shorter than the context attends over itself: the same numbers without the padding.
            layer.attn.context_size = context
            x = layer(x, attention_dists=dists)
            layer.attn.context_size = self._attention_dists.shape[0]
            if index == middle:
                characters = self.encoder.out(x)
                x = x + self.encoder.out_mid(characters.softmax(-1))
        return x, characters

    def hearing_losses(self, x: Tensor, characters: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """CTC per label of the encoder: by characters, by tokens."""
        embedding = self.language_model.embed_tokens.weight.detach()
        by_character = _ctc(characters.float().log_softmax(-1), inputs, "characters", 0)
        log_probs = Heads.token_log_probs(self.heads.encoder(x), self.heads.encoder_gain, embedding)
        return by_character, _ctc(log_probs, inputs, "tokens", AUDIO_ID)

    def ctc_step(self, key: Hashable, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """A step of the encoder alone."""
        with self.autocast():
            by_character, by_token = self.hearing_losses(*self.encode(inputs["features"]), inputs)
        return by_character + by_token, torch.stack([by_character, by_token])

    def joint_step(self, key: Hashable, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """A step of encoder, projector and speech LoRA on conversations."""
        with self.autocast():
            x, characters = self.encode(inputs["features"])
            by_character, by_token = self.hearing_losses(x, characters, inputs)
            vectors = self.projector(x)
            embedding = self.language_model.embed_tokens.weight.detach()
            log_probs = Heads.token_log_probs(vectors, self.heads.projector_gain, embedding)
            by_vector = _ctc(log_probs, inputs, "tokens", AUDIO_ID)
            loss, right = self.conversation_loss(vectors, inputs)
        total = loss + 0.5 * (by_character + by_token) + 0.3 * by_vector
        return total, torch.stack([loss, right, by_character, by_token, by_vector])

    def conversation_loss(self, vectors: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The language model over rows [R, L] whose audio places hold `vectors` [C, n, H]."""
        embeds = F.embedding(inputs["ids"], self.language_model.embed_tokens.weight)
        flat = F.pad(embeds.flatten(0, 1), (0, 0, 0, 1))
        flat = flat.index_copy(0, inputs["place"], vectors.flatten(0, 1).to(embeds.dtype))
        embeds = flat[:-1].view_as(embeds)
        return self.token_loss(self.hidden(embeds), inputs["ids"], inputs["is_target"], 0.05)

    @torch.no_grad()
    def exact(self, store: data.TextStore) -> float:
        """Share of documents whose every target token is the model's first choice: greedy decoding is exact."""
        num_right = num_documents = 0
        for bucket, stored in store.ids.items():
            for part, is_target in zip(stored.split(128), store.is_target[bucket].split(128), strict=True):
                with self.autocast():
                    ids = part.long() % VOCAB_SIZE
                    x = self.hidden(F.embedding(ids, self.language_model.embed_tokens.weight))
                    chosen = F.linear(x[:, :-1], self.language_model.embed_tokens.weight).argmax(-1)
                is_wrong = (chosen != ids[:, 1:]) & is_target[:, 1:]
                num_right += int((~is_wrong.any(1)).sum())
                num_documents += len(ids)
        return round(num_right / max(1, num_documents), 4)

    @torch.no_grad()
    def transcripts(self, features: Tensor, prompt: tuple[list[int], list[int]], most: int = 64) -> list[list[int]]:
        """Greedy answers to clips [C, F, 160], as token ids; `prompt` is what stands before and after a clip."""
        with self.autocast():
            vectors = self.projector(self.encode(features)[0])
            weight = self.language_model.embed_tokens.weight
            before, after = (F.embedding(torch.tensor(ids, device=self.device), weight) for ids in prompt)
            rows = [x.expand(len(features), -1, -1) for x in (before, after)]
            embeds = torch.cat([rows[0], vectors.to(before.dtype), rows[1]], 1)
            answers = torch.full((len(features), most), EOS_ID, device=self.device)
            is_done = torch.zeros(len(features), dtype=torch.bool, device=self.device)
            for place in range(most):
                token = F.linear(self.hidden(embeds)[:, -1], weight).argmax(-1)
                is_done |= token == EOS_ID
                answers[:, place] = torch.where(is_done, EOS_ID, token)
                if is_done.all():
                    break
                embeds = torch.cat([embeds, F.embedding(token, weight)[:, None].to(embeds.dtype)], 1)
        return [[token for token in row if token != EOS_ID] for row in answers.tolist()]


def _ctc(log_probs: Tensor, inputs: Inputs, name: str, blank: int) -> Tensor:
    """Mean CTC loss per label."""
    losses = ctc_loss(log_probs, inputs[name], inputs[f"{name}_lens"], blank)
    return losses.sum() / inputs[f"{name}_lens"].sum()


class _Embed(torch.autograd.Function):
    """Embedding whose backward is a matrix product: fast, and fit for a CUDA graph."""

    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids)
        ctx.num_rows = weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        one_hot = torch.zeros(ids.numel(), ctx.num_rows, dtype=torch.bfloat16, device=ids.device)
        one_hot.scatter_(1, ids.reshape(-1, 1), 1.0)
        return None, (one_hot.T @ grad.reshape(-1, grad.shape[-1]).bfloat16()).float()


def _embed(ids: Tensor, weight: Tensor) -> Tensor:
    return _Embed.apply(ids, weight) if weight.requires_grad else F.embedding(ids, weight)
