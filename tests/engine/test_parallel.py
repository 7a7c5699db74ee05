"""A model over two processes answers as it does in one, whatever adapters share the batch; a process that dies is reported."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.batch import Batch
from engine.capacity import GPUS, MemoryPlan, plan_memory
from engine.config import LoRAModule
from engine.errors import InvalidRequest, UnsupportedModel
from engine.model import outline_model
from engine.parallel import team as team_module
from engine.parallel.loading import outline_split
from engine.parallel.messages import Step
from engine.parallel.runner import FollowingRunner
from engine.request import TokenLogprob, TokenPrompt
from engine.scheduler import Plan
from tests.oracles import make_adapter, make_model, random_ids

LLAMA = "LlamaForCausalLM"
NAMES: list[str | None] = [None, "all", "rs", "patterns", "all", "head", None, "rs"]
PROMPTS = [random_ids(length, length) for length in (5, 33, 70, 12, 1, 48, 20, 9)]
TOLERANCE = 1e-4
"""Of log probabilities: sums of float32 in another order."""


def make_engine(folder: Path, adapters: dict[str, Path], catalogue: Path, **settings: object) -> Engine:
    return Engine(
        EngineConfig(
            model=str(folder), adapter_dir=str(catalogue), max_loras=3, max_lora_rank=8, max_cpu_loras=8,
            max_num_batched_tokens=96, kv_cache_memory_mb=8,
            lora_modules=[LoRAModule(name, str(path)) for name, path in adapters.items()], **settings,
        ),  # type: ignore[arg-type]
        checks_integrity=True,
    )  # fmt: skip


def make_models(root: Path) -> tuple[Path, dict[str, Path]]:
    """A tiny Llama whose vocabulary goes into two equal parts, and adapters of different rank, scale and modules."""
    model = make_model(LLAMA, root / "even-llama", vocab_size=300)
    return model, {
        "all": make_adapter(model, LLAMA, root / "all", targets="all-linear", rank=8, alpha=6, seed=2, std=0.2),
        "rs": make_adapter(
            model, LLAMA, root / "rs", targets=["k_proj", "down_proj"], rank=3, alpha=5, seed=3, use_rslora=True
        ),
        "patterns": make_adapter(
            model, LLAMA, root / "patterns", targets=["o_proj", "gate_proj"], rank=6, alpha=9, seed=4,
            rank_pattern={"layers.0.self_attn.o_proj": 2}, alpha_pattern={"gate_proj": 12},
        ),
        "head": make_adapter(model, LLAMA, root / "head", targets=["lm_head", "q_proj", "up_proj"], rank=5, seed=5),
    }  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model_dir(models: tuple[Path, dict[str, Path]]) -> Path:
    return models[0]


@pytest.fixture(scope="module")
def adapters(models: tuple[Path, dict[str, Path]]) -> dict[str, Path]:
    return models[1]


@pytest.fixture(scope="module")
def single(model_dir: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = make_engine(model_dir, adapters, tmp_path_factory.mktemp("catalogue"))
    yield engine
    engine.close(drain_s=0)


@pytest.fixture(scope="module")
def split(model_dir: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Two ranks, each step launched before the one before it is read."""
    engine = make_engine(
        model_dir, adapters, tmp_path_factory.mktemp("catalogue"), tensor_parallel_size=2, async_scheduling=True
    )
    yield engine
    (process,) = workers(engine)
    assert process.poll() is None
    engine.close(drain_s=0)
    assert process.returncode == 0 and not torch.distributed.is_initialized(), "closing leaves nothing behind"


def workers(engine: Engine) -> list[subprocess.Popen[bytes]]:
    assert engine._team is not None
    return [worker.process for worker in engine._team._workers]


def answers(
    engine: Engine, prompts: Sequence[list[int]], names: Sequence[str | None], max_tokens: int = 12
) -> list[list[TokenLogprob]]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5)
    started = [
        engine.start_sync(TokenPrompt(prompt), sampling, lora=name)[0]
        for prompt, name in zip(prompts, names, strict=True)
    ]
    return [[entry for delta in answer for entry in delta.logprobs] for answer in started]


