"""Reading safetensors: equal to the reference library on good files, a sentence on everything else."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adapters.errors import AdapterRefused
from adapters.tensor_file import TensorFile


def write(path: Path, header: Any, body: bytes = b"", header_len: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if header_len is None else header_len) + raw + body)
    return path


def refusal(path: Path) -> str:
    started = time.thread_time()
    with pytest.raises(AdapterRefused) as caught, TensorFile(path):
        pass
    assert time.thread_time() - started < 1.0
    assert str(path.parent) not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_those_that_the_reference_library_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    wrote = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype), "empty": torch.empty(0, 4, dtype=dtype)}
    save_file(wrote, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert set(file.entries) == set(wrote)
        for name in ("a", "b"):
            assert torch.equal(file.read(file.entries[name])[0], wrote[name])
        assert file.entries["empty"].shape == (0, 4)
        file.check_unchanged()


@pytest.mark.parametrize("num_cut", [1, 100, 500])
def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path, num_cut: int) -> None:
    save_file({"a": torch.randn(100, 5)}, tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(raw[:-num_cut])
    assert f"ends {num_cut} bytes too early" in refusal(tmp_path / "x.safetensors")


def entry(start: int, end: int, **fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]} | fields


@pytest.mark.parametrize(
    ("header", "body", "header_len", "said"),
    [
        (b"", b"", None, "too short"),
        ({}, b"", 2**40, "claims 1099511627776 bytes"),
        ({}, b"", 2**63, "truncated"),
        (b"not json at all", b"", None, "is not JSON"),
        (b"[" * 100_000, b"", None, "is not JSON"),
        (b"\xff\xfe" * 10, b"", None, "is not JSON"),
        ([1], b"", None, "not a JSON object"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"0" * 12, None, "overlap"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, b"0" * 12, None, "hole"),
        ({"a": entry(0, 4)}, b"0" * 12, None, "belong to no tensor"),
        ({"a": entry(0, 4, shape=[2])}, b"0" * 4, None, "does not add up"),
        ({"a": entry(0, 4, shape=[-1])}, b"0" * 4, None, "does not add up"),
        ({"a": entry(0, 4, shape=[1.0])}, b"0" * 4, None, "does not add up"),
        ({"a": entry(0, 4, shape=[True])}, b"0" * 4, None, "does not add up"),
        ({"a": entry(0, 4, shape=[2**62, 2**62, 0, 1])}, b"0" * 4, None, "does not add up"),
        ({"a": entry(0, 4, dtype="F99")}, b"0" * 4, None, "malformed"),
        ({"a": {"shape": [1]}}, b"", None, "malformed"),
        ({"a": 3}, b"", None, "malformed"),
        ({"a": entry(0, 4, data_offsets=[0])}, b"0" * 4, None, "malformed"),
        (b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "a": 3}', b"0000", None, "twice"),
    ],
)
def test_malformed_files_are_refused_with_a_reason(
    tmp_path: Path, header: Any, body: bytes, header_len: int | None, said: str
) -> None:
    assert said in refusal(write(tmp_path / "x.safetensors", header, body, header_len))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    assert "not a regular file" in refusal(tmp_path / "x.safetensors")


def test_a_file_that_shrinks_while_it_is_read_gives_an_error_and_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.randn(100_000)}, path)
    with TensorFile(path) as file:
        os.truncate(path, 1000)
        with pytest.raises(AdapterRefused, match="written to while it was read"):
            file.read(file.entries["a"])


def test_a_file_that_was_overwritten_while_it_was_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    with TensorFile(path) as file:
        os.utime(path, ns=(1, 1))
        with pytest.raises(AdapterRefused, match="written to while it was read"):
            file.check_unchanged()
