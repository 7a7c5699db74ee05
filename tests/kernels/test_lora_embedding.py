"""LoRA of an embedding: the plain version and the Triton kernel against float64, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

import kernels
from kernels import LoraMetadata, LoraSegment
from tests.kernels.interpreted import call_interpreted

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest ‖output - oracle‖ / ‖oracle - base‖; gathered numbers are exact, so only the output is rounded."""
RANKS = (4, 64, 0, 8, 1)
CASES = [(1, 72, 64), (63, 40, 64), (133, 136, 64), (600, 24, 64), (133, 48, 100), (7, 24, 5)]
"""Tokens, width and the rank of the buffers."""


def check(
    case: tuple[int, int, int], dtype: torch.dtype, device: str, function: Callable[..., None], has_tiles: bool
) -> None:
    """Mixed ranks, an unused row, base rows before, between and after; NaN wherever nothing may be read."""
    num_tokens, width, max_rank = case
    generator = torch.Generator().manual_seed(num_tokens)
    ranks = [min(rank, max_rank) for rank in RANKS] if max_rank != 100 else [100, 65, 0, 3, 100]
    vocab = 50
    lora_a = torch.full((5, vocab, max_rank), torch.nan)
    lora_b = torch.full((5, width, max_rank), torch.nan)
    for row, rank in enumerate(ranks):
        lora_a[row, :, :rank] = torch.randn(vocab, rank, generator=generator)
        lora_b[row, :, :rank] = torch.randn(width, rank, generator=generator)
    lora_a, lora_b = lora_a.to(device, dtype), lora_b.to(device, dtype)
    base = torch.randn(num_tokens, width, generator=generator).to(device, dtype)
    token_ids = torch.randint(vocab, (num_tokens,), generator=generator).to(device)
    cut = [num_tokens * part // 9 for part in range(10)]
    segments = [LoraSegment(3, cut[1], cut[4]), LoraSegment(1, cut[4], cut[6]), LoraSegment(4, cut[7], cut[8])]
    segments = [segment for segment in [*segments, LoraSegment(0, cut[8], None)] if segment[1] != segment[2]]
    metadata = LoraMetadata(num_tokens, 4, torch.device(device), max_columns=1, max_in=1, has_tiles=has_tiles)
    metadata.update(segments, num_tokens)
    expected = base.double()
    for row, start, end in segments:
        a = lora_a[row, token_ids[start:end], : ranks[row]].double()
        expected[start:end] += a @ lora_b[row, :, : ranks[row]].double().T

    outputs = [base.clone(), base.clone()]
    for output in outputs:
        device_ranks = torch.tensor(ranks, dtype=torch.int32, device=device)
        function(output, token_ids, lora_a, lora_b, device_ranks, ranks, metadata)

    change = float((expected - base).norm())
    assert change > 0.1, "the adapters must do something"
    is_base = (expected == base.double()).all(1)
    assert torch.equal(outputs[0][is_base], base[is_base]), "base rows changed"
    error = float((outputs[0] - expected).norm()) / change
    print(f"embedding {case} {dtype}: relative error {error:.2e}")  # noqa: T201 - read with -s
    assert error < TOLERANCE[dtype]
    assert torch.equal(*outputs), "two runs differ"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plain_version_equals_float64(case: tuple[int, int, int]) -> None:
    check(case, torch.float32, "cpu", kernels.lora_embedding_add_, has_tiles=False)


def check_interpreted() -> None:
    """All cases by Triton's interpreter; for a process started with TRITON_INTERPRET=1."""
    from kernels.lora_embedding import lora_embedding_add_

    for case in CASES:
        check(case, torch.float32, "cpu", lora_embedding_add_, has_tiles=True)
    check(CASES[1], torch.float16, "cpu", lora_embedding_add_, has_tiles=True)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.timeout(600)  # A minute of one core, which others may be using too.
def test_the_interpreted_kernel_equals_float64() -> None:
    call_interpreted("tests.kernels.test_lora_embedding", "check_interpreted")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_on_a_gpu_equals_float64(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(case, dtype, "cuda", kernels.lora_embedding_add_, has_tiles=True)