def check_equal(actual: Sequence[Sequence[TokenLogprob]], expected: Sequence[Sequence[TokenLogprob]]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert [entry.token_id for entry in one] == [entry.token_id for entry in other]
        for left, right in zip(one, other, strict=True):
            assert [token for token, _ in left.top] == [token for token, _ in right.top]
            difference = max(abs(a - b) for (_, a), (_, b) in zip(left.top, right.top, strict=True))
            assert difference < TOLERANCE


def token_ids(answer: Sequence[TokenLogprob]) -> list[int]:
    return [entry.token_id for entry in answer]


def test_mixed_batches_and_requests_alone_equal_one_process(single: Engine, split: Engine) -> None:
    expected = answers(single, PROMPTS, NAMES)
    base = answers(single, PROMPTS, [None] * len(PROMPTS))
    for name, with_adapter, without in zip(NAMES, expected, base, strict=True):
        assert (token_ids(with_adapter) == token_ids(without)) == (name is None), "the adapters must change answers"
    check_equal(answers(split, PROMPTS, NAMES), expected)
    check_equal(answers(split, PROMPTS, [None] * len(PROMPTS)), base)
    for prompt, name, answer in list(zip(PROMPTS, NAMES, expected, strict=True))[:3]:
        check_equal(answers(split, [prompt], [name]), [answer])


def prompt_logprobs(engine: Engine) -> list[list[TokenLogprob]]:
    sampling = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3)
    prompts = [*PROMPTS[:-1], random_ids(200, 7)]  # More than the head takes at once.
    started = [
        engine.start_sync(TokenPrompt(prompt), sampling, lora=name)[0]
        for prompt, name in zip(prompts, NAMES, strict=True)
    ]
    found = [[entry for delta in answer for entry in delta.prompt_logprobs] for answer in started]
    assert [len(each) for each in found] == [len(prompt) for prompt in prompts]
    return [[entry for entry in each if entry is not None] for each in found]


def test_prompts_are_scored_as_in_one_process(single: Engine, split: Engine) -> None:
    check_equal(prompt_logprobs(split), prompt_logprobs(single))


