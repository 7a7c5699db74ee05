"""Trains the demo model and its adapters on one GPU: text, then hearing, then both, then the text adapters.

    python -m assets.training.train OUT [--minutes 9] [--tokenizer DIR]                                    all of it
    python -m assets.training.train OUT --minutes 9 --phases lm sql pirate ctc                             in two calls
    python -m assets.training.train OUT2 --minutes 9 --phases joint --resume OUT

The phases share the minutes from the start of the program on; what one does not use goes to the next. `OUT` receives
bfloat16 tensors after every phase and every minute, whole files only, so that a run that is killed leaves what it has come
to. Speech is synthesised by worker processes meanwhile and kept in `--clips`; each file there is used by later runs too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from . import data, held_out, speech, wide
from .check import HELD_OUT_FILE, HeldOutCheck
from .export import MODEL_DIR
from .features import FeatureMaker, SpeechStore
from .graphs import TrainingSteps
from .model import attach_lora, detach_lora
from .network import Network
from .tokenizer import DocumentEncoder

# Parts of the time, in the order of the phases.
SHARES = {"lm": 95, "sql": 80, "pirate": 12, "ctc": 120, "joint": 262}
CHECK_SECONDS = 25.0  # kept for the error rates at the end of the last phase
SAVE_SECONDS = 60.0


class Log:
    """One JSON line an event, on stdout and in `OUT/metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path, self._begin = path, time.time()

    def __call__(self, event: str, **values: object) -> None:
        line = json.dumps({"seconds": round(time.time() - self._begin, 1), "event": event, **values})
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")


class Clock:
    """Divides the time that is left among the phases that are left."""

    def __init__(self, seconds: float, phases: list[str]) -> None:
        self._end = time.time() + seconds
        self._waiting = [phase for phase in SHARES if phase in phases]

    def budget(self, phase: str) -> float:
        """Seconds for the next phase."""
        share = SHARES[phase] / sum(SHARES[name] for name in self._waiting)
        self._waiting.remove(phase)
        return max(0.0, self._end - time.time()) * share


class Trainer:
    """Network, data and files of a run; one method a kind of phase."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network = Network(self.device)
        self.out: Path = arguments.out
        self.log = Log(self.out / "metrics.jsonl")
        self.encoder = DocumentEncoder(tokenizer)
        self._tokenizer = tokenizer
        self._clips_dir: Path = arguments.clips
        self._seen_files: set[str] = set()
        self._capacity = int(arguments.hours * 3600 * speech.RATE)
        self._shrink: int = arguments.shrink

    def train_text(
        self, name: str, store: data.TextStore, seconds: float, parameters: dict[str, nn.Parameter], rate: float
    ) -> None:
        """Language-model steps on `store` for so many seconds; `parameters` are an adapter's unless `name` is `lm`."""
        steps = TrainingSteps([(list(parameters.values()), rate)], self.network.text_loss, self.device, 2)
        buckets, weights = list(store.ids), list(store.weights.values())
        rng = random.Random(0)
        begin = last = saved = time.time()
        while (now := time.time()) - begin < seconds:
            steps.set_progress((now - begin) / seconds)
            bucket = rng.choices(buckets, weights)[0]
            count = max(4, data.TOKENS_PER_STEP // self._shrink // bucket)
            rows = torch.randint(len(store.ids[bucket]), (count,), device=self.device)
            steps.run(bucket, {"ids": store.ids[bucket][rows], "is_target": store.is_target[bucket][rows]})
            if steps.num_steps % 16 == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()
            if now - last > 15:
                last = now
                self._log_text(name, steps)
            if now - saved > SAVE_SECONDS:
                saved = now
                self.save_text(name, parameters)
        self._log_text(f"{name} done", steps)

    def save_text(self, name: str, parameters: dict[str, nn.Parameter]) -> None:
        """Writes what a text phase trains."""
        if name == "lm":
            self.save("language", self.network.language_state())
        else:
            self.save(name, dict(parameters))

    def _log_text(self, event: str, steps: TrainingSteps) -> None:
        loss, right = steps.take_means()
        self.log(event, step=steps.num_steps, loss=round(loss, 4), right=round(right, 4))

    def prepare_speech(self, skeletons: list[list[data.Skeleton]], rooms: Tensor) -> None:
        """Device buffers of the speech phases."""
        self.store = SpeechStore(self.device, self._capacity, num_rooms=len(rooms))
        self.features = FeatureMaker(self.store, rooms)
        frames = data.FRAMES_PER_STEP // self._shrink
        self.batches = data.JointBatches(self.store, self.encoder, skeletons, int(time.time()), frames)

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
        self,
        name: str,
        seconds: float,
        groups: list[tuple[list[nn.Parameter], float]],
        adapter: dict[str, nn.Parameter] | None = None,
    ) -> None:
        """Joint steps where there is an adapter, else steps of the encoder alone. Batches are drawn one step ahead."""
        self._wait_for_clips()
        step = self.network.joint_step if adapter else self.network.ctc_step
        steps = TrainingSteps(groups, step, self.device, 5 if adapter else 2)
        begin = last = saved = time.time()
        num_clips = 0

        def draw() -> tuple[int, dict[str, np.ndarray]]:
            # Short clips first: the encoder finds its alignments there.
            is_early = adapter is None and time.time() - begin < 0.12 * seconds
            bucket = self.batches.draw_bucket(200 if is_early else 10_000)
            if adapter:
                return bucket, self.batches.joint(bucket)
            return bucket, self.batches.clips(bucket, self.batches.num_clips(bucket))[1]

        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(draw)
            while (now := time.time()) - begin < seconds:
                bucket, arrays = following.result()
                if steps.num_steps % 40 == 0:
                    self.take_clips(6)
                following = pool.submit(draw)
                steps.set_progress((now - begin) / seconds)
                inputs = {key: torch.from_numpy(value).to(self.device) for key, value in arrays.items()}
                num_clips += len(arrays["start"])
                with torch.no_grad():
                    features = self.features({key: inputs.pop(key) for key in data.CLIP_FIELDS}, bucket)
                steps.run(bucket, {**inputs, "features": features})
                if now - last > 15:
                    last = now
                    self._log_speech(name, steps, num_clips)
                if now - saved > SAVE_SECONDS:
                    saved = now
                    self.save_hearing(adapter)
        self._log_speech(f"{name} done", steps, num_clips)
        self.save_hearing(adapter)

    def _wait_for_clips(self) -> None:
        self.take_clips(10_000)
        while len(self.store.texts) < 200:
            time.sleep(1)
            self.take_clips(10_000)

    def _log_speech(self, event: str, steps: TrainingSteps, num_clips: int) -> None:
        hours = round(self.store.used / speech.RATE / 3600, 1)
        means = [round(mean, 4) for mean in steps.take_means()]
        self.log(event, step=steps.num_steps, means=means, seen=num_clips, clips=len(self.store.texts), hours=hours)

    def check_held_out(self) -> None:
        """Word error rates of the held-out sets, with the speech adapter as it stands attached."""
        check = HeldOutCheck(self.network, self.features, self._tokenizer, self._clips_dir / HELD_OUT_FILE)
        self.log("held out", word_error_rates=check.word_error_rates())

    def save_hearing(self, adapter: dict[str, nn.Parameter] | None) -> None:
        """Writes encoder, projector and what only training needs, and the speech adapter."""
        self.save("hearing", self.network.hearing_state())
        self.save("heads", self.network.heads.state_dict())
        if adapter:
            self.save("speech", dict(adapter))

    def save(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Writes `OUT/NAME.safetensors` in bfloat16, at once."""
        half = {k: v.detach().bfloat16() if v.is_floating_point() else v.detach() for k, v in tensors.items()}
        partial = self.out / f".{name}"
        save_file({k: v.contiguous().cpu() for k, v in half.items()}, partial)
        partial.rename(self.out / f"{name}.safetensors")

    def resume(self, folder: Path) -> None:
        """Loads what a run has written."""
        for part in ("language", "hearing"):
            if (folder / f"{part}.safetensors").exists():
                self.network.model.load_state_dict(load_file(folder / f"{part}.safetensors"), strict=False)
        self.network.model.tie_weights()
        if (folder / "heads.safetensors").exists():
            self.network.heads.load_state_dict(load_file(folder / "heads.safetensors"))


@torch.no_grad()
def freeze_rounded(module: nn.Module) -> None:
    """Frozen at the values that bfloat16 files will hold."""
    for parameter in module.parameters():
        parameter.requires_grad_(False).copy_(parameter.bfloat16().float())


def run_language_model(
    trainer: Trainer, seconds: float, store: data.TextStore, checks: dict[str, data.TextStore]
) -> None:
    """The base model's text."""
    documents = sum(len(ids) for ids in store.ids.values())
    trainer.log("text", documents=documents, shares={k: round(v, 3) for k, v in store.weights.items()})
    network = trainer.network
    trainer.train_text("lm", store, seconds, dict(network.language_model.named_parameters()), 2e-3)
    freeze_rounded(network.language_model)
    trainer.save_text("lm", {})
    trainer.log("lm exact", **{name: network.exact(store) for name, store in checks.items()})


def run_adapter(trainer: Trainer, name: str, seconds: float, store: data.TextStore, check: data.TextStore) -> None:
    """A text adapter on the frozen base."""
    network = trainer.network
    before = network.exact(check)
    lora = attach_lora(network.language_model, name)
    trainer.train_text(name, store, seconds, lora, 3e-3)
    after = network.exact(check)
    detach_lora(network.language_model)
    trainer.save_text(name, lora)
    trainer.log(f"{name} exact", with_adapter=after, without=before)


def run_encoder(trainer: Trainer, seconds: float) -> None:
    """Encoder by CTC, and where the projector starts from."""
    network = trainer.network
    heads, encoder = network.heads, network.encoder
    with torch.no_grad():
        heads.encoder_gain.copy_(network.language_model.norm.weight)
        heads.projector_gain.copy_(network.language_model.norm.weight)
        network.projector.linear.weight.mul_(network.language_model.embed_tokens.weight.std() / 0.28)
    for norm in _batch_norms(encoder):
        norm.momentum = 0.02
    parameters = [*encoder.parameters(), *heads.encoder.parameters(), heads.encoder_gain]
    trainer.train_speech("ctc", seconds, [(parameters, 1.5e-3)])


def run_joint(trainer: Trainer, seconds: float, rate: float, resume: Path | None) -> None:
    """Encoder, projector and speech LoRA together, on conversations."""
    network = trainer.network
    for norm in _batch_norms(network.encoder):
        norm.eval()
        for statistic in (norm.running_mean, norm.running_var):
            statistic.copy_(statistic.bfloat16().float())
    lora = attach_lora(network.language_model, "speech")
    if resume and (resume / "speech.safetensors").exists():
        for key, value in load_file(resume / "speech.safetensors").items():
            lora[key].data.copy_(value)
    heads, encoder = network.heads, network.encoder
    groups = [
        ([*network.projector.parameters(), *lora.values(), heads.projector_gain], rate),
        ([*encoder.parameters(), *heads.encoder.parameters(), heads.encoder_gain], 0.6 * rate),
    ]
    trainer.train_speech("joint", seconds, groups, lora)
    trainer.check_held_out()
    detach_lora(network.language_model)


def _batch_norms(module: nn.Module) -> list[nn.BatchNorm1d]:
    return [part for part in module.modules() if isinstance(part, nn.BatchNorm1d)]


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0, help="from the start of the program to its end")
    parser.add_argument("--phases", nargs="+", choices=tuple(SHARES), default=list(SHARES))
    parser.add_argument(
        "--tokenizer", type=Path, default=MODEL_DIR, help="folder of the tokenizer (`prepare` makes one)"
    )
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--clips", type=Path, default=Path("/tmp/tiny-speech-clips"), help="where clips are kept")
    parser.add_argument("--hours", type=float, default=320, help="room for so much speech on the device")
    parser.add_argument("--rooms", type=int, default=256, help="simulated rooms")
    parser.add_argument(
        "--held-out", type=int, default=48, help="clips of each held-out set that are checked at the end"
    )
    parser.add_argument("--shrink", type=int, default=1, help="divide the batches by this, to try a run on a CPU")
    parser.add_argument("--joint-rate", type=float, default=1.5e-3)
    parser.add_argument("--resume", type=Path, help="folder of a run to go on from")
    return parser.parse_args()


def main() -> None:
    """All phases, in order."""
    begin = time.time()
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    phases: list[str] = arguments.phases
    is_hearing = "ctc" in phases or "joint" in phases
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.tokenizer).backend_tokenizer
    workers = arguments.workers
    # Forked workers must not meet a CUDA context or a threaded pool: synthesis and documents come first.
    torch.set_num_threads(1)
    if is_hearing:
        seed = int(time.time()) % 10_000
        speech.start_workers(arguments.clips, workers, seed, 60 * arguments.minutes)
        held_out.start_writer(arguments.clips / HELD_OUT_FILE, arguments.held_out)
    scale = min(1.0, arguments.documents / 1_000_000)
    numbers = {"lm": 1_000_000, "sql": 400_000, "pirate": 60_000}
    kinds = {"lm": "base", "sql": "sql", "pirate": "pirate"}
    stores = {
        phase: data.build_text_store(kinds[phase], int(number * scale) or 1, index, tokenizer, workers)
        for index, (phase, number) in enumerate(numbers.items())
        if phase in phases
    }
    checks = {
        name: data.build_text_store(f"held-out {name}", max(8, int(600 * scale)), 9, tokenizer, workers)
        for name in ("chat", "echo", "sql", "pirate")
    }
    if is_hearing:
        skeletons = data.build_skeletons(int(20_000 * scale) or 10, 3, tokenizer, workers)
        rooms = data.build_rooms(arguments.rooms, 0, workers)
    if torch.cuda.is_available():
        torch.cuda.init()
    else:
        torch.set_num_threads(2)
    trainer = Trainer(arguments, tokenizer)
    trainer.log("begin", device=str(trainer.device), words=len(wide.vocabulary()), after=round(time.time() - begin, 1))
    for store in [*stores.values(), *checks.values()]:
        store.move_to(trainer.device)
    if arguments.resume:
        trainer.resume(arguments.resume)
        freeze_rounded(trainer.network.language_model)
    clock = Clock(begin + 60 * arguments.minutes - time.time() - (CHECK_SECONDS if "joint" in phases else 0), phases)
    if "lm" in phases:
        run_language_model(trainer, clock.budget("lm"), stores["lm"], {k: checks[k] for k in ("chat", "echo")})
    for name in ("sql", "pirate"):
        if name in phases:
            run_adapter(trainer, name, clock.budget(name), stores[name], checks[name])
    if is_hearing:
        trainer.prepare_speech(skeletons, rooms)
    if "ctc" in phases:
        run_encoder(trainer, clock.budget("ctc"))
    if "joint" in phases:
        run_joint(trainer, clock.budget("joint"), arguments.joint_rate, arguments.resume)
    trainer.log("end")


if __name__ == "__main__":
    main()
