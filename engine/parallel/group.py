"""The process group of the ranks on one host: NCCL between GPUs, gloo between CPUs. Joined and left here alone."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from engine.errors import InvalidRequest

_TIMEOUT = datetime.timedelta(hours=1)
"""Ranks load and compile at their own speed; a rank that has gone is noticed by its process's end, not by this."""


def join_group(rank: int, size: int, store: str, device: torch.device) -> None:
    """Meet the other ranks through the file `store`; blocks until all are there.

    Raises:
        InvalidRequest: this process is in a group already.
    """
    if dist.is_initialized():
        raise InvalidRequest(
            "This process has an engine over several GPUs, or another process group, already; close it first.",
            param="tensor_parallel_size",
        )
    meeting = dist.FileStore(store, size)  # type: ignore[attr-defined]
    if device.type == "cuda":
        own = torch.device("cuda", rank)
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", store=meeting, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=own)
    else:
        # All ranks are on this host, whose name need not be known to any server.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=_TIMEOUT)


def abort_group() -> None:
    """Let go of collectives that wait for a rank which has gone; on CPUs they notice by themselves."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


def leave_group(*, is_whole: bool) -> None:
    """Leave the group; `is_whole` where all ranks do so now."""
    if not dist.is_initialized():
        return
    if is_whole or dist.get_backend() != "nccl":
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._abort_process_group()
