"""What the benchmarks of whole steps share: models from a shape, random adapters, prompts, timed batches, and the
comparison of answers that must hold before any figure counts.

Weights are random and need no download. Used by `benchmarks/decode` and `benchmarks/scale`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.report import refuse
from engine import Engine, SamplingParams
from engine.request import TokenLogprob, TokenPrompt

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
}  # fmt: skip
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

NUM_TOP = 20
TOLERANCE = 0.25
"""Of log probabilities in bfloat16 through 32 layers: batches of other sizes round otherwise."""
SAME_SHARE = 0.6
"""Of the likeliest tokens: as many must be shared, within `TOLERANCE`, by two runs of one request in bfloat16. Near the
end of the list neighbours lie closer than rounding, so it is less than all."""
OTHER_SHARE = 0.4
"""The base model and an adapter may share at most as many."""


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of benchmarks that keep an engine under load: its shape, and requests' lengths and adapters."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent; 0 makes all adapters equally popular")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--enforce-eager", action="store_true", help="no compilation and no CUDA graphs")


def around(output_len: int) -> tuple[int, int]:
    """Least and most tokens of answers that have so many on average: else those that began together would end together."""
    return max(2, output_len // 2), max(2, output_len + output_len // 2)


def numbers(text: str) -> list[int]:
    """A command-line word such as `1,8,32`."""
    return [int(word) for word in text.split(",")]


WORD_LEN = 7
"""Characters of a token's text, a space first, where `write_model` is told that all tokens are words."""


def write_model(shape: str, folder: Path, *, has_words: bool = False) -> Path:
    """A config and a tokenizer; the weights are made when the engine loads it.

    The tokenizer knows bytes alone, so that text can be asked; or, where it `has_words`, each token is a word of its own,
    so that each has text.
    """
    folder.mkdir()
    config = LlamaConfig(**SHAPES[shape], bos_token_id=None, eos_token_id=1, architectures=["LlamaForCausalLM"])
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120{index:0{WORD_LEN - 1}x}" for index in range(config.vocab_size)] if has_words else alphabet
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def write_adapter(
    shape: str, rank: int, seed: int, folder: Path, device: str, linears: Sequence[str] = ALL_LINEARS
) -> Path:
    """A PEFT folder with random weights on the named linears of all decoder layers, strong enough to change answers."""
    folder.mkdir(parents=True)
    size = SHAPES[shape]
    width, inner = size["hidden_size"], size["intermediate_size"]
    kv = width // size["num_attention_heads"] * size["num_key_value_heads"]
    features = {
        "q_proj": (width, width), "k_proj": (width, kv), "v_proj": (width, kv), "o_proj": (width, width),
        "gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width),
    }  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for layer in range(size["num_hidden_layers"]):
        for name in linears:
            fan_in, fan_out = features[name]
            block = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
            a = torch.randn(rank, fan_in, generator=generator, device=device) * fan_in**-0.5
            # As strong at any rank: what two ways of rounding differ by grows with it, and `check_rows` bounds that.
            b = torch.randn(fan_out, rank, generator=generator, device=device) * 0.2 * (16 / rank) ** 0.5
            tensors[f"{prefix}.lora_A.weight"] = a.to(torch.bfloat16).cpu()
            tensors[f"{prefix}.lora_B.weight"] = b.to(torch.bfloat16).cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    _write_config(folder, rank, rank, linears)
    return folder


