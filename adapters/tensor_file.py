"""Reads safetensors files: the table of contents first, bytes of one tensor at a time later.

Written out here, rather than mapped into memory by the library, for two reasons: everything but the numbers can be
judged before any of them is read, and a file that a trainer overwrites while it is read gives an error instead of
killing the process (a shrinking mapped file raises SIGBUS). Format: https://github.com/huggingface/safetensors (8 bytes
little-endian header length, JSON header, tensor bytes). Knows nothing of LoRA. Called by `folder` and `weights`.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from adapters.errors import AdapterRefused

MAX_HEADER_LEN = 64 << 20
MAX_NAME_LEN = 512
MAX_TENSORS = 200_000
# buffers of one system call; the least that systems allow is 16, Linux takes 1024
_MAX_BUFFERS = 512 if os.name == "posix" else 16

# safetensors dtype -> (torch dtype, bytes per element); None where the file may hold it but it is no LoRA weight.
FLOAT_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "C64": 64, "F4": 4, "F6_E2M3": 6,
    "F6_E3M2": 6,
}  # fmt: skip


class TensorEntry(NamedTuple):
    """One row of a file's table of contents; `start` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """An open safetensors file whose table of contents has been checked against the file's size.

    Raises `AdapterRefused` with a sentence for anything that is not a whole, well-formed file, and where the file
    changes while it is open. A context manager.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file: io.BufferedReader = _open_regular(path)
        self._lock = threading.Lock()
        try:
            self._stamp = _stamp(self._file)
            self.entries: dict[str, TensorEntry] = _read_entries(self._file, self.name, self._stamp[0])
        except BaseException:
            self._file.close()
            raise

    def read(self, entry: TensorEntry) -> tuple[torch.Tensor, bytearray]:
        """The tensor (any shape, its stored dtype) and the bytes that it shares memory with."""
        buffer = bytearray(entry.end - entry.start)
        self.read_at(entry.start, [memoryview(buffer)])
        tensor = torch.frombuffer(buffer, dtype=FLOAT_DTYPES[entry.dtype]).reshape(entry.shape)
        return tensor, buffer

    def read_at(self, position: int, memories: Sequence[memoryview]) -> None:
        """Fill `memories` one after the other from a byte offset on. From any thread, also several at once."""
        left = deque(memories)
        while left:
            num_read = self._read_some(position, left)
            if num_read == 0 and left[0].nbytes:
                raise self._changed()
            position += num_read
            while left and num_read >= left[0].nbytes:
                num_read -= left.popleft().nbytes
            if left and num_read:
                left[0] = left[0][num_read:]

    def _read_some(self, position: int, memories: Collection[memoryview]) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), list(memories)[:_MAX_BUFFERS], position)
        with self._lock:
            self._file.seek(position)
            return self._file.readinto(next(iter(memories)))

    def check_unchanged(self) -> None:
        """Raise `AdapterRefused` if the file was written to since it was opened."""
        if _stamp(self._file) != self._stamp:
            raise self._changed()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _changed(self) -> AdapterRefused:
        return AdapterRefused([f"{self.name} was written to while it was read; load it again when it is complete"])


def _open_regular(path: Path) -> io.BufferedReader:
    """Open a file without buffering surprises; refuses pipes and devices, which could block for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise AdapterRefused([f"{path.name} is not a regular file"])
    return path.open("rb")


def _stamp(file: io.BufferedReader) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _read_entries(file: io.BufferedReader, name: str, file_size: int) -> dict[str, TensorEntry]:
    prefix = file.read(8)
    header_len = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or header_len < 2:
        raise _broken(name, "it is too short to hold a header")
    if header_len > MAX_HEADER_LEN or header_len > file_size - 8:
        raise _broken(
            name,
            f"its header claims {header_len} bytes in a file of {file_size} (truncated, or not safetensors at all)",
        )
    header = _parse_header(file.read(header_len), name)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise _broken(name, f"it lists {len(header)} tensors, over the limit of {MAX_TENSORS}")
    data_start = 8 + header_len
    entries = {key: _entry(key, row, data_start, name) for key, row in header.items()}
    _check_cover(entries, data_start, file_size, name)
    return entries


def _parse_header(raw: bytes, name: str) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_dict)
    except _DuplicateKey as error:
        raise _broken(name, f"it lists {str(error)[:200]!r} twice") from None
    except (ValueError, RecursionError):
        raise _broken(name, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _broken(name, "its header is not a JSON object")
    return header


class _DuplicateKey(ValueError):
    pass


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return result


def _entry(key: str, row: Any, data_start: int, file_name: str) -> TensorEntry:
    try:
        dtype, shape, (start, end) = row["dtype"], row["shape"], row["data_offsets"]
        numbers = [*shape, start, end]
        is_valid = {*map(type, numbers)} == {int} and min(numbers) >= 0 and len(shape) <= 8
        num_bits = math.prod(shape) * _ITEM_BITS[dtype]
    except (TypeError, KeyError, ValueError):
        raise _broken(file_name, f"the header's entry for {key[:200]!r} is malformed") from None
    if not is_valid or (end - start) * 8 != num_bits or len(key) > MAX_NAME_LEN:
        raise _broken(file_name, f"the header's entry for {key[:200]!r} does not add up")
    return TensorEntry(key, dtype, tuple(shape), data_start + start, data_start + end)


def _check_cover(entries: Mapping[str, TensorEntry], data_start: int, file_size: int, name: str) -> None:
    """The tensors must fill the rest of the file exactly, without holes or overlaps."""
    position = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != position:
            raise _broken(name, f"the bytes of {entry.name[:200]!r} overlap another tensor's or leave a hole")
        position = entry.end
    if position > file_size:
        raise _broken(name, f"it ends {position - file_size} bytes too early (truncated); copy or download it again")
    if position < file_size:
        raise _broken(name, f"{file_size - position} bytes at its end belong to no tensor")


def _broken(name: str, what: str) -> AdapterRefused:
    return AdapterRefused([f"{name} is not a whole safetensors file: {what}"])
