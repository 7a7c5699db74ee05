"""LoRA beside the base product, where launches are recorded in a CUDA graph: the two have the input in common alone.

What needs the input alone runs on a second stream, so that replays hide it behind the product: the first half of LoRA, or,
where its sum is left to whoever called, both halves. Called through `kernels`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from kernels.dependent_launch import can_depend, launch_options
from kernels.lora import choose_tiles, launch_expand, launch_shrink, num_processors
from kernels.metadata import LoraMetadata

_TILE_COLUMNS = 128
"""Output columns of a tile of cuBLAS's products of few rows, as profiles name them."""


def lora_product(
    product: Callable[[], torch.Tensor],
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    slice_ends: tuple[int, ...],
    metadata: LoraMetadata,
) -> torch.Tensor:
    """`product()` [T, O] with LoRA added; the arguments are those of `reference.lora_add_group_`.

    Shrink comes from another stream and is no dependent launch; expand is one of the product's last kernel, whatever that is.
    """
    shrink, expand = choose_tiles(x, lora_a, slice_ends, metadata)
    _fork(metadata.side_stream)
    with _on(metadata.side_stream):
        launch_shrink(x, lora_a, ranks, metadata, shrink, launch_options(False))
    output = product()
    _join(metadata.side_stream)
    num_splits = -(-x.shape[1] // shrink.split_len)
    dependence = launch_options(can_depend(x.device))
    launch_expand(output, lora_b, ranks, slice_ends, metadata, num_splits, expand, dependence, follows_product=True)
    return output


def product_and_delta(
    product: Callable[[], torch.Tensor],
    x: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    ranks: torch.Tensor,
    slice_ends: tuple[int, ...],
    metadata: LoraMetadata,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`product()` [T, O], and what LoRA adds to it, [T, O] float32: not defined where `metadata.is_adapted` is 0.

    A processor has room for a tile of the product or for LoRA's programs, not for both, so the first in the queue goes first.
    That is LoRA, but for products of more tiles than processors: in their last turn some of these are idle, and LoRA has them.
    """
    shrink, expand = choose_tiles(x, lora_a, slice_ends, metadata)
    num_splits, plain = -(-x.shape[1] // shrink.split_len), launch_options(False)
    # Of the product's stream, on which it is read; the other stream waits for that one before it writes.
    delta = torch.empty(x.shape[0], slice_ends[-1], dtype=torch.float32, device=x.device)
    is_wide = slice_ends[-1] > _TILE_COLUMNS * num_processors(x.device)
    stream = metadata.late_stream if is_wide else metadata.side_stream
    _fork(stream)
    output = product() if is_wide else None
    with _on(stream):
        launch_shrink(x, lora_a, ranks, metadata, shrink, plain)
        launch_expand(delta, lora_b, ranks, slice_ends, metadata, num_splits, expand, plain, is_delta=True)
    if output is None:
        output = product()
    _join(stream)
    return output, delta


# Without streams, under the interpreter, launches go in order.


def _fork(stream: torch.cuda.Stream | None) -> None:
    """What comes on the stream waits for what has been launched until now."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _join(stream: torch.cuda.Stream | None) -> None:
    """What is launched from now on waits for what is on the stream."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
