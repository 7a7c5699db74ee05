"""Penalties follow their formulas however rows come, grow and go, and a step costs the same at any length."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, overload

import pytest
import torch

import engine.penalties
from engine.request import SamplingParams
from engine.sampler import Sampler, SamplerRow
from engine.transfer import to_device

VOCAB = 701
PARAMS = [
    SamplingParams(temperature=0, repetition_penalty=1.7),
    SamplingParams(temperature=0, frequency_penalty=0.3, presence_penalty=-0.4),
    SamplingParams(temperature=0, repetition_penalty=0.6, frequency_penalty=-0.2),
    SamplingParams(temperature=0),
]


def expected_token(logits: torch.Tensor, row: SamplerRow) -> int:
    """By the formulas, from the whole prompt and output."""
    values, params = logits.tolist(), row.params
    for token_id in {*row.prompt_token_ids, *row.output_token_ids}:
        value = values[token_id]
        values[token_id] = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
    for token_id, count in Counter(row.output_token_ids).items():
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return values.index(max(values))


def test_tokens_are_those_of_the_formulas_while_rows_come_grow_and_go() -> None:
    draw = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(0, "cpu")
    rows: list[SamplerRow] = []
    num_changed = num_rows = 0
    for _ in range(300):
        while len(rows) < draw.choice([1, 5, 20]):
            prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([0, 1, 40, 600]))]
            rows.append(SamplerRow(PARAMS[num_rows % len(PARAMS)], None, prompt, []))
            num_rows += 1
        draw.shuffle(rows)
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 0.7
        before = logits.clone()
        token_ids, _ = sampler.sample(logits, rows)
        assert torch.equal(logits, before)
        assert token_ids == [expected_token(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]
        num_changed += sum(left != right for left, right in zip(token_ids, logits.argmax(-1).tolist(), strict=True))
        for row, token_id in zip(rows, token_ids, strict=True):
            row.output_token_ids.append(token_id)  # type: ignore[attr-defined]
        rows = [row for row in rows if draw.random() > 0.02]
    assert num_rows > 50 and num_changed > 300


class Read(Sequence[int]):
    """Tokens that count how many of them were looked at."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_read = 0

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self.token_ids[index]
        self.num_read += len(found) if isinstance(found, list) else 1
        return found

    def __len__(self) -> int:
        return len(self.token_ids)


def test_a_step_lists_new_tokens_alone_however_long_the_output_is(monkeypatch: pytest.MonkeyPatch) -> None:
    num_sent = []

    def counted(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = to_device(values, dtype, device)
        num_sent.append(tensor.numel())
        return tensor

    monkeypatch.setattr(engine.penalties, "to_device", counted)
    params = SamplingParams(temperature=0, repetition_penalty=1.1, frequency_penalty=0.5)
    rows = [SamplerRow(params, None, Read(list(range(300))), Read([])) for _ in range(4)]
    sampler = Sampler(0, "cpu")
    costs = []
    for length in range(1, 1001):
        for row in rows:
            for token_ids in (row.prompt_token_ids, row.output_token_ids):
                assert isinstance(token_ids, Read)
                token_ids.num_read = 0
            row.output_token_ids.token_ids.append(length % VOCAB)  # type: ignore[attr-defined]
        num_sent.clear()
        sampler.sample(torch.zeros(4, VOCAB), rows)
        reads = [(row.prompt_token_ids.num_read, row.output_token_ids.num_read) for row in rows]  # type: ignore[attr-defined]
        costs.append((sorted(set(reads)), sum(num_sent)))
    assert costs[0][0] == [(300, 1)]  # The prompt once, at the start.
    assert len({str(cost) for cost in costs[1:]}) == 1 and costs[1][0] == [(0, 1)]


def test_what_is_kept_for_a_row_goes_with_it() -> None:
    sampler = Sampler(0, "cpu")
    for number in range(100):
        rows = [SamplerRow(PARAMS[0], None, [number, 3], [5]) for _ in range(10)]
        sampler.sample(torch.zeros(10, VOCAB), rows)
        del rows
    assert sampler._penalties._counts.shape == (16, 256)
    assert len(sampler._penalties._known) == 0
