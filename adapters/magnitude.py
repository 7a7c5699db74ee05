"""What DoRA's magnitudes and trained biases make of a linear's output: one scale and one shift for each output column.

DoRA (https://arxiv.org/abs/2402.09353) replaces a weight W by `m * (W + s B A) / |W + s B A|`, norms by row. With
`g = m / |W + s B A|`, its output is `g * (W x) + (g s B) A x + b`: the base product scaled by column, and a plain LoRA
whose B holds g. Owns that arithmetic, in float32. Knows nothing of files. Called by `weights` on loader threads.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch

_MAX_CHUNK = 1 << 22
"""Numbers of a weight that are in float32 at once."""


@dataclass(frozen=True)
class OutputChange:
    """The base layer's output [.., out] becomes `output * scale + shift` before the LoRA product is added.

    Attributes:
        scale: [out] float32, ones where nothing scales.
        shift: [out] float32, zeros where nothing shifts.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of both."""
        return self.scale.nbytes + self.shift.nbytes


def row_norms(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`|W + B A|` by row: [out] float32 on the CPU, computed in chunks of rows where the weight lies.

    On a GPU that happens on a stream of its own, beside the running steps.

    Args:
        weight: [out, in] of the base layer, any float type; nobody may be writing to it.
        a: [R, in]. b: [out, R] with the scale folded in. Both float32.
    """
    beside = torch.cuda.stream(torch.cuda.Stream(weight.device)) if weight.is_cuda else nullcontext()  # type: ignore[no-untyped-call]
    with beside:
        return _row_norms(weight, a, b)


def _row_norms(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows_at_once = max(1, _MAX_CHUNK // weight.shape[1])
    a, b = a.to(weight.device), b.to(weight.device)
    norms = [
        torch.linalg.vector_norm(torch.addmm(chunk.float(), b_chunk, a), dim=1)
        for chunk, b_chunk in zip(torch.split(weight, rows_at_once), torch.split(b, rows_at_once), strict=True)
    ]
    return torch.cat(norms).cpu()


def output_change(
    num_out: int,
    *,
    gain: torch.Tensor | None,
    base_bias: torch.Tensor | None,
    trained_bias: torch.Tensor | None,
    added_bias: torch.Tensor | None,
) -> OutputChange | None:
    """The change that turns `W x + b` into what the adapter wants there, without its LoRA product; None for no change.

    Args:
        num_out: output columns.
        gain: [out] float32, DoRA's g; it scales the product alone, never the bias.
        base_bias: [out], the base layer's own; None where it has none.
        trained_bias: [out], what stands in place of the base layer's bias (PEFT's `bias="all"` or `"lora_only"`).
        added_bias: [out], what comes on top, scaled already (PEFT's `lora_bias`).
    """
    if gain is None and trained_bias is None and added_bias is None:
        return None
    scale = torch.ones(num_out) if gain is None else gain.float()
    shift = torch.zeros(num_out)
    if base_bias is not None:
        wanted = base_bias if trained_bias is None else trained_bias
        shift = wanted.cpu().float() - base_bias.cpu().float() * scale
    else:
        assert trained_bias is None, "a trained bias needs a layer with a bias"
    if added_bias is not None:
        shift = shift + added_bias.float()
    return OutputChange(scale, shift)
