"""This engine against PEFT's own mixed batch on the CPU: same model, prompts and adapters, in one run.

    python -m benchmarks.cpu_vs_peft --batch 16 --adapters 8
    python -m benchmarks.cpu_vs_peft --model real

The adapters are random, rank 16 on all linears of the language model, and dealt round robin. PEFT's side is `generate`
with `adapter_names`. Both decode greedily in float32, and their tokens must be equal, or no figure is printed. `tiny` is
the embedded model, `real` Gemma 3 270M (`benchmarks/gemma` says where it comes from). The two sides take turns, each turn
is compared with its neighbour, by the clock and by the CPU time of all threads, and the median of the rounds counts: other
work on the machine slows both sides of a round. `OMP_NUM_THREADS=1` keeps threads that wait for each other out of the CPU
time, which on a busy machine they fill.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig

from benchmarks.gemma import missing_packages, write_gemma
from benchmarks.report import finish, refuse
from engine import Engine, EngineConfig, SamplingParams
from engine.config import EMBEDDED_MODEL, LoRAModule
from engine.request import TokenPrompt

TARGETS = r".*layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
RANK = 16
GOAL = 1.5
"""Times PEFT's tokens a second to reach, for 16 requests over 8 adapters."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="tiny", help="tiny, real, or the folder of a base model")
    parser.add_argument("--batch", type=int, default=16, help="requests in the batch")
    parser.add_argument("--adapters", type=int, default=8, help="distinct adapters in the batch")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=None, help="tokens generated for each: 64, real 24")
    parser.add_argument("--repeat", type=int, default=3, help="rounds, each one run of both sides; the median counts")
    options = parser.parse_args()
    options.output_len = options.output_len or (24 if options.model == "real" else 64)
    return options


def find_model(name: str, root: Path) -> str:
    """Folder of the base model; `root` is where it may be written."""
    if name == "tiny":
        return str(EMBEDDED_MODEL)
    if name != "real":
        return name
    if missing := missing_packages():
        refuse(f"the packages {', '.join(missing)} are not installed; the docstring of benchmarks/gemma names them")
    root.mkdir()
    return str(write_gemma(root))


def load_base(folder: str) -> Any:
    """The bare model in float32."""
    (name,) = AutoConfig.from_pretrained(folder).architectures
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()


def make_peft(folder: str, count: int, root: Path) -> tuple[PeftModel, dict[str, str]]:
    """A PeftModel with `count` random adapters, and the folders that it was saved to."""
    names = [f"adapter-{number}" for number in range(count)]
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS)
    model = get_peft_model(load_base(folder), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(root)
    return model.eval(), {name: str(root / name) for name in names}


def run_engine(engine: Engine, prompts: Sequence[list[int]], names: Sequence[str], output_len: int) -> list[list[int]]:
    """All prompts in one batch on this engine; returns the new tokens of each."""
    sampling = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    answers = [
        engine.start_sync(TokenPrompt(prompt), sampling, lora=name)[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    return [[token_id for delta in answer for token_id in delta.token_ids] for answer in answers]


def run_peft(model: PeftModel, prompts: Sequence[list[int]], names: Sequence[str], output_len: int) -> list[list[int]]:
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
            adapter_names=list(names),
        )
    return [row[len(prompt) :].tolist() for row, prompt in zip(output, prompts, strict=True)]


def timed(run: Callable[[], list[list[int]]]) -> tuple[tuple[float, float], list[list[int]]]:
    """Seconds by the clock and of all cores' work, and the result of one run."""
    started, worked = time.perf_counter(), time.process_time()
    result = run()
    return (time.perf_counter() - started, time.process_time() - worked), result


def main() -> None:
    """Run both sides and print the result line."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        model = find_model(options.model, Path(folder) / "base")
        peft, adapters = make_peft(model, options.adapters, Path(folder) / "adapters")
        names = [list(adapters)[row % len(adapters)] for row in range(options.batch)]
        config = EngineConfig(
            model=model,
            lora_modules=[LoRAModule(name, path) for name, path in adapters.items()],
            adapter_dir=str(Path(folder) / "catalogue"),
            dtype="float32",
            device="cpu",
            max_loras=options.adapters,
            max_lora_rank=RANK if Path(model) != EMBEDDED_MODEL else 64,
            enable_prefix_caching=False,
        )
        engine = Engine(config)
        generator = torch.Generator().manual_seed(0)
        shape = (options.batch, options.prompt_len)
        prompts = torch.randint(16, engine.base.vocab_size, shape, generator=generator).tolist()
        seconds: dict[str, list[tuple[float, float]]] = {"engine": [], "peft": []}
        for _ in range(options.repeat + 1):
            elapsed, ours = timed(lambda: run_engine(engine, prompts, names, options.output_len))
            seconds["engine"].append(elapsed)
            elapsed, theirs = timed(lambda: run_peft(peft, prompts, names, options.output_len))
            seconds["peft"].append(elapsed)
            if ours != theirs:
                rows = [row for row, (left, right) in enumerate(zip(ours, theirs, strict=True)) if left != right]
                refuse(f"the tokens of rows {rows} differ")
            if len(set(map(tuple, ours))) == 1:
                refuse("all rows are equal, so the adapters were not told apart")
        engine.close()
    rounds = list(zip(seconds["engine"], seconds["peft"], strict=True))[1:]  # The first warms both sides up.
    by_clock = statistics.median(theirs[0] / ours[0] for ours, theirs in rounds)
    by_cpu_time = statistics.median(theirs[1] / ours[1] for ours, theirs in rounds)
    num_tokens = options.batch * options.output_len
    best = {side: min(clock for clock, _ in times[1:]) for side, times in seconds.items()}
    finish(
        {**vars(options), "rank": RANK, "dtype": "float32", "threads": torch.get_num_threads()},
        {
            "tokens_per_second": round(num_tokens / best["engine"], 1),
            "peft_tokens_per_second": round(num_tokens / best["peft"], 1),
            "times_peft": round(by_clock, 2),
            # Less disturbed by other work on the machine, but blind to cores that lie idle.
            "times_peft_by_cpu_time": round(by_cpu_time, 2),
            "times_peft_goal": GOAL,
            "is_met": by_clock >= GOAL,
            "seconds": {side: [round(clock, 2) for clock, _ in times[1:]] for side, times in seconds.items()},
            "cpu_seconds": {side: [round(cores, 2) for _, cores in times[1:]] for side, times in seconds.items()},
        },
    )


if __name__ == "__main__":
    main()
