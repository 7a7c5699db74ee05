"""Decode and prefill on a GPU: milliseconds a step by batch size and number of adapters, on a model's shape.

    python -m benchmarks.decode --shape llama-3.1-8b --batch 1,8,32 --adapters 0,1,8,32 --rank 16

Weights are random and need no download. Prompts of random tokens, greedy, end of text ignored, no prefix cache,
adapters dealt round robin, the best of two runs after a warm-up. Milliseconds a step = wall time / tokens generated for
each request, prefill included. Before anything is timed, a mixed batch must agree with its rows run one by one, and
adapters must change the answers; else no figure is printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.report import finish, refuse
from engine import Engine, EngineConfig, SamplingParams
from engine.request import TokenPrompt

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    },
}  # fmt: skip
TOLERANCE = 0.25
"""Of log probabilities in bfloat16 through 32 layers: batches of other sizes round otherwise."""

PREFILL = (8, 2048)
"""Prompts and tokens of each in the prefill row."""


def parse() -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 128, 256])
    parser.add_argument("--adapters", type=numbers, default=[0, 1, 8, 32])
    parser.add_argument("--rank", type=numbers, default=[16], help="ranks, dealt to the adapters in turn")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=None, help="256 up to batch 32, 128 above")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--skip-prefill", action="store_true")
    return parser.parse_args()


def write_model(shape: str, folder: Path) -> Path:
    """A config and a tokenizer; the weights are made when the engine loads it."""
    folder.mkdir()
    config = LlamaConfig(**SHAPES[shape], bos_token_id=None, eos_token_id=1, architectures=["LlamaForCausalLM"])
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def write_adapter(shape: str, rank: int, seed: int, folder: Path, device: str) -> Path:
    """A PEFT folder with random weights on all linears of the decoder layers."""
    folder.mkdir(parents=True)
    size = SHAPES[shape]
    width, inner = size["hidden_size"], size["intermediate_size"]
    kv = width // size["num_attention_heads"] * size["num_key_value_heads"]
    linears = {
        "self_attn.q_proj": (width, width), "self_attn.k_proj": (width, kv), "self_attn.v_proj": (width, kv),
        "self_attn.o_proj": (width, width), "mlp.gate_proj": (width, inner), "mlp.up_proj": (width, inner),
        "mlp.down_proj": (inner, width),
    }  # fmt: skip
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for layer in range(size["num_hidden_layers"]):
        for name, (fan_in, fan_out) in linears.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, fan_in, generator=generator, device=device) * fan_in**-0.5
            b = torch.randn(fan_out, rank, generator=generator, device=device) * 0.02
            tensors[f"{prefix}.lora_A.weight"] = a.to(torch.bfloat16).cpu()
            tensors[f"{prefix}.lora_B.weight"] = b.to(torch.bfloat16).cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none",
        "target_modules": [name.rpartition(".")[2] for name in linears], "base_model_name_or_path": shape,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def run(engine: Engine, prompts: list[list[int]], names: list[str | None], output_len: int) -> list[list[float]]:
    """One batch to its end; returns the log probabilities of each request's first token."""
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    checked = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, logprobs=5)
    answers = [
        engine.start_sync(TokenPrompt(prompt), checked if output_len == 1 else sampling, lora=name)[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    return [[entry.logprob for delta in answer for entry in delta.logprobs] for answer in answers]


def deal(names: list[str], count: int, batch: int) -> list[str | None]:
    """`count` adapters over `batch` requests, round robin; the base model where `count` is 0."""
    return [names[row % count] if count else None for row in range(batch)]


def check(engine: Engine, names: list[str], vocab_size: int) -> None:
    """A mixed batch agrees with its rows alone, and adapters differ from the base model."""
    prompts = make_prompts(8, 33, vocab_size)
    mixed_names: list[str | None] = [None, *names[:3], None, *names[:3]]
    mixed = run(engine, prompts, mixed_names, 1)
    alone = [run(engine, [prompt], [name], 1)[0] for prompt, name in zip(prompts, mixed_names, strict=True)]
    base = run(engine, prompts, [None] * 8, 1)
    for row, (together, single) in enumerate(zip(mixed, alone, strict=True)):
        if abs(together[0] - single[0]) > TOLERANCE:
            refuse(f"row {row} has log probability {together[0]:.3f} in a mixed batch and {single[0]:.3f} alone")
    if all(abs(mixed[row][0] - base[row][0]) < 1e-3 for row in range(8) if mixed_names[row]):
        refuse("the adapters change nothing")


def make_prompts(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random token ids."""
    return torch.randint(2, vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).tolist()


def measure(engine: Engine, prompts: list[list[int]], names: list[str | None], output_len: int) -> float:
    """Seconds of the better of two runs after a warm-up."""
    best = float("inf")
    for attempt in range(3):
        started = time.perf_counter()
        run(engine, prompts, names, output_len)
        if attempt:
            best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    """Load, check, measure, print."""
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    max_adapters = max(options.adapters)
    with tempfile.TemporaryDirectory() as root:
        model = write_model(options.shape, Path(root) / "model")
        started = time.perf_counter()
        engine = Engine(
            EngineConfig(
                model=str(model),
                load_format="dummy",
                dtype="bfloat16" if device == "cuda" else "float32",
                max_model_len=PREFILL[1] + 64,
                max_num_seqs=max(*options.batch, PREFILL[0]),
                max_num_batched_tokens=8192,
                max_loras=max(1, max_adapters),
                max_cpu_loras=max(64, max_adapters),
                max_lora_rank=max(options.rank),
                enable_prefix_caching=False,
                enforce_eager=options.enforce_eager,
                adapter_dir=str(Path(root) / "catalogue"),
            )
        )
        start_seconds = time.perf_counter() - started
        load_ms: list[float] = []
        names = [f"adapter-{number}" for number in range(max_adapters)]
        for number, name in enumerate(names):
            rank = options.rank[number % len(options.rank)]
            folder = write_adapter(options.shape, rank, number, Path(root) / name, device)
            started = time.perf_counter()
            engine.adapters.load(name, str(folder))
            load_ms.append((time.perf_counter() - started) * 1000)
        if len(names) >= 3:
            check(engine, names, SHAPES[options.shape]["vocab_size"])
        rows = []
        for batch in options.batch:
            output_len = options.output_len or (256 if batch <= 32 else 128)
            for count in sorted({min(count, batch) for count in options.adapters}):
                prompts = make_prompts(batch, options.input_len, engine.base.vocab_size)
                seconds = measure(engine, prompts, deal(names, count, batch), output_len)
                rows.append({"batch": batch, "adapters": count, "ms_per_step": round(seconds * 1000 / output_len, 3)})
                print(rows[-1], flush=True)
        prefill = []
        if not options.skip_prefill:
            prompts = make_prompts(*PREFILL, engine.base.vocab_size)
            for count in options.adapters:
                seconds = measure(engine, prompts, deal(names, min(count, PREFILL[0]), PREFILL[0]), 1)
                prefill.append({"adapters": min(count, PREFILL[0]), "seconds": round(seconds, 4)})
        engine.close()
    setup = {**vars(options), "dtype": str(engine.base.dtype), "graphs": device == "cuda" and not options.enforce_eager}
    figures = {
        "decode": rows,
        "prefill": prefill,
        "start_seconds": round(start_seconds, 1),
        "adapter_load_ms": round(sorted(load_ms)[len(load_ms) // 2], 1) if load_ms else None,
    }
    finish(setup, figures)


if __name__ == "__main__":
    main()
