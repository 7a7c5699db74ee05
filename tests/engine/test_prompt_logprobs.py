"""Log probabilities of prompts equal transformers' own log softmax, and PEFT's, however the prompt is computed."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from engine import LLM, Engine, EngineConfig, SamplingParams
from engine import logprobs as engine_logprobs
from engine.answer import Answer
from engine.batch import MAX_PROMPT_ROWS
from engine.config import LoRAModule
from engine.errors import AppError, ContextTooLong, InvalidRequest
from engine.request import AudioPart, Delta, TextPrompt, TokenLogprob, TokenPrompt
from engine.runner import LaunchedStep
from engine.scheduler import Plan, Scheduler
from engine.state import RequestState
from tests.conftest import LLAMA, SPEECH
from tests.oracles import Oracle, make_adapter, random_ids, tone
from tests.pace import held_before

Entries = Sequence[TokenLogprob | None]

LONG = 2 * MAX_PROMPT_ROWS + 40
PLAN = [
    ("all", random_ids(LONG, 1)), (None, random_ids(70, 2)), ("head", random_ids(70, 2)), ("all", random_ids(70, 2)),
    (None, random_ids(1, 3)), ("head", random_ids(2, 4)), ("all", random_ids(17, 5)),
]  # fmt: skip
"""Adapters and prompts: one beyond two slices, the same one for all, and the shortest."""
ENDS = [0, 12, 1, 0, 0, 3, 1]
"""Tokens that each of them generates."""
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(
    llama_dir: Path, llama_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters") / "head"
    head = make_adapter(llama_dir, LLAMA, folder, targets=["lm_head", "q_proj"], rank=5, seed=5)
    return {"all": llama_adapters["all"], "head": head}


@pytest.fixture(scope="module")
def oracle(llama_dir: Path, adapters: dict[str, Path]) -> Oracle:
    return Oracle(llama_dir, LLAMA, adapters)


def make_engine(folder: Path, adapters: dict[str, Path], root: Path, **settings: object) -> Engine:
    return Engine(
        EngineConfig(
            model=str(folder), max_loras=2, max_lora_rank=8, max_model_len=400, adapter_dir=str(root),
            lora_modules=[LoRAModule(name, str(path)) for name, path in adapters.items()], **settings,  # type: ignore[arg-type]
        ),
        checks_integrity=True,
    )  # fmt: skip


def asking(max_tokens: int, num_top: int = 2) -> SamplingParams:
    # A temperature that must not matter.
    return SamplingParams(temperature=0.3, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=num_top)


def scored(answer: Answer) -> Entries:
    """The answer's entries, which come in one event, with its first token or its end."""
    deltas: list[Delta] = list(answer)
    (with_entries,) = [delta for delta in deltas if delta.prompt_logprobs]
    assert with_entries is deltas[1], "the receipt comes first, then this"
    assert answer.finish_reason == "length" and len(with_entries.prompt_logprobs) == len(answer.prompt_token_ids)
    return list(with_entries.prompt_logprobs)


def check(entries: Entries, token_ids: Sequence[int], logits: torch.Tensor, num_top: int = 2) -> None:
    """Compare with [P, V] logits of the whole prompt."""
    assert len(entries) == len(token_ids) and entries[0] is None
    for row, token_id, entry in zip(logits.log_softmax(-1), token_ids[1:], entries[1:], strict=False):
        assert entry is not None and entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=2e-4)
        values, ids = row.topk(num_top)
        assert [top_id for top_id, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=2e-4)


def start_all(engine: Engine) -> tuple[list[Answer], list[Answer]]:
    """Those of `PLAN`, and neighbours that ask for nothing; all in the queue before a step is computed."""
    with held_before(engine, len(PLAN) + 3):
        answers = [
            engine.start_sync(TokenPrompt(prompt), asking(max_tokens), lora=name or "none")[0]
            for (name, prompt), max_tokens in zip(PLAN, ENDS, strict=True)
        ]
        others = [engine.start_sync(TokenPrompt(PLAN[1][1]), GREEDY, lora=name)[0] for name in ("none", "all", "head")]
    return answers, others


def check_all(answers: Sequence[Answer], oracle: Oracle) -> None:
    for answer, (name, prompt), max_tokens in zip(answers, PLAN, ENDS, strict=True):
        check(scored(answer), prompt, oracle.logits(prompt, name))
        assert answer.num_output_tokens == max_tokens and answer.receipt.cached_tokens == 0


