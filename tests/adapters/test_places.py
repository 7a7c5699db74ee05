"""Parts, transposes and blocks of stored tensors are what torch makes of the whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adapters.places import BlockPlace, Place, TensorPlace
from adapters.tensor_file import TensorFile

TENSORS = {
    "a": torch.arange(21, dtype=torch.float32).reshape(7, 3).bfloat16(),
    "b": torch.arange(100, 110, dtype=torch.float32).reshape(5, 2).bfloat16(),
    "v": torch.arange(6.0),
}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[TensorFile]:
    save_file(TENSORS, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as opened:
        yield opened


def place(file: TensorFile, name: str, **settings: bool) -> TensorPlace:
    return TensorPlace(file, file.entries[name], **settings)


def check(found: Place, wanted: torch.Tensor) -> None:
    read = found.read()
    assert torch.equal(read, wanted) and read.dtype == wanted.dtype and read.is_contiguous()
    assert found.shape == tuple(wanted.shape)
    memory = bytearray(wanted.nbytes)
    found.read_into(memoryview(memory))
    assert torch.equal(torch.frombuffer(memory, dtype=wanted.dtype).reshape(wanted.shape), wanted)
    if found.extent is not None:
        opened, start = found.extent
        raw = (Path(str(opened._file.name))).read_bytes()[start : start + wanted.nbytes]
        assert raw == bytes(memory)


def test_whole_tensors_and_their_rows(file: TensorFile) -> None:
    check(place(file, "a"), TENSORS["a"])
    check(place(file, "a").cut(2, 6), TENSORS["a"][2:6])
    check(place(file, "a").cut(2, 6).cut(1, 3), TENSORS["a"][3:5])
    check(place(file, "v").cut(1, 4), TENSORS["v"][1:4])


def test_transposed_tensors_and_their_rows(file: TensorFile) -> None:
    transposed = place(file, "a", is_transposed=True)
    check(transposed, TENSORS["a"].T.contiguous())
    check(transposed.cut(1, 3), TENSORS["a"].T[1:3].contiguous())
    check(transposed.cut(1, 3).cut(1, 2), TENSORS["a"].T[2:3].contiguous())
    assert transposed.extent is None


def test_stacked_tensors_and_blocks(file: TensorFile) -> None:
    a, b = place(file, "a"), place(file, "b")
    check(BlockPlace((a.cut(0, 2), a.cut(5, 7))), TENSORS["a"][[0, 1, 5, 6]])
    blocks = torch.zeros(14, 5, dtype=torch.bfloat16)
    blocks[9:14, :2], blocks[1:8, 2:] = TENSORS["b"], TENSORS["a"]
    check(BlockPlace((b, a), (9, 1), 14), blocks)
