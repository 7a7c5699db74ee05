"""Launches that may start before the one ahead of them has ended (CUDA's programmatic dependent launch, from Hopper on).

Such a kernel first reads what the one ahead cannot have written, and waits before it reads the rest, and before it writes.
Every program waits, also those without work: a kernel's end must mean that all before it have ended. Used by the kernels.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


def launch_options(is_dependent: bool) -> dict[str, bool]:
    """What a kernel with USE_PDL is launched with: as a dependent launch, or as a plain one."""
    return {"USE_PDL": True, "launch_pdl": True} if is_dependent else {"USE_PDL": False}


@cache
def can_depend(device: torch.device) -> bool:
    """Whether a device has them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def wait(USE_PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Go on once the launch ahead has ended and what it wrote can be read."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(USE_PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the launch behind start, if it is a dependent one."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
