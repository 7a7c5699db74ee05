"""The process group of the ranks on one host: NCCL between GPUs, gloo between CPUs. Joined and left here alone."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from engine.errors import InvalidRequest

_JOIN_TIMEOUT = datetime.timedelta(minutes=5)
"""All ranks are about to join when the first one does; one that ends on the way leaves the others waiting so long."""
_TIMEOUT = datetime.timedelta(hours=1)
"""Ranks load and compile at their own speed; a rank that has gone is noticed by its process's end, not by this."""


def check_no_group() -> None:
    """Raise `InvalidRequest` where this process is in a process group already, whoever made it."""
    if dist.is_initialized():
        raise InvalidRequest(
            "This process has an engine over several GPUs, or another process group, already; close it first.",
            param="tensor_parallel_size",
        )


def open_device(rank: int, device: torch.device) -> None:
    """Make the rank's GPU the current one, with its context; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(rank)
        torch.cuda.synchronize()


def join_group(rank: int, size: int, store: str, device: torch.device) -> None:
    """Meet the other ranks through the file `store`; blocks until all are there.

    Raises:
        InvalidRequest: this process is in a group already.
    """
    check_no_group()
    meeting = dist.FileStore(store, size)  # type: ignore[attr-defined]
    if device.type == "cuda":
        open_device(rank, device)
        own = torch.device("cuda", rank)
        dist.init_process_group("nccl", store=meeting, rank=rank, world_size=size, timeout=_JOIN_TIMEOUT, device_id=own)
    else:
        with _loopback():
            dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=_JOIN_TIMEOUT)
    if hasattr(dist, "set_timeout"):  # Its name since torch 2.14, where the old one warns.
        dist.set_timeout(_TIMEOUT)
    else:
        dist.distributed_c10d._set_pg_timeout(_TIMEOUT)


def abort_group() -> None:
    """Let go of collectives that wait for a rank which has gone; on CPUs they notice by themselves."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Let gloo use the host's own interface: all ranks are on this host, whose name need not be known to any server."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        del os.environ[name]


def leave_group(*, is_whole: bool) -> None:
    """Leave the group; `is_whole` where all ranks do so now."""
    if not dist.is_initialized():
        return
    if is_whole or dist.get_backend() != "nccl":
        dist.destroy_process_group()
    else:
        dist.distributed_c10d._abort_process_group()
