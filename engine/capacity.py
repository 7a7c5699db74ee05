"""What a base model with adapters needs of a GPU, and about how fast it will be there, from the model's config alone.

Memory is arithmetic on the same shapes that the engine allocates. Speed is a sum of what must be read and computed over what
the GPU can, with shares and fixed costs that were fitted to the measurements in docs/performance.md (one H200, bfloat16, an
8-billion-parameter model); for another GPU they are scaled by its bandwidth and its tensor cores, and that is a guess. Called by
`engine/__main__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from adapters.estimate import pair_bytes, slot_bytes
from engine.config import EngineConfig

if TYPE_CHECKING:
    from adapters.surface import ModelSurface
    from engine.model import BaseModel
    from engine.parallel.split import Split

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: memory in bytes, bandwidth in bytes a second, dense bfloat16 in operations a second."""

    memory: float
    bandwidth: float
    flops: float


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "b200": Gpu(179 * GIB, 8.0e12, 2250e12),
        "h200": Gpu(140 * GIB, 4.8e12, 989e12),
        "h100": Gpu(79.6 * GIB, 3.35e12, 989e12),
        "a100-80gb": Gpu(80 * GIB, 2.04e12, 312e12),
        "a100-40gb": Gpu(40 * GIB, 1.56e12, 312e12),
        "l40s": Gpu(45 * GIB, 0.864e12, 362e12),
        "a10": Gpu(22.5 * GIB, 0.6e12, 125e12),
        "l4": Gpu(22.5 * GIB, 0.3e12, 121e12),
        "rtx-4090": Gpu(24 * GIB, 1.01e12, 165e12),
        "rtx-3090": Gpu(24 * GIB, 0.936e12, 71e12),
    }
)
MEASURED_GPU = "h200"

CUDA_CONTEXT_BYTES = 0.6 * GIB
"""What CUDA, Triton's programs and libraries hold before the first tensor."""

# Fitted to the table of docs/performance.md.
READ_SHARE = 0.8
"""Of the bandwidth, for base weights and the KV cache."""
ADAPTER_READ_SHARE = 0.35
"""Of the bandwidth, for the small matrices of many adapters."""
LAYER_SECONDS = 21e-6
"""Gaps between a layer's kernels, in a recorded step."""
ROW_SECONDS = 15e-6
"""A request's share of a step beside what is read: attention, activations, sampling."""
LORA_LAYER_SECONDS = 15e-6
"""A layer's LoRA launches, in a recorded step, with any number of adapters."""
PROMPT_SHARE = 0.62
"""Of the tensor cores, for prompts of the base model."""
LORA_PROMPT_SHARE = 0.1
"""What LoRA adds to a prompt's time."""