@pytest.mark.parametrize(
    ("block_size", "budget", "is_ahead", "caches"),
    [(16, 2048, False, True), (16, 2048, True, True), (4, 9, True, True), (7, 33, False, False), (16, 300, True, True)],
)
def test_a_mixed_batch_is_scored_as_transformers_and_peft_score_it(
    llama_dir: Path, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path, block_size: int, budget: int,
    is_ahead: bool, caches: bool,
) -> None:  # fmt: skip
    """At chunks shorter and longer than the prompts, twice, so that the prefix cache knows them; nobody's tokens change."""
    same = [oracle.logits(PLAN[1][1], name).log_softmax(-1) for name in (None, "head", "all")]
    assert all((one - other).abs().max() > 0.1 for one, other in itertools.pairwise(same)), "all are alike"
    engine = make_engine(
        llama_dir, adapters, tmp_path, block_size=block_size, max_num_batched_tokens=budget,
        enable_prefix_caching=caches, async_scheduling=is_ahead,
    )  # fmt: skip
    try:
        for _ in range(2):
            answers, others = start_all(engine)
            check_all(answers, oracle)
            for answer, name in zip(others, (None, "all", "head"), strict=True):
                tokens = [token_id for delta in answer for token_id in delta.token_ids]
                assert tokens == oracle.generate(PLAN[1][1], 12, name)
            assert all((answer.receipt.cached_tokens == 0) or caches for answer in others)
        assert not caches or engine.stats().prefix_hit_tokens > 0, "others find what was computed"
        assert engine.stats().kv_blocks_used == 0
    finally:
        engine.close()


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("caches", [False, True])
def test_requests_put_back_in_the_middle_of_their_prompt_are_scored_once(
    llama_dir: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ahead: bool, caches: bool
) -> None:
    put_back: list[tuple[int, int]] = []
    preempt = Scheduler._preempt

    def note(scheduler: Scheduler, state: RequestState) -> None:
        put_back.append((state.num_scored or 0, state.prompt_len))
        preempt(scheduler, state)

    monkeypatch.setattr(Scheduler, "_preempt", note)
    engine = make_engine(
        llama_dir, {}, tmp_path, block_size=4, max_num_batched_tokens=16, max_num_seqs=4,
        enable_prefix_caching=caches, async_scheduling=is_ahead,
    )  # fmt: skip
    blocks = engine._scheduler.blocks
    for block in range(40, blocks.num_blocks):  # What is left holds one request and a half.
        del blocks._free[block]
    blocks.num_blocks = 40
    del blocks._num_refs[40:]
    prompts = [random_ids(60 + row, row) for row in range(4)]
    try:
        with held_before(engine, 4):
            answers = [engine.start_sync(TokenPrompt(prompt), asking(30))[0] for prompt in prompts]
        for answer, prompt in zip(answers, prompts, strict=True):
            check(scored(answer), prompt, oracle.logits(prompt))
            assert answer.num_output_tokens == 30
    finally:
        engine.close()
    assert any(1 < known < prompt_len for known, prompt_len in put_back), "none was put back with half of them known"
    assert any(known == prompt_len for known, prompt_len in put_back), "none was put back with all of them known"


def test_a_step_that_fails_and_is_computed_again_scores_nothing_twice(
    llama_dir: Path, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama_dir, adapters, tmp_path, max_num_batched_tokens=40, async_scheduling=True)
    runner = engine._loop._runner
    launch, num_calls = runner.launch, 0

    def fail_sometimes(plan: Plan) -> LaunchedStep:
        nonlocal num_calls
        num_calls += 1
        step = launch(plan)
        if num_calls % 3 == 2:
            raise RuntimeError("now and then")
        return step

    monkeypatch.setattr(runner, "launch", fail_sometimes)
    try:
        check_all(start_all(engine)[0], oracle)
    finally:
        engine.close()


