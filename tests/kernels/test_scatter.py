"""Scatter into strided places: the plain version and the Triton kernel against indexing, interpreted and on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

import kernels
from kernels import reference
from tests.kernels.interpreted import call_interpreted

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32]


def check(function: Callable[..., None], device: str, dtype: torch.dtype) -> None:
    """Places of odd shapes, in one piece and strided, at odd offsets of the source; everything between stays as it was."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1, 1), (1, 7, 9), (3, 5, 5), (63, 4, 16), (133, 64, 64), (257, 33, 40), (16, 1024, 1024), (2, 3, 3)]
    source = torch.randint(-9000, 9000, (60_000,), generator=generator).to(dtype).to(device)
    targets = [torch.full((rows + 1, stride), 77, dtype=dtype, device=device) for rows, _, stride in shapes]
    expected = [target.clone() for target in targets]
    table, start = [], 3
    for (num_rows, row_len, stride), target, wanted in zip(shapes, targets, expected, strict=True):
        table.append([target.data_ptr(), start, num_rows, row_len, stride])
        wanted[:num_rows, :row_len] = source[start : start + num_rows * row_len].view(num_rows, row_len)
        start += num_rows * row_len + 1
    assert not torch.equal(targets[4], expected[4])
    function(source, torch.tensor(table, device=device), max(rows * length for rows, length, _ in shapes))
    function(source, torch.zeros(0, 5, dtype=torch.int64, device=device), 0)
    for target, wanted in zip(targets, expected, strict=True):
        assert torch.equal(target, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_version_equals_indexing(dtype: torch.dtype) -> None:
    check(reference.scatter_rows_, "cpu", dtype)
    check(kernels.scatter_rows_, "cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_equals_indexing_on_a_gpu(dtype: torch.dtype) -> None:
    check(kernels.scatter_rows_, "cuda", dtype)


def check_interpreted() -> None:
    """The same by Triton's interpreter; for a process started with TRITON_INTERPRET=1."""
    from kernels import scatter

    for dtype in DTYPES:
        check(scatter.scatter_rows_, "cpu", dtype)
    sys.stdout.write("swept")


@needs_triton
@pytest.mark.timeout(600)  # A minute of one core, which others may be using too.
def test_kernel_equals_indexing_in_the_interpreter() -> None:
    assert call_interpreted("tests.kernels.test_scatter", "check_interpreted") == "swept"
