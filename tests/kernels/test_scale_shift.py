"""Scale and shift by adapter: the plain version and the Triton kernel against float64, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

import kernels
from kernels import LoraMetadata, LoraSegment, reference
from tests.kernels.interpreted import call_interpreted

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
IS_USED = (1, 0, 1)
CASES = [
    # tokens, columns, segments
    (1, 48, [LoraSegment(0, 0, 1)]),
    (63, 300, [LoraSegment(1, 0, 20), LoraSegment(2, 20, 41), LoraSegment(0, 45, 63)]),
    (133, 257, [LoraSegment(2, 5, 120), LoraSegment(1, 120, 133)]),
    (7, 16, []),
]


def check(function: Callable[..., None], device: str, dtype: torch.dtype, *, has_tiles: bool) -> None:
    """Every case, with NaN in the rows that nobody may read, on strided rows."""
    for num_tokens, num_columns, segments in CASES:
        generator = torch.Generator().manual_seed(num_tokens)
        wide = torch.randn(num_tokens, num_columns + 3, generator=generator).to(dtype).to(device)
        output = wide[:, :num_columns]
        scale, shift = (torch.randn(3, num_columns, generator=generator).to(device) for _ in range(2))
        scale[1] = shift[1] = torch.nan
        expected = output.double()
        for lora_slot, start, end in segments:
            if IS_USED[lora_slot]:
                expected[start:end] = expected[start:end] * scale[lora_slot].double() + shift[lora_slot].double()
        assert not segments or not torch.equal(expected, output.double()), "the oracle does nothing"
        metadata = LoraMetadata(num_tokens, 3, torch.device(device), max_columns=4, max_in=4, has_tiles=has_tiles)
        metadata.update(segments, num_tokens)
        margin = wide[:, num_columns:].clone()
        is_used = torch.tensor(IS_USED, dtype=torch.int32, device=device)
        function(output, scale, shift, is_used, [bool(flag) for flag in IS_USED], metadata)
        torch.testing.assert_close(output.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(wide[:, num_columns:], margin), "wrote past the last column"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_plain_version_equals_float64(dtype: torch.dtype) -> None:
    check(reference.scale_shift_, "cpu", dtype, has_tiles=False)


def check_interpreted() -> None:
    """On the CPU by Triton's interpreter; for a process started with TRITON_INTERPRET=1."""
    from kernels import scale_shift

    for dtype in (torch.float32, torch.float16):
        check(scale_shift.scale_shift_, "cpu", dtype, has_tiles=True)


@needs_triton
@pytest.mark.timeout(600)  # A minute of one core, which others may be using too.
def test_the_interpreted_kernel_equals_float64() -> None:
    call_interpreted("tests.kernels.test_scale_shift", "check_interpreted")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_kernel_on_a_gpu_equals_float64(dtype: torch.dtype) -> None:
    check(kernels.scale_shift_, "cuda", dtype, has_tiles=True)
