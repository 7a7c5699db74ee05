"""Penalties on tokens that a request has seen: repetition, frequency and presence.

Owns what was counted: the distinct tokens of each penalised request and how often its output holds them, on the logits'
device. Each token is listed once, in the step that first sees it, so a step costs the host the same however long prompt
and output are. Knows nothing of requests' lives: what is kept for a row goes with the row. Used by `engine/sampler`.

N places of the table, C its columns, P penalised rows of a step, L distinct tokens of the one that has most, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.transfer import to_device

_MIN_PLACES, _MIN_COLUMNS = 8, 256


class CountedRow(Protocol):
    """What is read of a request; both sequences only grow."""

    @property
    def params(self) -> SamplingParams:
        """Its penalties."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Its prompt, which repetition alone looks at."""

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Its answer so far."""


@dataclass
class _Counts:
    """One row's tokens: `columns[token_id]` is where in row `place` of the table it stands, `counts` how often."""

    place: int
    columns: dict[int, int] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    num_read: int = 0

    def note(self, token_id: int, times: int) -> int:
        """Count a token; returns its column."""
        column = self.columns.setdefault(token_id, len(self.counts))
        if column == len(self.counts):
            self.counts.append(0)
        self.counts[column] += times
        return column


class Penalties:
    """Applies penalties to logits; `device` is theirs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: weakref.WeakKeyDictionary[CountedRow, _Counts] = weakref.WeakKeyDictionary()
        self._free = list(range(_MIN_PLACES))
        self._token_ids = torch.zeros(_MIN_PLACES, _MIN_COLUMNS, dtype=torch.int64, device=device)
        self._counts = torch.zeros(_MIN_PLACES, _MIN_COLUMNS, device=device)

    def apply_(self, logits: Tensor, rows: Sequence[CountedRow], picked: Sequence[int]) -> None:
        """Change the logits [R, V] float32 of the rows `picked`, which have penalties.

        Ids in the prompt or the output have their positive logits divided and their negative ones multiplied by
        `repetition_penalty` (CTRL, arXiv:1909.05858); then those in the output lose `frequency_penalty` times their count,
        and `presence_penalty` once.
        """
        try:
            known = self._read(rows, picked, logits.shape[1])
        except Exception:
            # The table may lack what was counted: these rows are read anew when the step is computed again.
            for index in picked:
                self._known.pop(rows[index], None)
            raise
        touched = [(index, known[index]) for index in picked if known[index].counts]
        if not touched:
            return
        params = [rows[index].params for index, _ in touched]
        where = to_device(
            [(index, counts.place, len(counts.counts) - 1) for index, counts in touched], torch.int64, self._device
        )
        row_ids, places, last_columns = where.unsqueeze(-1).unbind(1)
        factors = to_device(
            [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in params],
            logits.dtype,
            self._device,
        )
        repetition, frequency, presence = factors.unsqueeze(-1).unbind(1)
        # Rows with fewer tokens than others repeat their last one, so that the same value is written twice.
        columns = torch.arange(max(len(counts.counts) for _, counts in touched), device=self._device)
        columns = torch.minimum(columns, last_columns)
        token_ids, counts = self._token_ids[places, columns], self._counts[places, columns]
        values = logits[row_ids, token_ids]
        values = torch.where(values < 0, values * repetition, values / repetition)
        logits[row_ids, token_ids] = values - (frequency * counts + presence * (counts > 0))

    def _read(self, rows: Sequence[CountedRow], picked: Sequence[int], vocab_size: int) -> dict[int, _Counts]:
        """Bring the table up to date: list what these rows' prompts and outputs hold since the last step."""
        changed: dict[tuple[int, int], tuple[int, int]] = {}
        known: dict[int, _Counts] = {}
        for index in picked:
            row = rows[index]
            counts = self._known.get(row)
            new: list[tuple[int, int]] = []
            if counts is None:
                counts = self._known[row] = self._add(row)
                if row.params.repetition_penalty != 1.0:
                    # Ids past the head's rows are left out: placeholders of media may lie there.
                    new = [(token_id, 0) for token_id in row.prompt_token_ids if token_id < vocab_size]
            output = row.output_token_ids
            new += [(output[position], 1) for position in range(counts.num_read, len(output))]
            counts.num_read = len(output)
            for token_id, times in new:
                column = counts.note(token_id, times)
                changed[counts.place, column] = (token_id, counts.counts[column])
            known[index] = counts
        if changed:
            self._make_room(max(column for _, column in changed) + 1)
            written = [(*at, *values) for at, values in changed.items()]
            places, columns, token_ids, numbers = to_device(written, torch.int64, self._device).unbind(1)
            self._token_ids[places, columns] = token_ids
            self._counts[places, columns] = numbers.to(self._counts.dtype)
        return known

    def _add(self, row: CountedRow) -> _Counts:
        """A place in the table for as long as the row lives."""
        if not self._free:
            num_places = self._counts.shape[0]
            self._resize(2 * num_places, self._counts.shape[1])
            self._free += range(num_places, 2 * num_places)
        place = self._free.pop()
        weakref.finalize(row, self._free.append, place).atexit = False
        return _Counts(place)

    def _make_room(self, num_columns: int) -> None:
        size = self._counts.shape[1]
        if num_columns > size:
            self._resize(self._counts.shape[0], max(num_columns, 2 * size))

    def _resize(self, num_places: int, num_columns: int) -> None:
        for name in ("_token_ids", "_counts"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(num_places, num_columns)
            new[: old.shape[0], : old.shape[1]] = old
            setattr(self, name, new)


def has_penalties(params: SamplingParams) -> bool:
    """Whether any of the three is set."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