def test_followers_take_part_in_the_head_and_score_nothing(single: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Step] = []
    num_rows: list[int] = []
    leader = single._loop._runner
    compute, logits = leader._compute, single.base.logits

    def note_step(plan: Plan, batch: Batch, *, is_recorded: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        steps.append(Step.of(batch, is_recorded=is_recorded))
        return compute(plan, batch, is_recorded=is_recorded)

    def note_rows(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(hidden.shape[0])
        return logits(hidden)

    follower = object.__new__(FollowingRunner)
    vars(follower).update(vars(leader))  # Of one rank, so that it can run in this process.
    monkeypatch.setattr(leader, "_compute", note_step)
    monkeypatch.setattr(single.base, "logits", note_rows)
    sampling = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3)
    list(single.start_sync(TokenPrompt(random_ids(40, 3)), sampling)[0])
    assert num_rows == [39, 1] and len(steps) == 1
    monkeypatch.setattr("engine.runner.pack_logprobs", lambda *_: pytest.fail("a follower scores prompts"))
    follower.follow(steps[0])
    assert num_rows == [39, 1, 39, 1], "the ranks' collectives must match"


def test_adapters_come_go_and_are_replaced_while_answers_run(
    single: Engine, split: Engine, model_dir: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    other = make_adapter(model_dir, LLAMA, tmp_path / "other", targets="all-linear", rank=8, seed=9, std=0.2)
    prompt, sampling = PROMPTS[3], SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    (alone,) = answers(single, [prompt], ["all"], 80)
    running = split.start_sync(TokenPrompt(prompt), sampling, lora="all")[0]
    events = iter(running)
    tokens = [token for _ in range(3) for token in next(events).token_ids]
    for round_number in range(2):  # More adapters than rows: rows are given away under way.
        for engine in (single, split):
            engine.adapters.load("swapped", other if round_number else adapters["rs"], load_inplace=True)
        check_equal(
            answers(split, PROMPTS[:3], ["swapped", "head", "patterns"], 5),
            answers(single, PROMPTS[:3], ["swapped", "head", "patterns"], 5),
        )
    for engine in (single, split):
        engine.adapters.unload("swapped")
    tokens += [token for delta in events for token in delta.token_ids]
    assert tokens == token_ids(alone)


def planned(config: EngineConfig) -> MemoryPlan:
    """What the capacity guide says of each rank."""
    base = outline_model(config.model)
    split = outline_split(base.model, base.architecture, config.tensor_parallel_size)
    return plan_memory(base, config, GPUS["h200"], [8], split)


def test_each_rank_holds_its_share_as_the_plan_says(single: Engine, split: Engine) -> None:
    assert split.base.kv_shape.num_kv_heads * 2 == single.base.kv_shape.num_kv_heads
    sites = single.base.surface(max_lora_rank=8, lora_dtype=torch.float32).linears
    split_sites = split.base.surface(max_lora_rank=8, lora_dtype=torch.float32).linears
    assert split_sites == sites, "adapters are judged against the whole model"
    by_rows = ("o_proj", "down_proj")
    inputs_cut = sum(
        site.in_features // 2 + site.out_features for name, site in sites.items() if name.endswith(by_rows)
    )
    outputs_cut = sum(
        site.in_features + site.out_features // 2 for name, site in sites.items() if not name.endswith(by_rows)
    )
    assert split.lora_bytes == single.config.max_loras * 8 * 4 * (inputs_cut + outputs_cut)
    cut = sum(site.in_features * site.out_features for site in sites.values()) * 4 // 2
    assert split.base.num_bytes == single.base.num_bytes - cut
    plan = planned(split.config)
    assert (plan.weights, plan.lora_rows) == (split.base.num_bytes, split.lora_bytes)
    assert plan.kv_bytes_per_token == split.base.kv_shape.bytes_per_token


def test_what_would_need_more_than_pairs_is_refused(split: Engine, model_dir: Path, tmp_path: Path) -> None:
    dora = make_adapter(model_dir, LLAMA, tmp_path / "dora", use_dora=True)
    embedding = make_adapter(model_dir, LLAMA, tmp_path / "embedding", targets=["embed_tokens"])
    for folder in (dora, embedding):
        with pytest.raises(Exception, match=r"DoRA|embed"):
            split.adapters.load("refused", str(folder))
    (answer,) = answers(split, PROMPTS[:1], [None], 2)
    assert len(answer) == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 0}, "must be 1 or more"),
        ({"fully_sharded_loras": True}, "2 or more"),
        ({"tensor_parallel_size": 2, "enable_dora": True}, "--enable-dora"),
        ({"tensor_parallel_size": 2, "lora_extra_vocab_size": 4}, "--lora-extra-vocab-size"),
        ({"tensor_parallel_size": 2, "gguf_file": "x.gguf"}, "--gguf-file"),
        ({"tensor_parallel_size": 2, "fully_sharded_loras": True, "max_lora_rank": 9}, "multiple of"),
        ({"tensor_parallel_size": 3}, "must divide the model's .*take one of 1, 2"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_process_starts(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], words: str
) -> None:
    monkeypatch.setattr(team_module, "_start", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(InvalidRequest, match=words):
        Engine(EngineConfig(model=str(model_dir), adapter_dir=str(tmp_path), **settings))  # type: ignore[arg-type]


def test_a_second_spread_engine_is_refused_and_the_first_stays(
    split: Engine, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(team_module, "_start", lambda *_: started.append(1) or pytest.fail("a process was started"))
    with pytest.raises(InvalidRequest, match="already; close it first"):
        make_engine(model_dir, {}, tmp_path, tensor_parallel_size=2)
    assert not started and torch.distributed.is_initialized()
    (answer,) = answers(split, PROMPTS[:1], [None], 2)
    assert len(answer) == 2


def test_other_systems_are_refused_by_name(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(InvalidRequest, match="on Linux only, and this is Darwin"):
        Engine(EngineConfig(model=str(model_dir), tensor_parallel_size=2))


def test_models_that_were_not_tried_are_refused_by_name(speech_dir: Path, tmp_path: Path) -> None:
    gemma = make_model("Gemma3ForCausalLM", tmp_path / "gemma")
    for folder in (speech_dir, gemma):
        with pytest.raises(UnsupportedModel, match="it is for LlamaForCausalLM"):
            Engine(EngineConfig(model=str(folder), tensor_parallel_size=2, adapter_dir=str(tmp_path)))
