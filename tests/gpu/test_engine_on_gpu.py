"""The engine on a CUDA device: with recorded graphs and without, equal to transformers and PEFT on the CPU in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.config import LoRAModule
from engine.request import AudioPart, ChatPrompt, Message, TextPart, TokenPrompt
from tests.oracles import Oracle, make_adapter, make_model, random_ids, tone

pytestmark = pytest.mark.gpu

LLAMA = "LlamaForCausalLM"
ARCHITECTURES = [
    "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM", "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
]  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def tokens(answer: Answer) -> list[int]:
    return [token_id for delta in answer for token_id in delta.token_ids]


def start(engine: Engine, prompt: list[int], lora: str | None = None, sampling: SamplingParams = GREEDY) -> Answer:
    return engine.start_sync(TokenPrompt(prompt), sampling, lora=lora)[0]


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def engine(
    request: pytest.FixtureRequest,
    llama_dir: Path,
    llama_adapters: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(
            model=str(llama_dir), device="cuda", dtype="float32", enforce_eager=request.param, kv_cache_memory_mb=64,
            lora_modules=[LoRAModule(name, str(path)) for name, path in llama_adapters.items()],
            max_loras=3, max_lora_rank=8, max_num_batched_tokens=50, max_num_seqs=7, max_model_len=200,
            adapter_dir=str(tmp_path_factory.mktemp("catalogue")),
        ),
        checks_integrity=True,
    )  # fmt: skip
    yield engine
    engine.close()
    engine.check_integrity()


def test_mixed_batches_equal_peft_one_by_one(engine: Engine, llama_dir: Path, llama_adapters: dict[str, Path]) -> None:
    oracle = Oracle(llama_dir, LLAMA, llama_adapters)
    names = [None, "qv", "all", "rs", "patterns"]
    lengths = [1, 7, 64, 65, 12] * 3
    plan = [(names[index % 5], random_ids(length, 100 + index % 3)) for index, length in enumerate(lengths)]
    expected = [oracle.generate(prompt, 20, adapter) for adapter, prompt in plan]
    for _ in range(2):  # The second time through the prefix cache, and with other adapters in the rows.
        answers = [start(engine, prompt, adapter) for adapter, prompt in plan]
        assert [tokens(answer) for answer in answers] == expected


def test_base_rows_are_untouched_by_adapters_beside_them(engine: Engine, llama_dir: Path) -> None:
    prompt = random_ids(30, 42)
    expected = Oracle(llama_dir, LLAMA).generate(prompt, 20)
    for names in ([None], ["all", None, "all"], [None, "rs"], [None]):
        answers = [(name, start(engine, prompt, name)) for name in names]
        assert [tokens(answer) == expected for name, answer in answers] == [name is None for name in names]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_all_kinds_of_adapters_in_one_batch_equal_peft(enforce_eager: bool, tmp_path: Path) -> None:
    model = make_model("Gemma3ForCausalLM", tmp_path / "model")
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "dora": {"targets": "all-linear", "use_dora": True},
        "bias": {"lora_bias": True},
        "tied": {"targets": ["embed_tokens"], "ensure_weight_tying": True},
        "rows": {"trainable_token_indices": [3, 7]},
    }
    adapters = {
        name: make_adapter(model, "Gemma3ForCausalLM", tmp_path / name, seed=seed, **settings)
        for seed, (name, settings) in enumerate(kinds.items(), 1)
    }
    oracle = Oracle(model, "Gemma3ForCausalLM", adapters)
    plan = [(name, [*random_ids(9, row), 3, 7]) for row in range(2) for name in (None, *adapters)]
    expected = [oracle.generate(prompt, 20, name) for name, prompt in plan]
    engine = Engine(
        EngineConfig(
            model=str(model), device="cuda", dtype="float32", enforce_eager=enforce_eager, kv_cache_memory_mb=64,
            lora_modules=[LoRAModule(name, str(path)) for name, path in adapters.items()], enable_dora=True,
            lora_extra_vocab_size=2, max_loras=3, max_lora_rank=8, max_num_seqs=7, max_model_len=200,
            adapter_dir=str(tmp_path / "catalogue"),
        ),
        checks_integrity=True,
    )  # fmt: skip
    try:
        for _ in range(2):
            answers = [start(engine, prompt, name or "none") for name, prompt in plan]
            assert [tokens(answer) for answer in answers] == expected
    finally:
        engine.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_equals_generate(architecture: str, tmp_path: Path) -> None:
    folder = make_model(architecture, tmp_path / "model")
    oracle = Oracle(folder, architecture)
    prompts = [random_ids(length, length) for length in (1, 7, 33, 70)]
    expected = [oracle.generate(prompt, 20) for prompt in prompts]
    engine = Engine(
        EngineConfig(
            model=str(folder), device="cuda", dtype="float32", max_num_seqs=4, kv_cache_memory_mb=64,
            max_num_batched_tokens=48, adapter_dir=str(tmp_path / "adapters"),
        ),
        checks_integrity=True,
    )  # fmt: skip
    try:
        assert [tokens(answer) for answer in [start(engine, prompt) for prompt in prompts]] == expected
    finally:
        engine.close()


def test_audio_with_tower_adapters_equals_the_cpu_engine(
    tiny_engine: Engine, speech_dir: Path, speech_adapters: dict[str, Path], tmp_path: Path
) -> None:
    modules = [LoRAModule(name, str(path)) for name, path in speech_adapters.items()]
    engine = Engine(
        EngineConfig(
            model=str(speech_dir), device="cuda", dtype="float32", lora_modules=modules, max_num_seqs=8,
            default_mm_loras={"audio": "speech"}, kv_cache_memory_mb=64, adapter_dir=str(tmp_path),
        )
    )  # fmt: skip
    prompts = [
        ChatPrompt([Message("user", [AudioPart((tone(seconds, pitch), 16_000)), TextPart("what?")])])
        for seconds, pitch in ((0.4, 300), (1.3, 500))
    ]
    cases = [(prompt, name) for prompt in prompts for name in ("none", "speech", "style", "tower")]
    try:
        on_gpu, on_cpu = (
            [tokens(answer) for answer in [one.start_sync(prompt, GREEDY, lora=name)[0] for prompt, name in cases]]
            for one in (engine, tiny_engine)
        )
        assert on_gpu == on_cpu and len(set(map(tuple, on_gpu))) > 4
    finally:
        engine.close()
