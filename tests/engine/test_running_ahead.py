"""Steps that are launched before the one before them is read give the same answers as steps one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.config import LoRAModule
from engine.request import Delta, TokenPrompt
from tests.oracles import random_ids

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.8, seed=7, max_tokens=12, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.5, frequency_penalty=0.7, max_tokens=12, ignore_eos=True
    ),
    "logprobs": SamplingParams(temperature=0, logprobs=3, max_tokens=12, ignore_eos=True),
    "one": SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
}


def answers(engine: Engine, names: list[str | None]) -> list[list[Delta]]:
    started = [
        engine.start_sync(TokenPrompt(random_ids(5 + row, row)), sampling, lora=name)[0]
        for row, (sampling, name) in enumerate((sampling, name) for sampling in SAMPLINGS.values() for name in names)
    ]
    return [[delta for delta in answer if delta.token_ids] for answer in started]


@pytest.fixture
def engines(llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path) -> dict[bool, Engine]:
    modules = [LoRAModule(name, str(path)) for name, path in llama_adapters.items()]
    return {
        is_ahead: Engine(
            EngineConfig(
                model=str(llama_dir), lora_modules=modules, async_scheduling=is_ahead, max_num_seqs=7,
                adapter_dir=str(tmp_path / str(is_ahead)),
            ),
            checks_integrity=True,
        )
        for is_ahead in (False, True)
    }  # fmt: skip


def test_tokens_and_log_probabilities_are_the_same_for_every_way_to_sample(engines: dict[bool, Engine]) -> None:
    names = [None, "qv", "all"]
    one_by_one, ahead = answers(engines[False], names), answers(engines[True], names)
    for expected, got in zip(one_by_one, ahead, strict=True):
        assert [delta.token_ids for delta in got] == [delta.token_ids for delta in expected]
        for left, right in zip(expected, got, strict=True):
            assert [entry.token_id for entry in left.logprobs] == [entry.token_id for entry in right.logprobs]
            assert [entry.logprob for entry in right.logprobs] == pytest.approx(
                [entry.logprob for entry in left.logprobs], abs=1e-4
            )
    for engine in engines.values():
        engine.close()
        engine.check_integrity()


def test_a_request_that_ends_by_its_text_costs_one_row_of_one_step_at_most(engines: dict[bool, Engine]) -> None:
    stop = answers(engines[False], [None])[0][4].token_ids[0]
    num_steps = {}
    for is_ahead, engine in engines.items():
        before = engine.stats().num_steps
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
        answer = engine.start_sync(TokenPrompt(random_ids(5, 0)), sampling)[0]
        deltas = list(answer)
        assert deltas[-1].finish_reason == "stop" and sum(len(delta.token_ids) for delta in deltas) <= 5
        engine.close()
        num_steps[is_ahead] = engine.stats().num_steps - before
    assert num_steps[True] == num_steps[False] + 1


def test_a_lone_request_whose_tokens_are_read_first_ends_without_a_fault(
    engines: dict[bool, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines[True]
    deltas = list(engine.start_sync(TokenPrompt(random_ids(5, 0)), SAMPLINGS["penalties"])[0])
    assert deltas[-1].finish_reason == "length"
    for each in engines.values():
        each.close()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
