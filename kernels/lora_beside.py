"""LoRA beside the base product, where launches are recorded in a CUDA graph: the two have the input in common alone.

What needs the input alone runs on a second stream, so that replays hide it behind the product: the first half of LoRA, or,
where its sum is left to whoever called, both halves. Called through `kernels`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from kernels.dependent_launch import can_depend, launch_options
from kernels.lora import choose_tiles, launch_expand, launch_shrink
from kernels.metadata import LoraMetadata


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
    with _beside(metadata.side_stream):
        launch_shrink(x, lora_a, ranks, metadata, shrink, launch_options(False))
    output = product()
    _wait_for(metadata.side_stream)
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
    """`product()` [T, O], and what LoRA adds to it, [T, O] float32: not defined where `metadata.is_adapted` is 0."""
    shrink, expand = choose_tiles(x, lora_a, slice_ends, metadata)
    num_splits, plain = -(-x.shape[1] // shrink.split_len), launch_options(False)
    # Of the product's stream, on which it is read; the other stream waits for that one before it writes.
    delta = torch.empty(x.shape[0], slice_ends[-1], dtype=torch.float32, device=x.device)
    with _beside(metadata.side_stream):
        launch_shrink(x, lora_a, ranks, metadata, shrink, plain)
        launch_expand(delta, lora_b, ranks, slice_ends, metadata, num_splits, expand, plain, is_delta=True)
    output = product()
    _wait_for(metadata.side_stream)
    return output, delta


@contextlib.contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On a stream, from here on; in order where there is none (under the interpreter)."""
    if stream is None:
        yield
    else:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield


def _wait_for(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
