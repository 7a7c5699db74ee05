"""How exact the engine's numbers are on a CUDA device: replays against launches, rows alone against rows in a crowd, and
bfloat16 and float32 against transformers and PEFT in float32 on the same device. Errors are printed (`pytest -s`).
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import kernels
from engine import Engine, EngineConfig, SamplingParams
from engine.batch import Batch
from engine.config import LoRAModule
from engine.graphs import StepGraphs, recording_lora
from engine.request import TokenLogprob, TokenPrompt
from tests.oracles import Oracle, random_ids

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LLAMA = "LlamaForCausalLM"
NUM_TOKENS = 12
NUM_TOP = 20

Case = tuple[list[int], str | None]
Scores = list[TokenLogprob]

BASE: list[Case] = [(random_ids(length, length), None) for length in (1, 9, 33, 64, 20, 5)]
SINGLE: list[Case] = [(prompt, "all") for prompt, _ in BASE]
MIXED: list[Case] = [
    (prompt, name) for (prompt, _), name in zip(BASE, ["qv", None, "all", "rs", None, "patterns"], strict=True)
]
BATCHES = {"base": BASE, "single": SINGLE, "mixed": MIXED}

# Largest error of the log probabilities of the 20 likeliest tokens, prompts and decoding. The model's weights are large, so
# that adapters and prompts change its answers; a rounding error grows on its way through it.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.25}
MEAN_BOUNDS = {"float32": 1e-4, "bfloat16": 0.03}
# The same between two batches of the engine itself, where only the order of sums and the points of rounding differ.
OWN_BOUNDS = {"float32": 1e-3, "bfloat16": 0.15}


@contextmanager
def running(
    model: Path,
    adapters: dict[str, Path],
    root: Path,
    dtype: str,
    *,
    enforce_eager: bool = False,
    enable_prefix_caching: bool = False,
) -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(
            model=str(model), device=DEVICE, dtype=dtype, kv_cache_memory_mb=64, enforce_eager=enforce_eager,
            lora_modules=[LoRAModule(name, str(path)) for name, path in adapters.items()],
            max_loras=4, max_lora_rank=8, max_num_seqs=8, max_model_len=128, enable_prefix_caching=enable_prefix_caching,
            adapter_dir=str(root / "catalogue"),
        )
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


def scores(engine: Engine, cases: Sequence[Case]) -> list[Scores]:
    """Tokens with log probabilities of each case, all in one batch."""
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=NUM_TOP)
    answers = [engine.start_sync(TokenPrompt(prompt), sampling, lora=name or "none")[0] for prompt, name in cases]
    return [[entry for delta in answer for entry in delta.logprobs] for answer in answers]


def errors(left: Scores, right: Scores) -> list[float]:
    """Differences of log probabilities step by step, as long as the tokens before were the same."""
    found: list[float] = []
    for one, other in zip(left, right, strict=True):
        rivals = dict(other.top)
        found += [abs(rivals[token] - value) for token, value in one.top if token in rivals]
        if one.token_id != other.token_id:
            break
    return found


def show(title: str, found: Sequence[float]) -> None:
    print(f"{title}: largest error {max(found):.2g}, mean {sum(found) / len(found):.2g} of {len(found)}")


def test_a_replay_equals_its_launches_bit_for_bit(
    llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is run twice: replayed, and launch by launch on the same padded buffers.

    Whole engines cannot agree to the last bit: without graphs a batch is not padded, layers are not compiled, and attention
    is split by the keys at hand rather than by capacity.
    """
    sizes: list[tuple[bool, int]] = []
    unequal: list[tuple[bool, int, float]] = []
    replay = StepGraphs.run

    def run_both(graphs: StepGraphs, batch: Batch) -> torch.Tensor:
        logits = replay(graphs, batch).clone()
        kind = batch.is_decode, batch.num_tokens
        # The inputs are in the graphs' buffers already, and LoRA's where the batch has any.
        parts = ("decoder", "head") if batch.is_decode else ("decoder",)
        with recording_lora(graphs._lora_metadata):  # LoRA goes beside the product in both
            graphs._update_lora(parts, batch.lora_segments, batch.num_tokens)
            replayed = graphs._recordings[(*kind, bool(batch.lora_segments))].replay().clone()
            launched = graphs.launch(batch.num_tokens, batch.is_decode)
        sizes.append(kind)
        num_rows = len(batch.query_lens) if batch.is_decode else sum(batch.query_lens)
        if not torch.equal(replayed[:num_rows], launched[:num_rows]):
            unequal.append((*kind, float((replayed - launched)[:num_rows].abs().max())))
        return logits

    monkeypatch.setattr(StepGraphs, "run", run_both)
    for dtype in ("float32", "bfloat16"):
        with running(llama_dir, llama_adapters, tmp_path, dtype) as engine:
            for cases in (MIXED, BASE, SINGLE[:3], MIXED[2:3], MIXED):
                scores(engine, cases)
    assert {1, 4, 8} <= {size for is_decode, size in sizes if is_decode}, "the graphs of decodes did not run"
    assert len({size for is_decode, size in sizes if not is_decode}) > 2, "the graphs of prompts did not run"
    assert unequal == []


