"""The engine's tokens equal transformers' `generate`, and PEFT's for adapters, whatever shares the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor

from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.config import LoRAModule
from engine.request import AudioPart, ChatPrompt, Message, TextPart, TokenPrompt
from tests.oracles import Oracle, make_model, random_ids, tone
from tests.pace import held_before

LLAMA = "LlamaForCausalLM"
SPEECH = "GraniteSpeechForConditionalGeneration"
ARCHITECTURES = [
    LLAMA, "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM", "Gemma3ForCausalLM",
    "Phi3ForCausalLM", SPEECH,
]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def tokens(answer: Answer) -> list[int]:
    return [token_id for delta in answer for token_id in delta.token_ids]


def start(engine: Engine, prompt: list[int], lora: str | None = None) -> Answer:
    return engine.start_sync(TokenPrompt(prompt), GREEDY, lora=lora)[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_equals_generate(architecture: str, tmp_path: Path) -> None:
    folder = make_model(architecture, tmp_path / "model")
    oracle = Oracle(folder, architecture)
    prompts = [random_ids(length, length) for length in (1, 7, 33, 64, 70)]
    expected = [oracle.generate(prompt, 20) for prompt in prompts]
    assert len(set(map(tuple, expected))) == len(prompts), "the oracle is degenerate"
    assert len({token_id for output in expected for token_id in output}) > 4, "the oracle is degenerate"
    engine = Engine(
        EngineConfig(model=str(folder), max_num_batched_tokens=48, adapter_dir=str(tmp_path / "adapters")),
        checks_integrity=True,
    )
    try:
        assert [tokens(answer) for answer in [start(engine, prompt) for prompt in prompts]] == expected
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("block_size", "budget", "num_blocks", "prefix_caching", "is_ahead"),
    [
        (16, 2048, None, True, False),
        (16, 2048, None, True, True),
        (4, 9, None, True, True),
        (1, 5, None, False, True),
        (7, 33, 26, True, True),
        (4, 16, 40, False, False),
        (4, 16, 40, False, True),
    ],
)
def test_chunks_blocks_preemption_and_running_ahead_do_not_change_tokens(
    llama_dir: Path,
    tmp_path: Path,
    block_size: int,
    budget: int,
    num_blocks: int | None,
    prefix_caching: bool,
    is_ahead: bool,
) -> None:
    oracle = Oracle(llama_dir, LLAMA)
    shared = random_ids(40, 5)
    prompts = [shared + random_ids(length, length) for length in (1, 3, 20, 45)] + [random_ids(60, 9), shared]
    expected = [oracle.generate(prompt, 20) for prompt in prompts]
    config = EngineConfig(
        model=str(llama_dir), block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=5, max_model_len=150,
        enable_prefix_caching=prefix_caching, async_scheduling=is_ahead, adapter_dir=str(tmp_path),
    )  # fmt: skip
    engine = Engine(config, checks_integrity=True)
    if num_blocks is not None:
        _shrink_pool(engine, num_blocks)
    try:
        for _ in range(2):
            with held_before(engine, len(prompts)):
                answers = [start(engine, prompt) for prompt in prompts]
            assert [tokens(answer) for answer in answers] == expected
        stats = engine.stats()
        assert (stats.num_preemptions > 0) == (num_blocks is not None), "preemption was not exercised as planned"
        assert (stats.prefix_hit_tokens > 0) == (prefix_caching and block_size < 40)
        assert stats.kv_blocks_used == 0
    finally:
        engine.close()


def _shrink_pool(engine: Engine, num_blocks: int) -> None:
    """Take blocks away so that requests must be preempted."""
    blocks = engine._scheduler.blocks
    for block in range(num_blocks, blocks.num_blocks):
        del blocks._free[block]
    blocks.num_blocks = num_blocks
    del blocks._num_refs[num_blocks:]


@pytest.fixture(scope="module", params=[False, True], ids=["", "ahead"])
def llama_engine(
    request: pytest.FixtureRequest,
    llama_dir: Path,
    llama_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(
            model=str(llama_dir),
            lora_modules=[LoRAModule(name, str(path)) for name, path in llama_adapters.items()],
            max_loras=3,
            max_lora_rank=8,
            max_num_batched_tokens=50,
            max_num_seqs=7,
            async_scheduling=request.param,
            adapter_dir=str(tmp_path_factory.mktemp("catalogue")),
        ),
        checks_integrity=True,
    )
    yield engine
    engine.close()
    engine.check_integrity()


@pytest.fixture(scope="module")
def llama_oracle(llama_dir: Path, llama_adapters: dict[str, Path]) -> Oracle:
    return Oracle(llama_dir, LLAMA, llama_adapters)


def test_a_mixed_batch_equals_peft_one_by_one(llama_engine: Engine, llama_oracle: Oracle) -> None:
    """More adapters than LoRA rows, base requests between them, unequal lengths, chunks and decodes in one step."""
    names = [None, "qv", "all", "rs", "patterns"]
    plan = [
        (names[index % 5], random_ids(length, 100 + index % 3)) for index, length in enumerate([1, 7, 64, 65, 12] * 3)
    ]
    expected = [llama_oracle.generate(prompt, 20, adapter) for adapter, prompt in plan]
    prompt = random_ids(12, 100)
    by_adapter = [llama_oracle.generate(prompt, 20, adapter) for adapter in names]
    assert len(set(map(tuple, by_adapter))) == 5, "each adapter must change the oracle's output, or this proves nothing"
    answers = [start(llama_engine, prompt, adapter) for adapter, prompt in plan]
    assert [tokens(answer) for answer in answers] == expected


def test_base_rows_are_untouched_by_adapters_in_every_order(llama_engine: Engine, llama_oracle: Oracle) -> None:
    prompt = random_ids(30, 42)
    expected = llama_oracle.generate(prompt, 20)
    for names in (["qv", None], [None, "all"], ["all", None, "all"], [None, "rs", None], [None]):
        answers = [(name, start(llama_engine, prompt, name)) for name in names]
        assert [tokens(answer) == expected for name, answer in answers] == [name is None for name in names]


def test_lora_on_the_head_equals_peft(llama_dir: Path, tmp_path: Path) -> None:
    from tests.oracles import make_adapter

    folder = make_adapter(llama_dir, LLAMA, tmp_path / "head", targets=["lm_head", "v_proj"], rank=4, seed=6)
    oracle = Oracle(llama_dir, LLAMA, {"head": folder})
    prompts = [random_ids(length, length) for length in (3, 9)]
    engine = Engine(
        EngineConfig(
            model=str(llama_dir), lora_modules=[LoRAModule("head", str(folder))], adapter_dir=str(tmp_path / "x")
        )
    )
    try:
        answers = [start(engine, prompts[0], "head"), start(engine, prompts[1]), start(engine, prompts[1], "head")]
        expected = [(prompts[0], "head"), (prompts[1], None), (prompts[1], "head")]
        assert [tokens(answer) for answer in answers] == [
            oracle.generate(prompt, 20, name) for prompt, name in expected
        ]
    finally:
        engine.close()


def _speech_prompt(*clips: object) -> ChatPrompt:
    return ChatPrompt([Message("user", [*[AudioPart((clip, 16_000)) for clip in clips], TextPart("what?")])])  # type: ignore[arg-type]


@pytest.mark.parametrize("adapter", [None, "speech", "style", "tower"])
def test_audio_equals_generate_and_peft_with_tower_and_connector(
    tiny_engine: Engine, speech_dir: Path, speech_adapters: dict[str, Path], adapter: str | None
) -> None:
    oracle = Oracle(speech_dir, SPEECH, speech_adapters)
    extractor = AutoProcessor.from_pretrained(speech_dir).audio_processor
    clips = [tone(1.31, 300), tone(0.4, 500)]
    answers = [
        tiny_engine.start_sync(_speech_prompt(clip), GREEDY, lora=adapter or "none")[0] for clip in (*clips, clips[0])
    ]
    for clip, answer in zip((*clips, clips[0]), answers, strict=True):
        features = extractor(torch.from_numpy(clip)[None])["input_features"]
        assert tokens(answer) == oracle.generate(answer.prompt_token_ids, 20, adapter, input_features=features)


def test_all_audio_adapters_in_one_batch_differ(tiny_engine: Engine) -> None:
    clip = tone(0.9, 350)
    answers = [
        tiny_engine.start_sync(_speech_prompt(clip), GREEDY, lora=name)[0]
        for name in ("none", "speech", "style", "tower")
    ]
    assert len({tuple(tokens(answer)) for answer in answers}) == 4


def test_logprobs_equal_the_log_softmax_of_transformers(llama_engine: Engine, llama_oracle: Oracle) -> None:
    prompt = random_ids(11, 3)
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    for adapter in (None, "all"):
        answer = llama_engine.start_sync(TokenPrompt(prompt), sampling, lora=adapter)[0]
        entries = [entry for delta in answer for entry in delta.logprobs]
        generated = [entry.token_id for entry in entries]
        logits = llama_oracle.logits(prompt + generated, adapter)[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        for row, entry in zip(expected, entries, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            values, ids = row.topk(3)
            assert [token_id for token_id, _ in entry.top] == ids.tolist()
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
