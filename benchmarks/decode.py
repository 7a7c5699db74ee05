"""Tokens a second of a mixed batch: different adapters and the base model side by side, on this engine and on PEFT.

    python -m benchmarks.decode --batch 8 --prompt-len 32 --output-len 64

The same prompts, adapters and greedy decoding run on both; the tokens must be equal, or no figure is printed. PEFT's
side is `generate` with `adapter_names`, its own way to mix adapters in a batch.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import transformers
from peft import PeftModel

from benchmarks.report import finish, refuse
from engine import Engine, EngineConfig, SamplingParams
from engine.config import EMBEDDED_ASSETS, EMBEDDED_MODEL, LoRAModule
from engine.request import TokenPrompt

MODEL_CLASS = "GraniteSpeechForConditionalGeneration"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=8, help="requests in the batch")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each side, interleaved; the best counts")
    return parser.parse_args()


def run_engine(
    engine: Engine, prompts: Sequence[list[int]], names: Sequence[str | None], output_len: int
) -> list[list[int]]:
    """All prompts in one batch on this engine; returns the new tokens of each."""
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    answers = [
        engine.start_sync(TokenPrompt(prompt), sampling, lora=name or "none")[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    return [[token_id for delta in answer for token_id in delta.token_ids] for answer in answers]


def run_peft(
    model: PeftModel, prompts: Sequence[list[int]], names: Sequence[str | None], output_len: int
) -> list[list[int]]:
    """The same batch on PEFT."""
    ids = torch.tensor(list(prompts))
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_len,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            adapter_names=[name or "__base__" for name in names],
        )
    return [row[len(prompt) :].tolist() for row, prompt in zip(output, prompts, strict=True)]


def load_peft(adapters: dict[str, str]) -> PeftModel:
    """The embedded model with all adapters on PEFT, in float32."""
    base = getattr(transformers, MODEL_CLASS).from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    (first, path), *others = adapters.items()
    model = PeftModel.from_pretrained(base, path, adapter_name=first)
    for name, path in others:
        model.load_adapter(path, adapter_name=name)
    return model.eval()


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    """Seconds and result of one run."""
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def main() -> None:
    """Run both sides and print the result line."""
    options = parse()
    adapters = {path.parent.name: str(path.parent) for path in sorted((EMBEDDED_ASSETS / "adapters").glob("*/*.json"))}
    cycle = itertools.cycle([None, *adapters])
    names = [next(cycle) for _ in range(options.batch)]
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            EngineConfig(
                lora_modules=[LoRAModule(name, path) for name, path in adapters.items()],
                adapter_dir=folder,
                enable_prefix_caching=False,
            )
        )
        peft = load_peft(adapters)
        shape = (options.batch, options.prompt_len)
        prompts = torch.randint(16, engine.base.vocab_size, shape, generator=generator).tolist()
        seconds: dict[str, list[float]] = {"engine": [], "peft": []}
        for _ in range(options.repeat + 1):
            elapsed, ours = timed(lambda: run_engine(engine, prompts, names, options.output_len))
            seconds["engine"].append(elapsed)
            elapsed, theirs = timed(lambda: run_peft(peft, prompts, names, options.output_len))
            seconds["peft"].append(elapsed)
            if ours != theirs:
                refuse(
                    f"rows {[row for row, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]} differ"
                )
        engine.close()
    best = {side: min(times[1:]) for side, times in seconds.items()}
    num_tokens = options.batch * options.output_len
    finish(
        {**vars(options), "model": "tiny-speech", "adapters": names, "dtype": "float32"},
        {
            "tokens_per_second": round(num_tokens / best["engine"], 1),
            "peft_tokens_per_second": round(num_tokens / best["peft"], 1),
            "times_peft": round(best["peft"] / best["engine"], 2),
        },
    )


if __name__ == "__main__":
    main()
