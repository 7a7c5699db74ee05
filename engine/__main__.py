"""`python -m engine plan`: what fits on a GPU, and about how fast it will be, before anything is bought or started.

    python -m engine plan --model MODEL --gpu h200 [--max-loras 32] [--max-lora-rank 16] [--prompt-len 1024] [--json]

A program on top of the package, like `app.py`: nothing imports it. The model is built from its config alone, without weights.
Exit status: 0 it fits, 1 it does not, 2 the command line is wrong or no served model is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.capacity import GIB, GPUS, MEASURED_GPU, MemoryPlan, SpeedEstimate, Workload, estimate_speed, plan_memory
from engine.config import EngineConfig, add_flags
from engine.errors import AppError

if TYPE_CHECKING:
    from engine.model import BaseModel

_SETTINGS = {
    "model", "max_loras", "max_lora_rank", "max_num_seqs", "max_model_len", "gpu_memory_utilization", "block_size",
    "enable_lora", "lora_target_modules", "quantization", "tensor_parallel_size", "fully_sharded_loras",
}  # fmt: skip
_BATCHES = [1, 8, 32, 64, 128, 256]


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = vars(_parser().parse_args(words))
    config = EngineConfig(**{name: arguments[name] for name in _SETTINGS & arguments.keys()})
    try:
        from engine.model import outline_model
        from engine.setup import check_parallel_settings

        check_parallel_settings(config)
        base = outline_model(config.model, config.quantization)
        return _plan(base, config, argparse.Namespace(**arguments))
    except AppError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description="What a model with adapters needs of a GPU.")
    plan = parser.add_subparsers(required=True).add_parser("plan", help="memory and expected speed of a set-up")
    every = argparse.ArgumentParser(add_help=False)
    add_flags(every, EngineConfig)
    for action in every._actions:
        if action.dest in _SETTINGS:
            plan._add_action(action)
    plan.add_argument("--gpu", choices=sorted(GPUS), default=MEASURED_GPU, help=f"default {MEASURED_GPU}")
    plan.add_argument("--ranks", type=_numbers, default=[8, 16, 32, 64], help="of adapters, such as 8,16,32,64")
    plan.add_argument("--prompt-len", type=int, default=1024, help="tokens of a usual prompt (default 1024)")
    plan.add_argument("--answer-len", type=int, default=256, help="tokens of a usual answer (default 256)")
    plan.add_argument("--batch", type=_numbers, default=_BATCHES, help="requests at a time (default 1,8,32,64,128,256)")
    plan.add_argument(
        "--adapters", type=_counts, help="different ones in a batch, such as 0,1,8 (default none, one, as many as fit)"
    )
    plan.add_argument("--cpu-memory-gb", type=float, default=64, help="memory for adapters beside the GPU (default 64)")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _numbers(text: str) -> list[int]:
    numbers = _counts(text)
    if 0 in numbers:
        raise ValueError(text)
    return numbers


def _counts(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",")]
    if any(number < 0 for number in numbers):
        raise ValueError(text)
    return numbers


def _plan(base: BaseModel, config: EngineConfig, asked: argparse.Namespace) -> int:
    gpu = GPUS[asked.gpu]
    split = None
    if config.tensor_parallel_size > 1:
        from engine.parallel.loading import outline_split

        split = outline_split(base.model, base.architecture, config.tensor_parallel_size)
    memory = plan_memory(base, config, gpu, asked.ranks, split)
    fitting = memory.kv_tokens // (asked.prompt_len + asked.answer_len)
    rank = min(config.max_lora_rank, 16)
    works = [
        Workload(batch, asked.prompt_len, asked.answer_len, num_adapters, rank)
        for batch in asked.batch
        if split is None and batch <= min(fitting, config.max_num_seqs)  # Several GPUs were not measured.
        for num_adapters in _adapter_counts(batch, config, asked.adapters)
    ]
    speeds = [(work, estimate_speed(base, gpu, work)) for work in works]
    if asked.json:
        rows = [dataclasses.asdict(work) | dataclasses.asdict(speed) for work, speed in speeds]
        found = {"model": base.name, "gpu": asked.gpu, "requests": fitting} | dataclasses.asdict(memory)
        sys.stdout.write(json.dumps(found | {"speeds": rows}) + "\n")
    else:
        lines = _memory_lines(base, config, asked, memory, fitting)
        if split is None:
            is_measured = asked.gpu == MEASURED_GPU and base.quantization is None
            lines += ["", *_speed_lines(is_measured, speeds)]
        sys.stdout.write("\n".join(lines) + "\n")
    return 0 if fitting else 1


def _adapter_counts(batch: int, config: EngineConfig, asked: list[int] | None) -> list[int]:
    most = min(batch, config.max_loras) if config.enable_lora else 0
    if asked is not None:
        return [count for count in asked if count <= most]
    return sorted({0, min(1, most), most})


def _memory_lines(
    base: BaseModel, config: EngineConfig, asked: argparse.Namespace, memory: MemoryPlan, fitting: int
) -> list[str]:
    dtype = str(base.dtype).removeprefix("torch.")
    quantization = f", {base.quantization.method}" if base.quantization else ""
    lines = [
        f"{base.name} ({dtype}{quantization}) on {_number_of_gpus(config)} {asked.gpu}, {memory.total / GIB:.1f} GiB",
        f"  kept free        {memory.kept_free / GIB:>7.1f} GiB   --gpu-memory-utilization {config.gpu_memory_utilization:g}",
        f"  weights          {memory.weights / GIB:>7.1f} GiB",
        f"  LoRA rows        {memory.lora_rows / GIB:>7.1f} GiB   {config.max_loras} of up to rank {config.max_lora_rank}",
        f"  left for the KV  {memory.kv_bytes / GIB:>7.1f} GiB   {memory.kv_bytes_per_token / 1024:.0f} KiB a token",
    ]
    if not fitting:
        return [
            *lines,
            "It does not fit: not one request has room. Lower --max-loras or --max-lora-rank, or take a larger GPU.",
        ]
    lines.append(
        f"  {fitting} requests of {asked.prompt_len} + {asked.answer_len} tokens fit; a batch takes {config.max_num_seqs}"
    )
    lines += ["", f"{'rank':>6}  {'one adapter':>12}  {f'in {asked.cpu_memory_gb:g} GB of CPU memory':>26}"]
    for rank, size in memory.adapter_bytes.items():
        lines.append(f"{rank:>6}  {size / 1e6:>9.1f} MB  {int(asked.cpu_memory_gb * 1e9 // size):>26}")
    return lines


def _number_of_gpus(config: EngineConfig) -> str:
    return "one" if config.tensor_parallel_size == 1 else f"each of {config.tensor_parallel_size}"


def _speed_lines(is_measured: bool, speeds: Sequence[tuple[Workload, SpeedEstimate]]) -> list[str]:
    source = "fitted to measurements" if is_measured else f"scaled from the {MEASURED_GPU} in bfloat16, not measured"
    if not speeds:
        return ["expected: nothing"]
    lines = [
        f"expected ({source}; rank {speeds[0][0].rank})",
        f"{'':>16}  {'first token, ms':^16}  {'step':>6}  {'tokens/s, requests':^20}  {'requests':>8}",
        f"{'batch':>6}  {'adapters':>8}  {'of one':>7}  {'of all':>7}  {'ms':>6}  {'together':>9}  {'one by one':>10}  {'/s':>8}",
    ]
    for work, speed in speeds:
        lines.append(
            f"{work.batch:>6}  {work.num_adapters:>8}  {speed.first_token_s * 1e3:>7.0f}  {speed.all_first_tokens_s * 1e3:>7.0f}"
            f"  {speed.step_s * 1e3:>6.2f}  {speed.tokens_per_s_together:>9.0f}  {speed.tokens_per_s:>10.0f}"
            f"  {speed.requests_per_s:>8.1f}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