def test_logits_of_a_long_prompt_are_never_there_at_once(
    llama_dir: Path, oracle: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows: list[int] = []
    engine = make_engine(llama_dir, {}, tmp_path)
    logits = engine.base.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(hidden.shape[0])
        return logits(hidden)

    monkeypatch.setattr(engine.base, "logits", spy)
    try:
        prompt = PLAN[0][1]
        (answer,) = engine.start_sync(TokenPrompt(prompt), asking(0))
        check(scored(answer), prompt, oracle.logits(prompt))
        assert num_rows == [MAX_PROMPT_ROWS, MAX_PROMPT_ROWS, LONG - 1 - 2 * MAX_PROMPT_ROWS, 1]
        num_rows.clear()
        list(engine.start_sync(TokenPrompt(prompt), GREEDY)[0])
        assert num_rows == [1] * 12, "who does not ask pays nothing"
    finally:
        engine.close()


def test_entries_are_made_by_who_reads_them_and_the_engine_keeps_none(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine's thread does between two steps, all streams wait for."""
    made_by: Counter[str] = Counter()
    kept: list[int] = []
    unpack, put = engine_logprobs.unpack_logprob, Answer.put

    def unpack_and_note(*arguments: Any) -> TokenLogprob:
        made_by[threading.current_thread().name] += 1
        return unpack(*arguments)

    def put_and_note(answer: Answer, event: Delta | AppError) -> None:
        if isinstance(event, Delta) and event.prompt_logprobs:
            kept.extend(len(state.scored_parts) for state in engine._loop._states.values())
        put(answer, event)

    monkeypatch.setattr(engine_logprobs, "unpack_logprob", unpack_and_note)
    monkeypatch.setattr(Answer, "put", put_and_note)
    engine = make_engine(llama_dir, {}, tmp_path, max_num_batched_tokens=40)
    try:
        (answer,) = engine.start_sync(TokenPrompt(PLAN[1][1]), asking(12))
        deltas = list(answer)
        assert not made_by, "nobody has looked at them"
        (entries,) = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
        assert len(list(entries)) == 70
        assert made_by == {threading.current_thread().name: 69}
        assert kept == [0], "they were delivered while the answer went on, and stayed on its state"
    finally:
        engine.close()


def test_each_of_n_answers_has_them(tiny_engine: Engine) -> None:
    answers = tiny_engine.start_sync(TokenPrompt(random_ids(30, 1)), asking(3), n=3, lora="style")
    first, *others = [scored(answer) for answer in answers]
    for entries in others:
        for one, other in zip(first[1:], entries[1:], strict=True):
            assert one is not None and other is not None and one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("adapter", [None, "tower"])
def test_placeholders_have_none_and_what_follows_them_is_scored(
    tiny_engine: Engine, speech_dir: Path, speech_adapters: dict[str, Path], adapter: str | None
) -> None:
    clip = tone(0.6, 320)
    prompt = TextPrompt("so<|audio|>what?", [AudioPart((clip, 16_000))])
    (answer,) = tiny_engine.start_sync(prompt, asking(1), lora=adapter or "none")
    features = AutoProcessor.from_pretrained(speech_dir).audio_processor(torch.from_numpy(clip)[None])["input_features"]
    token_ids = answer.prompt_token_ids
    rows = Oracle(speech_dir, SPEECH, speech_adapters).logits(token_ids, adapter, input_features=features)
    entries = scored(answer)
    last = len(token_ids) - len("what?")
    assert len(entries) == len(token_ids) and [entry is None for entry in entries] == [
        place == 0 or 2 <= place < last for place in range(len(token_ids))
    ]
    for place in (1, *range(last, len(token_ids))):
        entry = entries[place]
        assert entry is not None
        assert entry.logprob == pytest.approx(float(rows[place - 1].log_softmax(-1)[token_ids[place]]), abs=2e-4)


def test_a_chunk_of_placeholders_alone_has_none(
    speech_dir: Path, speech_adapters: dict[str, Path], tmp_path: Path
) -> None:
    engine = make_engine(speech_dir, speech_adapters, tmp_path, max_num_batched_tokens=4)
    try:
        prompt = TextPrompt("<|audio|>", [AudioPart((tone(0.6, 320), 16_000))])
        (answer,) = engine.start_sync(prompt, asking(0), lora="none")
        assert set(scored(answer)) == {None} and len(answer.prompt_token_ids) > 4
    finally:
        engine.close()


def test_the_offline_api_gives_them_and_a_prompt_may_fill_the_context(
    llama_dir: Path, oracle: Oracle, tmp_path: Path
) -> None:
    llm = LLM(str(llama_dir), adapter_dir=str(tmp_path), max_model_len=64)
    try:
        prompts = [random_ids(64, 1), random_ids(20, 2)]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        for output, prompt in zip(llm.generate(inputs, asking(0, 0)), prompts, strict=True):
            check(output.prompt_logprobs, prompt, oracle.logits(prompt), num_top=0)
            assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [])
            assert output.outputs[0].finish_reason == "length"
        assert llm.generate(inputs[1], GREEDY)[0].prompt_logprobs == []
        with pytest.raises(ContextTooLong, match="context holds 64"):
            llm.generate(inputs[0], asking(1))
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(fields: dict[str, int], param: str) -> None:
    with pytest.raises(InvalidRequest) as fault:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert fault.value.param == param