def test_nothing_is_compiled_once_the_engine_is_ready(
    llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lengths, adapters and cached beginnings come together, recorded or launched kernel by kernel."""
    monkeypatch.setattr("engine.graphs._MIXED_SIZES", (16,))  # all larger steps are launched
    with running(llama_dir, llama_adapters, tmp_path, "bfloat16", enable_prefix_caching=True) as engine:
        scores(engine, MIXED[:1])  # The sampler has no part in it.
        before = compiled_variants()
        rng = random.Random(0)
        names = [None, *llama_adapters]
        for num_requests in (1, 2, 3, 7, 8, 8, 8):
            scores(
                engine,
                [(random_ids(rng.randint(1, 110), rng.randint(0, 5)), rng.choice(names)) for _ in range(num_requests)],
            )
        assert compiled_variants() == before


def compiled_variants() -> dict[str, int]:
    """How many variants of each of our Triton kernels have been compiled in this process."""
    modules = [importlib.import_module(f"kernels.{info.name}") for info in pkgutil.iter_modules(kernels.__path__)]
    jitted = {
        f"{module.__name__}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and name.endswith("_kernel")
    }
    return {name: sum(len(caches[0]) for caches in kernel.device_caches.values()) for name, kernel in jitted.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_with_graphs_and_without_agree(
    dtype: str, llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path
) -> None:
    found = []
    for enforce_eager in (False, True):
        with running(llama_dir, llama_adapters, tmp_path, dtype, enforce_eager=enforce_eager) as engine:
            found.append(scores(engine, MIXED))
    if dtype == "float32":
        assert [[entry.token_id for entry in row] for row in found[0]] == [
            [entry.token_id for entry in row] for row in found[1]
        ]
    all_errors = [error for left, right in zip(*found, strict=True) for error in errors(left, right)]
    show(f"graphs against eager, {dtype}", all_errors)
    assert max(all_errors) <= OWN_BOUNDS[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_equals_the_row_in_a_mixed_batch(
    dtype: str, llama_dir: Path, llama_adapters: dict[str, Path], tmp_path: Path
) -> None:
    with running(llama_dir, llama_adapters, tmp_path, dtype) as engine:
        together = scores(engine, MIXED)
        alone = [scores(engine, [case])[0] for case in MIXED]
        others = scores(engine, [(prompt, None if name else "all") for prompt, name in MIXED])
    all_errors = [error for left, right in zip(together, alone, strict=True) for error in errors(left, right)]
    show(f"mixed against alone, {dtype}", all_errors)
    assert max(all_errors) <= OWN_BOUNDS[dtype]
    for left, right in zip(together, others, strict=True):  # Else rows could be mixed up unseen.
        assert [entry.token_id for entry in left] != [entry.token_id for entry in right]


def true_logprobs(model: Any, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
    """[n, V] float32: what the oracle says at each step of an answer, given the tokens before."""
    ids = torch.tensor([[*prompt, *token_ids[:-1]]], device=DEVICE)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 :]
    return torch.log_softmax(logits.float(), -1).cpu()


def check_near(
    dtype: str, kind: str, models: dict[str | None, Any], cases: Sequence[Case], rows: Sequence[Scores]
) -> None:
    """Hold each case's entries, which follow its tokens, against the oracle's; other adapters must be further away."""
    found, wrong = [], []
    for (prompt, name), entries in zip(cases, rows, strict=True):
        token_ids = [entry.token_id for entry in entries]
        for other, model in models.items():
            expected = true_logprobs(model, prompt, token_ids)
            distances = [
                abs(float(expected[step, token]) - value)
                for step, entry in enumerate(entries)
                for token, value in entry.top
            ]
            if other == name:
                found += distances
            else:
                wrong.append(max(distances))
    show(f"{dtype} against float32, {kind}", found)
    assert max(found) <= BOUNDS[dtype] and sum(found) / len(found) <= MEAN_BOUNDS[dtype], kind
    assert min(wrong) > BOUNDS[dtype], "the bound could not tell one adapter from another"


@pytest.fixture
def oracles(llama_dir: Path, llama_adapters: dict[str, Path]) -> dict[str | None, Any]:
    oracle = Oracle(llama_dir, LLAMA, llama_adapters)
    return {name: oracle.model(name).to(DEVICE) for name in (None, *llama_adapters)}


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_stay_near_transformers_and_peft_in_float32(
    dtype: str,
    enforce_eager: bool,
    llama_dir: Path,
    llama_adapters: dict[str, Path],
    oracles: dict[str | None, Any],
    tmp_path: Path,
) -> None:
    with running(llama_dir, llama_adapters, tmp_path, dtype, enforce_eager=enforce_eager) as engine:
        answers = {kind: scores(engine, cases) for kind, cases in BATCHES.items()}
    for kind, cases in BATCHES.items():
        check_near(dtype, f"{kind} batch", oracles, cases, answers[kind])


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_are_scored_near_transformers_and_peft_in_float32(
    dtype: str,
    enforce_eager: bool,
    llama_dir: Path,
    llama_adapters: dict[str, Path],
    oracles: dict[str | None, Any],
    tmp_path: Path,
) -> None:
    """More tokens in a step than the head takes at once."""
    cases = [*MIXED[1:], (random_ids(120, 7), "all"), (random_ids(120, 8), None)]
    sampling = SamplingParams(max_tokens=0, prompt_logprobs=NUM_TOP)
    with running(llama_dir, llama_adapters, tmp_path, dtype, enforce_eager=enforce_eager) as engine:
        answers = [engine.start_sync(TokenPrompt(prompt), sampling, lora=name or "none")[0] for prompt, name in cases]
        rows = [
            [entry for delta in answer for entry in delta.prompt_logprobs if entry is not None] for answer in answers
        ]
    assert [len(entries) for entries in rows] == [len(prompt) - 1 for prompt, _ in cases]
    check_near(dtype, "prompts", oracles, [(prompt[:1], name) for prompt, name in cases], rows)
