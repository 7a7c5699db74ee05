"""Where a wanted tensor lies: a whole tensor of a file, rows of one, a transposed one, or several put together.

Trainers write one layer's halves in different layouts; a place gives each of them the one form that the layer needs,
without reading a number before it is asked to. Used by `planned`; read by `weights`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from adapters.tensor_file import FLOAT_DTYPES, TensorEntry, TensorFile


class Place(Protocol):
    """A tensor that can be read: its name for messages, its shape and its stored dtype (as safetensors names it)."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def files(self) -> tuple[TensorFile, ...]:
        """The open files that `read` reads."""
        ...

    def read(self) -> torch.Tensor:
        """The numbers: `shape`, contiguous, in the stored dtype, memory of its own."""
        ...

    @property
    def extent(self) -> tuple[TensorFile, int] | None:
        """The file that holds the numbers in one piece, as they are wanted, and where they start; None elsewhere."""
        ...

    def read_into(self, memory: memoryview) -> None:
        """Fill `memory`, exactly as long as the numbers are in bytes, with what `read` gives; from any thread."""
        ...


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of an open file, or a part of it.

    Attributes:
        is_transposed: the file holds the transpose of what is wanted (two dimensions).
        rows: half-open range of the wanted tensor's rows (after the transpose); None for all.
    """

    file: TensorFile
    entry: TensorEntry
    is_transposed: bool = False
    rows: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.entry.shape[::-1] if self.is_transposed else self.entry.shape
        return shape if self.rows is None else (self.rows[1] - self.rows[0], *shape[1:])

    @property
    def files(self) -> tuple[TensorFile, ...]:
        return (self.file,)

    def cut(self, start: int, end: int) -> TensorPlace:
        """Rows `start` to `end` of this place."""
        first = self.rows[0] if self.rows else 0
        return replace(self, rows=(first + start, first + end))

    def read(self) -> torch.Tensor:
        if self.is_transposed:
            tensor = self.file.read(self.entry)[0].T
            return tensor[slice(*self.rows) if self.rows else slice(None)].contiguous()
        return self.file.read(self._row_entry())[0]

    @property
    def extent(self) -> tuple[TensorFile, int] | None:
        return None if self.is_transposed else (self.file, self._row_entry().start)

    def read_into(self, memory: memoryview) -> None:
        if self.is_transposed:
            memory[:] = bytes_of(self.read())
        else:
            self.file.read_at(self._row_entry().start, [memory])

    def _row_entry(self) -> TensorEntry:
        if self.rows is None:
            return self.entry
        num_bytes = (self.entry.end - self.entry.start) // self.entry.shape[0]
        start, end = (self.entry.start + row * num_bytes for row in self.rows)
        return self.entry._replace(shape=self.shape, start=start, end=end)


@dataclass(frozen=True)
class BlockPlace:
    """Tensors put together along their rows; with `offsets`, as blocks of a larger tensor that is zero elsewhere.

    This is how adapters for separate q, k and v become one for a fused layer: their A are stacked, `[R1 + R2, in]`, and
    their B are blocks, each with rows and columns of its own.

    Attributes:
        parts: [r_i, c_i] each, of one stored dtype.
        offsets: first row of each part in the whole, or None to stack rows of equal width.
        num_rows: rows of the whole; used with `offsets`.
    """

    parts: tuple[TensorPlace, ...]
    offsets: tuple[int, ...] | None = None
    num_rows: int = 0

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        if self.offsets is None:
            return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])
        return (self.num_rows, sum(part.shape[1] for part in self.parts))

    @property
    def files(self) -> tuple[TensorFile, ...]:
        return tuple(file for part in self.parts for file in part.files)

    @property
    def extent(self) -> tuple[TensorFile, int] | None:
        return None

    def read_into(self, memory: memoryview) -> None:
        memory[:] = bytes_of(self.read())

    def read(self) -> torch.Tensor:
        tensors = [part.read() for part in self.parts]
        if self.offsets is None:
            return torch.cat(tensors)
        whole = torch.zeros(self.shape, dtype=FLOAT_DTYPES[self.dtype])
        column = 0
        for tensor, row in zip(tensors, self.offsets, strict=True):
            whole[row : row + tensor.shape[0], column : column + tensor.shape[1]] = tensor
            column += tensor.shape[1]
        return whole


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, as bytes."""
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data
