"""Kernels compiled at start, several at once: for Hopper, which needs no GPU, and all those that steps then launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from kernels import HAS_TRITON

ROOT = Path(__file__).parents[2]
GROUPS = {"qkv": (96, (64, 80, 96)), "up": (160, (8320,))}
"""Input columns and slice ends."""
MAX_TOKENS, MAX_RECORDED = 300, 100


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.timeout(400)  # Ten seconds of one core, which others may be using too.
def test_what_is_compiled_at_start_is_what_steps_launch(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "from tests.engine.test_kernel_compiling import check; check()"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=390, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(tmp_path.rglob("_expand_kernel.cubin")) and list(tmp_path.rglob("_shrink_kernel.cubin"))


def check() -> None:
    """In a process of its own, whose Triton takes a Hopper GPU to be there."""
    import triton
    from triton.backends.compiler import GPUTarget

    import kernels
    from engine.lora_layers import LoraGroup, compile_kernels
    from engine.warmup import compile_ahead
    from kernels import LoraMetadata, LoraSegment, launching, lora, lora_beside

    launched: list[str] = []
    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
        )
    )  # fmt: skip
    lora.can_depend = lora_beside.can_depend = lambda device: True
    metadata = LoraMetadata(MAX_TOKENS, 4, torch.device("cpu"), max_columns=3 * 16, max_in=160, has_tiles=True)
    metadata.family = "sm90"
    model = torch.nn.Module()
    groups = []
    for name, (in_features, ends) in GROUPS.items():
        starts = (0, *ends[:-1])
        linears = {
            f"{name}.{index}": torch.nn.Linear(in_features, end - start, bias=False, dtype=torch.bfloat16)
            for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        }
        sites = {
            key: SimpleNamespace(in_features=in_features, out_features=linear.out_features)
            for key, linear in linears.items()
        }
        group = LoraGroup(linears, sites, metadata, 0, num_slots=4, max_rank=16, dtype=torch.bfloat16)  # type: ignore[arg-type]
        groups.append(group)
        linears[f"{name}.0"].switchboard_lora = SimpleNamespace(group=group)  # type: ignore[assignment]
        model.add_module(name, linears[f"{name}.0"])

    def variants() -> dict[str, int]:
        jitted = (lora._shrink_kernel, lora._expand_kernel, lora._expand_stream_kernel)
        return {kernel.__name__: sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in jitted}

    # Nothing of a failure is left: what comes after it is compiled where it is launched, or ahead.
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kernels.compile_only(fail)  # type: ignore[arg-type]
    shrink = lora._shrink_kernel
    assert shrink.device_caches[0]  # Made when it is first looked at, and its compiler with it.
    compile_source, shrink.compile = shrink.compile, Mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        compile_kernels(model, model, MAX_RECORDED)
    assert shrink.compile.called and triton.runtime._async_compile.active_mode.get() is None
    compile_ahead(model, model, MAX_RECORDED)  # which goes on
    shrink.compile = compile_source
    shrink.device_caches.clear()
    assert not launching._is_compiling.get() and not metadata.is_recording

    compile_kernels(model, model, MAX_RECORDED)
    assert not metadata.is_recording and metadata.segments == ()
    compiled = variants()
    assert min(compiled.values()) >= 4, compiled

    def launch(kernel: object, grid: tuple[int, ...], *args: object, **options: object) -> None:
        """In the place of a launch: the variant for it is looked up, and compiled if it is not there."""
        assert all(size > 0 for size in grid)
        kernel.run(*args, grid=grid, warmup=True, **options)  # type: ignore[attr-defined]
        launched.append(kernel.__name__)  # type: ignore[attr-defined]

    lora.launch = launch
    assert not launching._is_compiling.get()
    for num_tokens in (1, 2, 17, 64, 65, 100, 101, 256, 257, 300):
        for metadata.is_recording in (False, True) if num_tokens <= MAX_RECORDED else (False,):
            metadata.update([LoraSegment(2, 0, max(1, num_tokens // 2))], num_tokens)
            for group in groups:
                x = torch.zeros(num_tokens, group.lora_a.shape[-1], dtype=torch.bfloat16)
                product = x.new_zeros(num_tokens, group.slice_ends[-1]).clone
                inputs = x, group.lora_a, group.lora_b, group.ranks, group.host_ranks, group.slice_ends, metadata
                if metadata.is_delta_apart:
                    kernels.product_and_delta(product, *inputs)
                else:
                    kernels.lora_product(product, *inputs)
    assert set(launched) == {"_shrink_kernel", "_expand_kernel", "_expand_stream_kernel"} and variants() == compiled