def link_adapter(source: Path, alpha: float, folder: Path) -> Path:
    """The same weights under another alpha: other content to the engine, for the price of a hard link."""
    folder.mkdir(parents=True)
    os.link(source / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    _write_config(folder, config["r"], alpha, config["target_modules"])
    return folder


def _write_config(folder: Path, rank: int, alpha: float, linears: Sequence[str]) -> None:
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": list(linears),
        "base_model_name_or_path": "model",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make_prompts(batch: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    return torch.randint(2, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed)).tolist()


def deal(names: Sequence[str], count: int, batch: int) -> list[str | None]:
    """`count` adapters over `batch` requests, round robin; the base model where `count` is 0."""
    return [names[row % count] if count else None for row in range(batch)]


@dataclass(frozen=True)
class Timing:
    """One batch, in seconds.

    Attributes:
        total: from the first request's submission to the last one's last token.
        first_token: from the same moment until every request has its first token.
        step: between two tokens afterwards, on average; 0 where only one token was asked for.
    """

    total: float
    first_token: float
    step: float


def time_batch(engine: Engine, prompts: Sequence[list[int]], names: Sequence[str | None], output_len: int) -> Timing:
    """Run one batch to its end, greedy, end of text ignored.

    The reader follows one answer at a time, so that handing out text in this process is not what is measured.
    """
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    started = time.perf_counter()
    answers = [
        engine.start_sync(TokenPrompt(prompt), sampling, lora=name)[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    readers = [iter(answer) for answer in answers]
    for answer, reader in zip(answers, readers, strict=True):
        while answer.num_output_tokens == 0:
            next(reader)
    all_began = time.perf_counter()
    for answer, reader in zip(answers, readers, strict=True):
        while answer.finish_reason is None:
            next(reader)
    ended = time.perf_counter()
    if any(answer.num_output_tokens != output_len for answer in answers):
        refuse(f"an answer does not have {output_len} tokens")
    step = (ended - all_began) / (output_len - 1) if output_len > 1 else 0.0
    return Timing(ended - started, all_began - started, step)


def answer_all(
    engine: Engine, prompts: Sequence[list[int]], names: Sequence[str | None], output_len: int
) -> list[list[TokenLogprob]]:
    """The tokens of one batch with their log probabilities and those of the `NUM_TOP` likeliest."""
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, logprobs=NUM_TOP)
    answers = [
        engine.start_sync(TokenPrompt(prompt), sampling, lora=name)[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    return [[entry for delta in answer for entry in delta.logprobs] for answer in answers]


def tolerance_of(engine: Engine) -> float:
    """`TOLERANCE` for the depth of the engine's model: rounding errors of layers add up like a random walk."""
    num_layers: int = engine.base.text_config.num_hidden_layers
    return TOLERANCE * max(1.0, (num_layers / 32) ** 0.5)


def shared(left: TokenLogprob, right: TokenLogprob, tolerance: float = TOLERANCE) -> float:
    """Share of the likeliest tokens that both list, with log probabilities within `tolerance`."""
    other = dict(right.top)
    return sum(abs(other.get(token, float("inf")) - value) <= tolerance for token, value in left.top) / len(left.top)


def difference(
    left: Sequence[TokenLogprob], right: Sequence[TokenLogprob], *, is_exact: bool, tolerance: float = TOLERANCE
) -> str | None:
    """How two runs of one request disagree, or None.

    `is_exact` asks for equal tokens; without it each step's likeliest tokens must agree as far as the constants above
    say, up to the first step where the runs chose another of two tokens that are about as likely.
    """
    for step, (one, other) in enumerate(zip(left, right, strict=True)):
        if is_exact and one.token_id != other.token_id:
            return f"token {step} is {one.token_id} in one and {other.token_id} in the other"
        share = shared(one, other, tolerance)
        if share < SAME_SHARE:
            return f"at token {step} they share {share:.2f} of the likeliest tokens"
        if one.token_id != other.token_id:
            return None
    return None


def check_rows(
    engine: Engine,
    prompts: Sequence[list[int]],
    names: Sequence[str | None],
    answers: Sequence[Sequence[TokenLogprob]],
) -> None:
    """Refuse unless each answer equals its request alone on the idle engine, and adapters answer unlike the base model."""
    is_exact, tolerance = engine.base.dtype == torch.float32, tolerance_of(engine)
    for row, (prompt, name, answer) in enumerate(zip(prompts, names, answers, strict=True)):
        (alone,) = answer_all(engine, [prompt], [name], len(answer))
        reason = difference(answer, alone, is_exact=is_exact, tolerance=tolerance)
        if reason is not None:
            refuse(f"row {row} (adapter {name}) answers otherwise among others than alone: {reason}")
        if name is None:
            continue
        (base,) = answer_all(engine, [prompt], [None], 1)
        if shared(answer[0], base[0], tolerance) > OTHER_SHARE:
            refuse(f"row {row}: adapter {name} changes nothing")
