"""What joins the ranks' partial results: sums and gathers over the process group, also as operators for compiled layers.

Every rank must call the same collectives in the same order; the steps' batches see to it. Recorded in CUDA graphs they are
replayed like kernels (NCCL).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from engine import ops


class RankGroup:
    """The ranks of one engine: torch's default process group.

    Attributes:
        rank, size: this process and how many there are.
        number: by which operators find this object.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.number = ops.register_step(self)

    def sum_(self, tensor: torch.Tensor) -> None:
        """Every rank's `tensor` becomes the sum of all."""
        if torch.compiler.is_compiling():
            sum_op(tensor, self.number)
        else:
            dist.all_reduce(tensor)

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        """[..., W] -> [..., n * W]: the ranks' columns side by side."""
        if torch.compiler.is_compiling():
            joined: torch.Tensor = join_op(tensor, self.number, self.size)
            return joined
        return _join(tensor, self.size)

    def copy_from_first_(self, tensor: torch.Tensor) -> None:
        """Every rank's `tensor` becomes rank 0's."""
        dist.broadcast(tensor, src=0)


def _join(tensor: torch.Tensor, size: int) -> torch.Tensor:
    parts = tensor.new_empty(size, *tensor.shape)
    if hasattr(dist, "all_gather_single"):  # Its name since torch 2.14, where the old one warns.
        dist.all_gather_single(parts.view(-1), tensor.reshape(-1))
    else:
        dist.all_gather_into_tensor(parts.view(-1), tensor.reshape(-1))
    return parts.movedim(0, -2).reshape(*tensor.shape[:-1], size * tensor.shape[-1])


@torch.library.custom_op("switchboard::sum_ranks", mutates_args=("x",), schema="(Tensor(a!) x, int group) -> ()")
def sum_op(x, group):  # type: ignore[no-untyped-def]
    """`RankGroup.sum_` as an operator."""
    dist.all_reduce(x)


@sum_op.register_fake
def _(x, group):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("switchboard::join_ranks", mutates_args=(), schema="(Tensor x, int group, int size) -> Tensor")
def join_op(x, group, size):  # type: ignore[no-untyped-def]
    """`RankGroup.join` as an operator."""
    return _join(x, size)


@join_op.register_fake
def _(x, group, size):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], size * x.shape[-1]))
