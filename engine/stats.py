"""A snapshot of what the engine does and has done, for metrics, the status page and health checks.

Reads the parts' counters and changes nothing. Called by `engine/engine`.
"""

from __future__ import annotations

import dataclasses
import time

from adapters.records import ManagerStats
from engine.encoder_cache import EncoderCache
from engine.loop import EngineLoop
from engine.lora_side import LoraSide
from engine.metrics import StepMetrics
from engine.scheduler import Scheduler


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """What the engine is doing now and has done since its start.

    `is_alive`: it takes requests; `is_running`: it computes, be it only to end what is under way.
    """

    is_alive: bool
    is_running: bool
    uptime_s: float
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_blocks_cached: int
    num_steps: int
    steps: StepMetrics
    prompt_tokens: int
    generated_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    encoder_hits: int
    encoder_misses: int
    encoder_bytes: int
    num_finished: dict[str, int]
    batch_by_adapter: dict[str, int]
    rows_by_adapter: dict[str, int]
    lora_rows_used: int
    lora_rows_total: int
    lora_row_loads: int
    lora_row_evictions: int
    adapters: ManagerStats


def count_waiting(loop: EngineLoop, scheduler: Scheduler) -> int:
    """Requests that no step has had yet."""
    return len(scheduler.waiting) + loop.num_arriving


def take_stats(
    started_at: float, loop: EngineLoop, scheduler: Scheduler, encoder_cache: EncoderCache, lora: LoraSide
) -> EngineStats:
    """The numbers of the latest finished step; `started_at` in Unix seconds."""
    counters, blocks, slots = loop.counters, scheduler.blocks, lora.slots
    return EngineStats(
        is_alive=loop.is_alive,
        is_running=loop.is_running,
        uptime_s=time.time() - started_at,
        num_running=len(scheduler.running),
        num_waiting=count_waiting(loop, scheduler),
        kv_blocks_used=blocks.num_usable - blocks.num_free,
        kv_blocks_total=blocks.num_usable,
        kv_blocks_cached=blocks.num_cached,
        num_steps=counters.num_steps,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        prefix_query_tokens=scheduler.prefix_query_tokens,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        num_preemptions=scheduler.num_preemptions,
        encoder_hits=encoder_cache.num_hits,
        encoder_misses=encoder_cache.num_misses,
        encoder_bytes=encoder_cache.num_bytes,
        steps=counters.steps,
        num_finished=dict(counters.num_finished),
        batch_by_adapter=dict(counters.batch_by_adapter) if scheduler.has_work else {},
        rows_by_adapter=dict(counters.rows_by_adapter),
        lora_rows_used=len(slots.resident()) if slots else 0,
        lora_rows_total=slots.num_slots if slots else 0,
        lora_row_loads=slots.loads if slots else 0,
        lora_row_evictions=slots.evictions if slots else 0,
        adapters=lora.adapters.stats(),
    )
