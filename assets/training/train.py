"""Trains the demo model and its adapters on one GPU: text, then hearing, then both, then the text adapters.

    python -m assets.training.train OUT [--lm 95 --ctc 120 --joint 262 --sql 85 --pirate 14]

Numbers are seconds of each phase; 0 leaves a phase out. `OUT` receives bfloat16 tensors after every phase, and
`--resume DIR` starts from such a folder. Speech is synthesised by worker processes meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Hashable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from . import data, speech
from . import text as texts
from .ctc import ctc_loss
from .export import MODEL_DIR
from .features import FeatureMaker, SpeechStore
from .graphs import Inputs, TrainingSteps
from .model import ENCODER_HIDDEN, HIDDEN, WINDOW, attach_lora, build_model, detach_lora
from .tokenizer import AUDIO_ID, VOCAB_SIZE, DocumentEncoder


class Log:
    """One JSON line an event, on stdout and in `OUT/metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path, self._begin = path, time.time()

    def __call__(self, event: str, **values: object) -> None:
        line = json.dumps({"seconds": round(time.time() - self._begin, 1), "event": event, **values})
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


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


class Trainer:
    """Model, data and device of a run; one method a phase."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.out: Path = arguments.out
        self.log = Log(self.out / "metrics.jsonl")
        self.rust_tokenizer = tokenizer.backend_tokenizer
        self.model = build_model().to(self.device)
        self.language_model = self.model.model.language_model
        self.encoder, self.projector = self.model.model.encoder, self.model.model.projector
        self.heads = Heads().to(self.device)
        self._attention_dists = self.encoder.attention_dists
        self.skeletons: list[list[data.Skeleton]] = []
        self._clips_dir: Path = arguments.clips
        self._seen_files: set[str] = set()
        self._capacity = int(arguments.hours * 3600 * speech.RATE)

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
        """[C, F, 160] -> last hidden states [C, F, 144] and character logits [C, F, 29]."""
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
        assert isinstance(key, int)
        with torch.no_grad():
            features = self.features(inputs, key)
        with self.autocast():
            by_character, by_token = self.hearing_losses(*self.encode(features), inputs)
        return by_character + by_token, torch.stack([by_character, by_token])

    def joint_step(self, key: Hashable, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """A step of encoder, projector and speech LoRA on conversations."""
        assert isinstance(key, int)
        with torch.no_grad():
            features = self.features(inputs, key)
        with self.autocast():
            x, characters = self.encode(features)
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

    def train_text(
        self, name: str, store: data.TextStore, seconds: float, parameters: list[nn.Parameter], rate: float
    ) -> None:
        """Language-model steps on `store` for so many seconds."""
        steps = TrainingSteps([(parameters, rate)], self.text_loss, self.device, 2)
        buckets, weights = list(store.ids), list(store.weights.values())
        rng = random.Random(0)
        begin = last = time.time()
        while (now := time.time()) - begin < seconds:
            steps.set_progress((now - begin) / seconds)
            bucket = rng.choices(buckets, weights)[0]
            count = max(4, data.TOKENS_PER_STEP // bucket)
            rows = torch.randint(len(store.ids[bucket]), (count,), device=self.device)
            steps.run(bucket, {"ids": store.ids[bucket][rows], "is_target": store.is_target[bucket][rows]})
            if steps.num_steps % 16 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()
            if now - last > 15:
                last = now
                loss, right = steps.take_means()
                self.log(name, step=steps.num_steps, loss=round(loss, 4), right=round(right, 4))
        loss, right = steps.take_means()
        self.log(f"{name} done", step=steps.num_steps, loss=round(loss, 4), right=round(right, 4))

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

    def prepare_speech(self) -> None:
        """Device buffers of the speech phases."""
        self.store = SpeechStore(self.device, self._capacity)
        self.features = FeatureMaker(self.store)
        self.batches = data.JointBatches(
            self.store, DocumentEncoder(self.rust_tokenizer), self.skeletons, int(time.time())
        )

    def take_clips(self, most: int) -> None:
        """Moves up to `most` finished files into the store."""
        for path in sorted(self._clips_dir.glob("[0-9]*.npz")):
            if path.name in self._seen_files:
                continue
            if most == 0:
                return
            most -= 1
            self._seen_files.add(path.name)
            with np.load(path) as file:
                self.store.add(file["samples"], file["lens"], file["texts"].tolist())

    def train_speech(
        self, name: str, seconds: float, groups: list[tuple[list[nn.Parameter], float]], is_joint: bool
    ) -> None:
        """Encoder steps, or joint steps."""
        self.take_clips(10_000)
        while len(self.store.texts) < 200:
            time.sleep(1)
            self.take_clips(10_000)
        step = self.joint_step if is_joint else self.ctc_step
        steps = TrainingSteps(groups, step, self.device, 5 if is_joint else 2)
        begin = last = time.time()
        num_clips = 0
        while (now := time.time()) - begin < seconds:
            steps.set_progress((now - begin) / seconds)
            # Short clips first: the encoder finds its alignments there.
            bucket = self.batches.draw_bucket(200 if not is_joint and now - begin < 0.12 * seconds else 10_000)
            count = self.batches.num_clips(bucket)
            arrays = self.batches.joint(bucket) if is_joint else self.batches.clips(bucket, count)[1]
            steps.run(bucket, {key: torch.from_numpy(value) for key, value in arrays.items()})
            num_clips += count
            if steps.num_steps % 40 == 0:
                self.take_clips(3)
            if now - last > 15:
                last = now
                self._log_speech(name, steps, num_clips)
        self._log_speech(f"{name} done", steps, num_clips)

    def _log_speech(self, event: str, steps: TrainingSteps, num_clips: int) -> None:
        hours = round(self.store.used / speech.RATE / 3600, 1)
        means = [round(mean, 4) for mean in steps.take_means()]
        self.log(event, step=steps.num_steps, means=means, seen=num_clips, clips=len(self.store.texts), hours=hours)

    def save(self, **adapters: dict[str, Tensor]) -> None:
        """Writes model, heads and the given adapters in bfloat16; LoRA layers must be detached."""
        state = {key: value for key, value in self.model.state_dict().items() if key != "lm_head.weight"}
        files = {"model": state, "heads": self.heads.state_dict(), **adapters}
        for name, tensors in files.items():
            half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
            save_file({k: v.detach().contiguous().cpu() for k, v in half.items()}, self.out / f"{name}.safetensors")

    def resume(self, folder: Path) -> None:
        """Loads what `save` wrote."""
        self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        self.model.tie_weights()
        self.heads.load_state_dict(load_file(folder / "heads.safetensors"))


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


def _freeze_rounded(module: nn.Module) -> None:
    """Frozen at the values that bfloat16 files will hold."""
    for parameter in module.parameters():
        parameter.requires_grad_(False).copy_(parameter.bfloat16().float())


def run_language_model(
    trainer: Trainer, seconds: float, store: data.TextStore, checks: dict[str, data.TextStore]
) -> None:
    """Phase 1: the base model's text."""
    documents = sum(len(ids) for ids in store.ids.values())
    trainer.log("text", documents=documents, shares={k: round(v, 3) for k, v in store.weights.items()})
    trainer.train_text("lm", store, seconds, list(trainer.language_model.parameters()), 2e-3)
    with torch.no_grad():
        _freeze_rounded(trainer.language_model)
    trainer.log("lm exact", **{name: trainer.exact(store) for name, store in checks.items()})


def run_speech(trainer: Trainer, arguments: argparse.Namespace) -> None:
    """Phases 2 and 3: encoder, then encoder, projector and speech LoRA together."""
    trainer.prepare_speech()
    encoder, heads, projector = trainer.encoder, trainer.heads, trainer.projector
    norms = [module for module in encoder.modules() if isinstance(module, nn.BatchNorm1d)]
    for norm in norms:
        norm.momentum = 0.02
    if arguments.ctc:
        with torch.no_grad():
            heads.encoder_gain.copy_(trainer.language_model.norm.weight)
            heads.projector_gain.copy_(trainer.language_model.norm.weight)
            size = trainer.language_model.embed_tokens.weight.std() / 0.28
            projector.linear.weight.mul_(size)
        parameters = [*encoder.parameters(), *heads.encoder.parameters(), heads.encoder_gain]
        trainer.train_speech("ctc", arguments.ctc, [(parameters, 1.5e-3)], is_joint=False)
        trainer.save()
    if arguments.joint:
        for norm in norms:
            norm.eval()
            for statistic in (norm.running_mean, norm.running_var):
                statistic.copy_(statistic.bfloat16().float())
        lora = attach_lora(trainer.language_model, "speech")
        if arguments.resume and (arguments.resume / "speech.safetensors").exists():
            for key, value in load_file(arguments.resume / "speech.safetensors").items():
                lora[key].data.copy_(value)
        rate = arguments.joint_rate
        groups = [
            ([*projector.parameters(), *lora.values(), heads.projector_gain], rate),
            ([*encoder.parameters(), *heads.encoder.parameters(), heads.encoder_gain], 0.6 * rate),
        ]
        trainer.train_speech("joint", arguments.joint, groups, is_joint=True)
        detach_lora(trainer.language_model)
        trainer.save(speech=dict(lora))


def run_adapter(trainer: Trainer, name: str, seconds: float, store: data.TextStore, check: data.TextStore) -> None:
    """Phase 4: a text adapter on the frozen base."""
    before = trainer.exact(check)
    lora = attach_lora(trainer.language_model, name)
    trainer.train_text(name, store, seconds, list(lora.values()), 3e-3)
    after = trainer.exact(check)
    detach_lora(trainer.language_model)
    trainer.log(f"{name} exact", with_adapter=after, without=before)
    trainer.save(**{name: dict(lora)})


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for phase, seconds in (("lm", 95), ("ctc", 120), ("joint", 262), ("sql", 85), ("pirate", 14)):
        parser.add_argument(f"--{phase}", type=float, default=seconds, help="seconds")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--clips", type=Path, default=Path("/tmp/tiny-speech-clips"), help="where clips are kept")
    parser.add_argument("--hours", type=float, default=120, help="room for so much speech on the device")
    parser.add_argument("--joint-rate", type=float, default=1.5e-3)
    parser.add_argument("--resume", type=Path)
    return parser.parse_args()


def main() -> None:
    """All phases with a budget."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_DIR)
    # Forked workers must not meet a CUDA context or a threaded pool: documents and synthesis come first.
    torch.set_num_threads(1 if torch.cuda.is_available() else 2)
    workers, rust = arguments.workers, tokenizer.backend_tokenizer
    wanted = [(name, 60_000 if name == "pirate" else 400_000) for name in ("sql", "pirate") if getattr(arguments, name)]
    scale = min(1.0, arguments.documents / 1_000_000)
    stores = {name: data.build_text_store(name, int(n * scale) or 1, 1, rust, workers) for name, n in wanted}
    checks = {
        name: data.build_text_store(f"held-out {name}", max(8, int(600 * scale)), 2, rust, workers)
        for name in ("chat", "echo", "sql", "pirate")
    }
    if arguments.lm:
        stores["base"] = data.build_text_store("base", arguments.documents, 0, rust, workers)
    if arguments.ctc or arguments.joint:
        skeletons = data.build_skeletons(int(20_000 * scale) or 10, 3, rust, workers)
        seconds = sum(getattr(arguments, phase) for phase in ("lm", "sql", "pirate", "ctc", "joint"))
        speech.start_workers(arguments.clips, workers, int(time.time()) % 10_000, seconds)
    trainer = Trainer(arguments, tokenizer)
    trainer.log("begin", device=str(trainer.device), words=len(texts.VOCABULARY), vectors_per_second=50 // WINDOW)
    for store in [*stores.values(), *checks.values()]:
        store.move_to(trainer.device)
    if arguments.resume:
        trainer.resume(arguments.resume)
        with torch.no_grad():
            _freeze_rounded(trainer.language_model)
    if arguments.lm:
        run_language_model(trainer, arguments.lm, stores["base"], {k: checks[k] for k in ("chat", "echo")})
        trainer.save()
    for name in ("sql", "pirate"):
        if getattr(arguments, name):
            run_adapter(trainer, name, getattr(arguments, name), stores[name], checks[name])
    if arguments.ctc or arguments.joint:
        trainer.skeletons = skeletons
        run_speech(trainer, arguments)
    trainer.log("end")


if __name__ == "__main__":
    main()
