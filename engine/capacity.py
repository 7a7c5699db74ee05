"""What a base model with adapters needs of a GPU, and about how fast it will be there, from the model's config alone.

Memory is arithmetic on the same shapes that the engine allocates. Speed is a sum of what must be read and computed over what
the GPU can, with shares and fixed costs that were fitted to the measurements in docs/performance.md (one H200, bfloat16, an
8-billion-parameter model, rank 16); for another GPU they are scaled by its bandwidth and its tensor cores, and that is a guess.
Called by `engine/__main__`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from adapters.estimate import pair_bytes, slot_bytes
from engine.config import EngineConfig

if TYPE_CHECKING:
    from adapters.surface import LinearSite, ModelSurface
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

# Fitted to the tables of docs/performance.md.
READ_SHARE = 0.8
"""Of the bandwidth, for base weights and the KV cache."""
ADAPTER_READ_SHARE = 0.5
"""Of the bandwidth, for the small matrices of many adapters."""
COMPUTE_SHARE = 0.615
"""Of the tensor cores, for prompts, and for steps whose products take longer than reading the weights."""
LAYER_SECONDS = 31e-6
"""Gaps between a layer's kernels, in a recorded step."""
ROW_SECONDS = 4e-6
"""A request's share of a step beside what is read and multiplied: attention, activations, sampling."""
LORA_BESIDE_LAYER_SECONDS = 4e-6
"""What a layer's LoRA launches add to a recorded step of up to `MAX_BESIDE_TOKENS`, in which they run beside the layer's own."""
LORA_BESIDE_READ_SHARE = 0.42
"""Of the bandwidth, for the small matrices of many adapters there: base weights are read at the same time."""
LORA_LAYER_SECONDS = 19e-6
"""A layer's LoRA launches in a larger recorded step, with any number of adapters."""
LORA_ROW_SECONDS = 3e-6
"""What LoRA adds to a request's share of a step."""
LORA_PROMPT_SHARE = 0.13
"""What LoRA adds to the computing of a prompt."""
PROMPT_LAYER_SECONDS = 0.114e-3
"""What a layer adds to reading the weights in a recorded step that holds a prompt, however short."""
LORA_PROMPT_LAYER_SECONDS = 0.04e-3
"""What LoRA adds to that."""
LAUNCHED_LAYER_SECONDS = 0.87e-3
"""The host's launches of a layer in a step of more tokens, which is not recorded: no such step is shorter."""
LORA_LAUNCHED_LAYER_SECONDS = 0.55e-3
"""What LoRA adds to those."""
MAX_RECORDED_TOKENS = 2048
"""Of steps with prompts (`engine/graphs`)."""
MAX_BESIDE_TOKENS = 64
"""Of steps in which all of LoRA runs beside the base products (`kernels`)."""


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
    """Seconds and rates that a workload should see.

    Attributes:
        first_token_s: of one prompt that does not wait.
        all_first_tokens_s: until all requests of the batch have theirs, where they come together.
        step_s: between two tokens of a request while no prompt is computed.
        tokens_per_s: of all requests, where each that ends is followed by another and they come at any time, so that a
            step with a prompt holds all others up.
        tokens_per_s_together: the same where the whole batch comes together and ends together.
        requests_per_s: by `tokens_per_s`.
    """

    first_token_s: float
    all_first_tokens_s: float
    step_s: float
    tokens_per_s: float
    tokens_per_s_together: float
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
    step, prompt = _step_seconds(base, gpu, work), _prompt_seconds(base, gpu, work)
    shortest = _shortest_prompt_step(base, gpu, work, work.prompt_len + work.batch - 1)
    # Requests that start in the same step share it, so that fewer steps hold a prompt than there are requests.
    steps_with_prompt = work.answer_len * -math.expm1(-work.batch / work.answer_len)
    apart = work.answer_len * step + max(steps_with_prompt * (shortest - step), work.batch * prompt)
    all_first = max(_shortest_prompt_step(base, gpu, work, work.batch * work.prompt_len), work.batch * prompt)
    together = (work.answer_len - 1) * step + all_first
    return SpeedEstimate(
        first_token_s=max(shortest, prompt),
        all_first_tokens_s=all_first,
        step_s=step,
        tokens_per_s=work.batch * work.answer_len / apart,
        tokens_per_s_together=work.batch * work.answer_len / together,
        requests_per_s=work.batch / apart,
    )