@dataclass(frozen=True)
class Workload:
    """Requests of one size, in tokens; `num_adapters` different adapters of rank `rank` in a batch of `batch`, 0 for none."""

    batch: int
    prompt_len: int
    answer_len: int
    num_adapters: int = 0
    rank: int = 16


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a GPU's memory, by use; `kv_tokens` is what the cache holds, at most what the requests can use.

    `kv_bytes` is below 0 where the model and the LoRA rows alone are too large.
    """

    total: float
    kept_free: float
    weights: int
    lora_rows: int
    kv_bytes: float
    kv_bytes_per_token: int
    kv_tokens: int
    adapter_bytes: Mapping[int, int]
    """Rank -> bytes of one adapter on all linears of the decoder."""


@dataclass(frozen=True)
class SpeedEstimate:
    """Seconds and rates that a workload should see."""

    first_token_s: float
    step_s: float
    tokens_per_s: float
    requests_per_s: float


def plan_memory(
    base: BaseModel, config: EngineConfig, gpu: Gpu, ranks: list[int], split: Split | None = None
) -> MemoryPlan:
    """What the engine would allocate for `base`, all of it, with these settings on `gpu`; with `split` on each of several."""
    surface = base.surface(
        max_lora_rank=config.max_lora_rank, lora_dtype=base.dtype, target_suffixes=tuple(config.lora_target_modules)
    )
    decoder = [site for name, site in surface.linears.items() if surface.is_targeted(name) and site.part == "decoder"]
    weights, lora_rows = base.num_bytes, 0
    if config.enable_lora:
        lora_rows = config.max_loras * slot_bytes(surface, config.max_lora_rank)
    if split is not None:
        weights, lora_rows = _share_of(base, config, surface, split)
    kept_free = gpu.memory * (1 - config.gpu_memory_utilization)
    kv_bytes = gpu.memory - kept_free - CUDA_CONTEXT_BYTES - weights - lora_rows
    per_token = base.kv_shape.bytes_per_token // (1 if split is None else split.kv_parts)
    longest = min(config.max_model_len or base.max_positions, base.max_positions)
    num_blocks = int(max(kv_bytes, 0) // (per_token * config.block_size))
    most_useful = config.max_num_seqs * -(-longest // config.block_size)
    return MemoryPlan(
        total=gpu.memory,
        kept_free=kept_free,
        weights=weights,
        lora_rows=lora_rows,
        kv_bytes=kv_bytes,
        kv_bytes_per_token=per_token,
        kv_tokens=min(num_blocks, most_useful) * config.block_size,
        adapter_bytes={rank: pair_bytes(decoder, rank, base.dtype) for rank in ranks},
    )


def _share_of(base: BaseModel, config: EngineConfig, surface: ModelSurface, split: Split) -> tuple[int, int]:
    """Bytes of one rank's weights and LoRA rows."""
    size = split.group.size
    cut = sum(shard.in_features * shard.out_features for shard in split.shards.values()) * base.dtype.itemsize
    weights = base.num_bytes - cut + cut // size
    if not config.enable_lora:
        return weights, 0
    row = 0
    for name, site in surface.linears.items():
        if surface.is_targeted(name):
            if config.fully_sharded_loras and name in split.shards:
                row += pair_bytes([site], config.max_lora_rank, base.dtype) // size
            else:
                row += pair_bytes([split.local_site(site)], config.max_lora_rank, base.dtype)
    return weights, config.max_loras * row


def estimate_speed(base: BaseModel, gpu: Gpu, work: Workload) -> SpeedEstimate:
    """What `work` should see on `gpu` once `work.batch` requests run all the time."""
    sites = base.surface(max_lora_rank=work.rank, lora_dtype=base.dtype).linears.values()
    decoder = [site for site in sites if site.part == "decoder"]
    head = [site for site in sites if site.part == "head"]
    num_layers = base.kv_shape.num_layers
    linear_numbers = sum(site.in_features * site.out_features for site in decoder)
    head_numbers = sum(site.in_features * site.out_features for site in head)

    context = work.prompt_len + work.answer_len / 2
    bits = None if base.quantization is None else base.quantization.bits
    weight_bytes = base.dtype.itemsize if bits is None else bits / 8
    read: float = linear_numbers * weight_bytes + head_numbers * base.dtype.itemsize
    read += work.batch * context * base.kv_shape.bytes_per_token
    step = read / (gpu.bandwidth * READ_SHARE) + num_layers * LAYER_SECONDS + work.batch * ROW_SECONDS
    if work.num_adapters:
        adapters_read = work.num_adapters * pair_bytes(decoder, work.rank, base.dtype)
        step += num_layers * LORA_LAYER_SECONDS + adapters_read / (gpu.bandwidth * ADAPTER_READ_SHARE)

    # A token costs two operations a weight, and four a number of the query for each earlier token, of which half are there.
    attention = 2 * num_layers * base.text_config.hidden_size * work.prompt_len
    prompt = work.prompt_len * (2 * linear_numbers + attention) / (gpu.flops * PROMPT_SHARE)
    prompt *= 1 + (LORA_PROMPT_SHARE if work.num_adapters else 0)

    request = work.answer_len * step / work.batch + prompt
    return SpeedEstimate(
        first_token_s=max(prompt, step), step_s=step, tokens_per_s=work.answer_len / request, requests_per_s=1 / request
    )
