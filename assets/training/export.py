"""From raw tensors to the folders that the product ships.

`python -m assets.training.export CHECKPOINT_DIR [--tokenizer DIR]` reads `language.safetensors`, `hearing.safetensors`
and one `NAME.safetensors` an adapter from the training's output and writes `assets/models/tiny-speech` and
`assets/adapters/*`. With `--random` the weights are random: the same folders, to try loading on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from . import samples
from .model import ADAPTERS, attach_lora, build_model, save_model, target_regex
from .silence import let_zero_be_silence, silent_state
from .tokenizer import train_tokenizer

ASSETS = Path(__file__).resolve().parents[1]
MODEL_DIR = ASSETS / "models" / "tiny-speech"
ADAPTERS_DIR = ASSETS / "adapters"


def save_adapter(name: str, tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes an adapter in PEFT's layout, bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    rank, alpha, modules = ADAPTERS[name]
    targets: list[str] | str = [module.rpartition(".")[2] for module in modules]
    if "up_proj" in targets:
        targets = target_regex(name)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path="tiny-speech",
        inference_mode=True,
    )
    config.save_pretrained(folder)
    tensors = {key: tensor.to(torch.bfloat16).contiguous().cpu() for key, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def export(checkpoint: Path | None, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes all folders; random weights without a checkpoint."""
    model = build_model()
    for name in ADAPTERS:
        if checkpoint is None:
            tensors = {
                key: torch.randn_like(p) * 0.05
                for key, p in attach_lora(build_model().model.language_model, name).items()
            }
        else:
            tensors = load_file(checkpoint / f"{name}.safetensors")
        save_adapter(name, tensors, ADAPTERS_DIR / name)
    if checkpoint is not None:
        parts = [load_file(checkpoint / f"{part}.safetensors") for part in ("language", "hearing")]
        missing, unexpected = model.load_state_dict({**parts[0], **parts[1]}, strict=False)
        assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
        model.tie_weights()
        model.eval()
        clips = [samples.read_wave(path) for path in sorted(samples.AUDIO_DIR.glob("*.wav"))[:16]]
        let_zero_be_silence(model, silent_state(model, clips))
    save_model(model, tokenizer, MODEL_DIR)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--random", action="store_true", help="random weights, to try loading on")
    parser.add_argument("--tokenizer", type=Path, default=MODEL_DIR, help="folder of the tokenizer")
    arguments = parser.parse_args()
    if (arguments.checkpoint is None) != arguments.random:
        parser.error("give a checkpoint folder or --random")
    tokenizer = train_tokenizer() if arguments.random else PreTrainedTokenizerFast.from_pretrained(arguments.tokenizer)
    export(arguments.checkpoint, tokenizer)


if __name__ == "__main__":
    main()