def _linears(base: BaseModel, rank: int) -> tuple[list[LinearSite], int, int]:
    """The decoder's linears, and the numbers in their weights and in the head's."""
    sites = base.surface(max_lora_rank=rank, lora_dtype=base.dtype).linears.values()
    decoder = [site for site in sites if site.part == "decoder"]
    head = sum(site.in_features * site.out_features for site in sites if site.part == "head")
    return decoder, sum(site.in_features * site.out_features for site in decoder), head


def _step_seconds(base: BaseModel, gpu: Gpu, work: Workload) -> float:
    """A recorded step of the whole batch, one token each."""
    decoder, numbers, head_numbers = _linears(base, work.rank)
    num_layers, bandwidth = base.kv_shape.num_layers, gpu.bandwidth * READ_SHARE
    read = _read_seconds(base, gpu, numbers, head_numbers)
    computed = 2 * work.batch * (numbers + head_numbers) / (gpu.flops * COMPUTE_SHARE)
    context = work.prompt_len + work.answer_len / 2
    kv_read = work.batch * context * base.kv_shape.bytes_per_token / bandwidth
    step = max(read, computed) + kv_read + num_layers * LAYER_SECONDS + work.batch * ROW_SECONDS
    if work.num_adapters:
        adapters_read = work.num_adapters * pair_bytes(decoder, work.rank, base.dtype)
        if work.batch <= MAX_BESIDE_TOKENS:
            return (
                step + num_layers * LORA_BESIDE_LAYER_SECONDS + adapters_read / (gpu.bandwidth * LORA_BESIDE_READ_SHARE)
            )
        step += num_layers * LORA_LAYER_SECONDS + work.batch * LORA_ROW_SECONDS
        step += adapters_read / (gpu.bandwidth * ADAPTER_READ_SHARE)
    return step


def _read_seconds(base: BaseModel, gpu: Gpu, numbers: int, head_numbers: int) -> float:
    """Reading all weights once."""
    bits = None if base.quantization is None else base.quantization.bits
    weight_bytes = base.dtype.itemsize if bits is None else bits / 8
    return (numbers * weight_bytes + head_numbers * base.dtype.itemsize) / (gpu.bandwidth * READ_SHARE)


def _prompt_seconds(base: BaseModel, gpu: Gpu, work: Workload) -> float:
    """What a prompt takes to compute."""
    _, numbers, _ = _linears(base, work.rank)
    # A token costs two operations a weight, and four a number of the query for each earlier token, of which half are there.
    attention = 2 * base.kv_shape.num_layers * base.text_config.hidden_size * work.prompt_len
    computed: float = work.prompt_len * (2 * numbers + attention) / (gpu.flops * COMPUTE_SHARE)
    return computed * (1 + LORA_PROMPT_SHARE if work.num_adapters else 1)


def _shortest_prompt_step(base: BaseModel, gpu: Gpu, work: Workload, num_tokens: int) -> float:
    """What a step with a prompt takes at least, `num_tokens` in all."""
    num_layers, has_lora = base.kv_shape.num_layers, work.num_adapters > 0
    if num_tokens > MAX_RECORDED_TOKENS:
        return num_layers * (LAUNCHED_LAYER_SECONDS + has_lora * LORA_LAUNCHED_LAYER_SECONDS)
    _, numbers, head_numbers = _linears(base, work.rank)
    a_layer = PROMPT_LAYER_SECONDS + has_lora * LORA_PROMPT_LAYER_SECONDS
    return _read_seconds(base, gpu, numbers, head_numbers) + num_layers * a_layer
