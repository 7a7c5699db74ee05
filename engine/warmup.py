"""Everything that is compiled or recorded, done once at start, so that no request waits for it; reports progress.

Order matters: what can be compiled several at once comes first, then the layers, then the kernels' other variants that prompts
need, then the graphs of steps, which record all of it. Called by `engine/engine` on a GPU, unless `--enforce-eager` is set.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping

from torch import nn

from engine.batch import MAX_PROMPT_ROWS
from engine.compiler import StepKind, compile_decoder
from engine.config import EngineConfig
from engine.graphs import StepGraphs, recording_lora
from engine.lora_layers import compile_kernels
from engine.model import BaseModel
from engine.runner import Runner
from kernels import MAX_DELTA_TOKENS, LoraMetadata

logger = logging.getLogger(__name__)

_CHUNK_SIZES = (4, 16)
"""Tokens of the short pieces of prompts for which attention has tiles of its own."""


def warm_up(
    base: BaseModel,
    runner: Runner,
    graphs: StepGraphs,
    config: EngineConfig,
    lora_metadata: Mapping[str, LoraMetadata],
) -> None:
    """Compile and record.

    Args:
        base, runner, graphs: the parts of the engine.
        config: the settings.
        lora_metadata: what steps read of adapters; empty where they are off.
    """
    # Token counts which between them need every variant of the kernels.
    step_sizes = lora_metadata["decoder"].step_sizes() if lora_metadata else [config.max_num_batched_tokens]
    families = (False, True) if lora_metadata else (False,)
    step_sizes = sorted({*_CHUNK_SIZES, *step_sizes})
    stages: list[tuple[str, Callable[[], None]]] = []
    can_be_compiled = base.quantization is None or base.quantization.can_be_compiled
    if lora_metadata:
        compiled = base.decoder if can_be_compiled else None
        stages.append(("kernels of lora", lambda: compile_ahead(base.model, compiled, graphs.max_mixed_tokens)))
    if can_be_compiled:
        kinds = [StepKind(runner.warm_up, max(step_sizes))]
        if lora_metadata:
            kinds.append(recorded_steps(runner, lora_metadata))
        stages.append(("layers", lambda: compile_decoder(base.decoder, kinds)))
    else:
        assert base.quantization is not None
        logger.warning("event=not_compiled reason='layers of %s cannot be'", base.quantization.method)
    stages += [
        (f"kernels tokens={size} lora={with_lora}", _prompt(runner, size, with_lora))
        for size in step_sizes
        for with_lora in families
    ]
    stages += [
        (f"head lora={with_lora}", functools.partial(runner.warm_up_head, MAX_PROMPT_ROWS, has_lora=with_lora))
        for with_lora in families
    ]
    stages.append(("graphs", graphs.record))
    started = time.perf_counter()
    for number, (what, run) in enumerate(stages, 1):
        run()
        logger.info(
            "event=warm_up stage=%d/%d seconds=%.1f what=%s", number, len(stages), time.perf_counter() - started, what
        )


def compile_ahead(model: nn.Module, compiled: nn.Module | None, max_recorded_tokens: int) -> None:
    """`compile_kernels`, whose failure only makes the start slower: what a later stage launches, it compiles itself."""
    try:
        compile_kernels(model, compiled, max_recorded_tokens)
    except Exception:
        logger.warning("event=kernels_not_compiled_ahead", exc_info=True)


def recorded_steps(runner: Runner, lora_metadata: Mapping[str, LoraMetadata]) -> StepKind:
    """Steps in which compiled layers get LoRA's product apart."""

    def run(num_tokens: int) -> None:
        with recording_lora(lora_metadata):
            runner.warm_up(num_tokens, has_lora=True)

    return StepKind(run, min(MAX_DELTA_TOKENS, lora_metadata["decoder"].max_tokens))


def _prompt(runner: Runner, num_tokens: int, has_lora: bool) -> Callable[[], None]:
    def run() -> None:
        for num_cached in (0, 1):
            runner.warm_up(num_tokens, num_cached=num_cached, has_lora=has_lora)

    return run
