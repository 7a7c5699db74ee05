"""Adapters that hold more than LoRA pairs on linears answer as PEFT does: embeddings, heads, DoRA, biases, token rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoProcessor

from adapters.errors import AdapterRefused
from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.config import LoRAModule
from engine.errors import InvalidRequest
from engine.request import AudioPart, ChatPrompt, Message, TextPart, TextPrompt, TokenPrompt
from engine.setup import check_settings
from tests.oracles import CHAT_TEMPLATE, VOCAB_SIZE, Oracle, make_adapter, make_model, make_tokenizer, random_ids, tone

# PEFT warns about settings that are here on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LLAMA, QWEN, GEMMA = "LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM"
SPEECH = "GraniteSpeechForConditionalGeneration"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, skip_special_tokens=False)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"targets": ["q_proj", "v_proj"]},
    "embedding": {"targets": ["embed_tokens", "q_proj"]},
    "head": {"targets": ["lm_head", "embed_tokens"]},
    "dora": {"targets": "all-linear", "use_dora": True},
    "dora_part": {"targets": ["k_proj", "up_proj"], "use_dora": True, "use_rslora": True},
    "lora_bias": {"targets": ["v_proj", "down_proj"], "lora_bias": True},
}
OF_ARCHITECTURE: dict[str, dict[str, dict[str, Any]]] = {
    LLAMA: {},
    GEMMA: {
        "tied": {"targets": ["embed_tokens"], "ensure_weight_tying": True}
    },  # Its rows are scaled and its head is tied.
    QWEN: {
        "bias_all": {"targets": ["q_proj"], "bias": "all"},
        "dora_bias": {"targets": ["q_proj", "v_proj"], "bias": "lora_only", "use_dora": True},
    },
}


def tokens(answer: Answer) -> list[int]:
    return [token_id for delta in answer for token_id in delta.token_ids]


def run(engine: Engine, plan: Sequence[tuple[str | None, list[int]]]) -> list[list[int]]:
    """All prompts at once, each on its adapter."""
    answers = [engine.start_sync(TokenPrompt(prompt), GREEDY, lora=name or "none")[0] for name, prompt in plan]
    return [tokens(answer) for answer in answers]


def make_engine(model: Path, adapters: Mapping[str, Path], catalogue: Path, **settings: Any) -> Engine:
    values: dict[str, Any] = {
        "lora_modules": [LoRAModule(name, str(path)) for name, path in adapters.items()],
        "max_loras": 3, "max_lora_rank": 8, "max_num_batched_tokens": 40,
    }  # fmt: skip
    config = EngineConfig(model=str(model), adapter_dir=str(catalogue), **(values | settings))
    return Engine(config, checks_integrity=True)


@pytest.mark.parametrize("architecture", OF_ARCHITECTURE)
def test_a_batch_of_all_kinds_equals_peft_one_by_one(architecture: str, tmp_path: Path) -> None:
    """More kinds than LoRA rows, so that every row holds several kinds in turn."""
    model = make_model(architecture, tmp_path / "model")
    kinds = KINDS | OF_ARCHITECTURE[architecture]
    adapters = {
        name: make_adapter(model, architecture, tmp_path / name, seed=seed, **settings)
        for seed, (name, settings) in enumerate(kinds.items(), 1)
    }
    oracle = Oracle(model, architecture, adapters)
    prompt, other = random_ids(9, 77), random_ids(31, 78)
    plan = [(name, ids) for ids in (prompt, other) for name in (None, *adapters)]
    expected = [oracle.generate(ids, 8, name) for name, ids in plan]
    assert len(set(map(tuple, expected))) == len(plan), "each kind must change the oracle's tokens"
    engine = make_engine(model, adapters, tmp_path / "catalogue")
    try:
        assert run(engine, plan) == expected
    finally:
        engine.close()
        engine.check_integrity()


def test_dora_on_tower_and_connector_equals_peft(speech_dir: Path, tmp_path: Path) -> None:
    targets = r".*\.(q_proj|to_q|to_kv|query|linear)"
    folder = make_adapter(speech_dir, SPEECH, tmp_path / "dora", targets=targets, seed=4, std=0.15, use_dora=True)
    oracle = Oracle(speech_dir, SPEECH, {"dora": folder})
    clip = tone(0.6, 400)
    features = AutoProcessor.from_pretrained(speech_dir).audio_processor(torch.from_numpy(clip)[None])["input_features"]
    chat = ChatPrompt([Message("user", [AudioPart((clip, 16_000)), TextPart("what?")])])
    engine = make_engine(speech_dir, {"dora": folder}, tmp_path / "catalogue", max_num_batched_tokens=200)
    try:
        answers = [engine.start_sync(chat, GREEDY, lora=name)[0] for name in ("dora", "none")]
        expected = [
            oracle.generate(answer.prompt_token_ids, 8, name, input_features=features)
            for answer, name in zip(answers, ("dora", None), strict=True)
        ]
        assert expected[0] != expected[1]
        assert [tokens(answer) for answer in answers] == expected
    finally:
        engine.close()


# Tokens of an adapter's own

NEW = ("<|yes|>", "<|no|>", "quuxy")
TEMPLATE = CHAT_TEMPLATE.replace("<|end_of_text|>\n", "<|yes|>")


def make_adapter_with_tokens(model_folder: Path, architecture: str, folder: Path, **settings: Any) -> Path:
    """An adapter trained on a model that was resized for three more tokens, saved with its tokenizer as PEFT does."""
    model = getattr(transformers, architecture).from_pretrained(model_folder)
    generator = torch.Generator().manual_seed(len(folder.name))
    model.resize_token_embeddings(VOCAB_SIZE + 3, mean_resizing=False)
    with torch.no_grad():
        for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            table[VOCAB_SIZE:] = torch.randn(3, table.shape[1], generator=generator)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **settings))
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    peft.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(NEW))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def expected_tokens(
    model_folder: Path, architecture: str, folder: Path, num_added: int, prompt: list[int]
) -> list[int]:
    """PEFT's greedy answer on the model as it was trained: with its table resized."""
    model = getattr(transformers, architecture).from_pretrained(model_folder, dtype=torch.float32)
    if num_added:
        model.resize_token_embeddings(VOCAB_SIZE + num_added, mean_resizing=False)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = PeftModel.from_pretrained(model, folder).eval().generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    return list(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("architecture", [LLAMA, GEMMA])
def test_adapters_with_tokens_of_their_own_equal_peft(architecture: str, tmp_path: Path) -> None:
    """Resized tables, rows of single tokens, both at once; with a tied head (Gemma) and without."""
    model = make_model(architecture, tmp_path / "model")
    added = {
        "resized": make_adapter_with_tokens(model, architecture, tmp_path / "resized"),
        "trained": make_adapter_with_tokens(
            model, architecture, tmp_path / "trained", trainable_token_indices=[3, VOCAB_SIZE, VOCAB_SIZE + 1]
        ),
    }
    replaced = {"replaced": make_adapter(model, architecture, tmp_path / "replaced", trainable_token_indices=[3, 7])}
    plain = {"plain": make_adapter(model, architecture, tmp_path / "plain")}
    begin = [*random_ids(8, 5), 3, 7]
    new = [*begin, VOCAB_SIZE, VOCAB_SIZE + 2, VOCAB_SIZE + 1, 9]
    plan: list[tuple[str | None, list[int]]] = [(name, ids) for name in added for ids in (begin, new)]
    plan += [(name, begin) for name in (None, *replaced, *plain)]
    folders = added | replaced | plain
    expected = [
        expected_tokens(model, architecture, folders[name], 3 if name in added else 0, ids)
        if name is not None
        else Oracle(model, architecture).generate(ids, 8)
        for name, ids in plan
    ]
    assert len(set(map(tuple, expected))) == len(plan), "each adapter and token must change the oracle's answer"
    assert any(token_id >= VOCAB_SIZE for ids in expected for token_id in ids), "no new token was ever generated"
    engine = make_engine(model, folders, tmp_path / "catalogue", lora_extra_vocab_size=4)
    try:
        for _ in range(2):
            assert run(engine, plan) == expected
    finally:
        engine.close()
        engine.check_integrity()


@pytest.fixture(scope="module")
def token_folder(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter_with_tokens(llama_dir, LLAMA, tmp_path_factory.mktemp("tokens") / "adapter")


def test_an_adapters_own_tokenizer_and_template_serve_its_requests_alone(
    llama_dir: Path, token_folder: Path, tmp_path: Path
) -> None:
    own = make_tokenizer()
    own.add_tokens(list(NEW))
    engine = make_engine(llama_dir, {"own": token_folder}, tmp_path / "catalogue", lora_extra_vocab_size=3)
    first = SamplingParams(temperature=0, max_tokens=2, logit_bias={VOCAB_SIZE + 2: 100.0}, ignore_eos=True)
    try:
        text = "say <|yes|> quuxy"
        for name, tokenizer in (("own", own), ("none", make_tokenizer())):
            answer = engine.start_sync(TextPrompt(text), GREEDY, lora=name)[0]
            assert answer.prompt_token_ids == tokenizer(text)["input_ids"]
            output = "".join(delta.text for delta in answer)
            assert output == tokenizer.decode(tokens_of(engine, text, name), clean_up_tokenization_spaces=False)
        chat = ChatPrompt([Message("user", "hi")])
        asked = engine.start_sync(chat, GREEDY, lora="own")[0].prompt_token_ids
        own.chat_template = TEMPLATE
        rendered = own.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        assert asked == own(rendered)["input_ids"] and VOCAB_SIZE in asked
        assert "".join(delta.text for delta in engine.start_sync(TextPrompt("x"), first, lora="own")[0]) == "quuxyquuxy"
        with pytest.raises(InvalidRequest, match=f"between 0 and {VOCAB_SIZE - 1}"):
            engine.start_sync(TextPrompt("x"), first, lora="none")
        with pytest.raises(InvalidRequest, match=f"between 0 and {VOCAB_SIZE - 1}"):
            engine.start_sync(TokenPrompt([VOCAB_SIZE]), GREEDY, lora="none")
        assert engine.tokenize(TextPrompt("quuxy"), "own") == [VOCAB_SIZE + 2] != engine.tokenize(TextPrompt("quuxy"))
    finally:
        engine.close()


def tokens_of(engine: Engine, text: str, name: str) -> list[int]:
    return tokens(engine.start_sync(TextPrompt(text), GREEDY, lora=name)[0])


def test_nobody_samples_the_tokens_of_another_adapter(llama_dir: Path, token_folder: Path, tmp_path: Path) -> None:
    plain = make_adapter(llama_dir, LLAMA, tmp_path / "plain", rank=4)
    wild = SamplingParams(temperature=50.0, max_tokens=60, ignore_eos=True, logprobs=20)
    engine = make_engine(
        llama_dir, {"own": token_folder, "plain": plain}, tmp_path / "catalogue", lora_extra_vocab_size=5
    )
    try:
        answers = [
            engine.start_sync(TokenPrompt([5, 6]), wild, lora=name)[0]
            for name in ("own", "none", "plain")
            for _ in "123"
        ]
        highest = [max(tokens(answer)) for answer in answers]
        assert VOCAB_SIZE <= max(highest[:3]) < VOCAB_SIZE + 3, "its own tokens, and no more than it has"
        assert max(highest[3:]) < VOCAB_SIZE
    finally:
        engine.close()


def refusal(engine: Engine, folder: Path) -> str:
    with pytest.raises(AdapterRefused) as caught:
        engine.adapters.load("refused", str(folder))
    return caught.value.message


def test_what_cannot_be_served_is_refused_with_the_way_out(llama_dir: Path, token_folder: Path, tmp_path: Path) -> None:
    rows = make_adapter(llama_dir, LLAMA, tmp_path / "rows", trainable_token_indices=[3, 7, 9])
    embedding = make_adapter(llama_dir, LLAMA, tmp_path / "embedding", targets=["embed_tokens"], use_dora=True)
    lora = make_adapter(llama_dir, LLAMA, tmp_path / "lora", targets=["embed_tokens"])
    engine = make_engine(llama_dir, {}, tmp_path / "catalogue", lora_target_modules=["q_proj", "v_proj"])
    try:
        assert "--lora-extra-vocab-size 3" in refusal(engine, token_folder)
        assert "--lora-extra-vocab-size 3" in refusal(engine, rows)
        assert "--lora-target-modules" in refusal(engine, lora)
    finally:
        engine.close()
    engine = make_engine(llama_dir, {}, tmp_path / "catalogue")
    try:
        assert "DoRA and biases on embeddings are not served" in refusal(engine, embedding)
        engine.adapters.load("served", str(lora))
    finally:
        engine.close()


def test_a_tokenizer_that_does_not_belong_is_refused(llama_dir: Path, token_folder: Path, tmp_path: Path) -> None:
    import shutil

    def copy(name: str) -> Path:
        return Path(shutil.copytree(token_folder, tmp_path / name))

    missing, moved, broken, larger = copy("missing"), copy("moved"), copy("broken"), copy("larger")
    (missing / "tokenizer.json").unlink()
    (broken / "tokenizer.json").write_text("{")
    values = json.loads((moved / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (moved / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([*NEW, "more"])
    tokenizer.save_pretrained(larger)
    engine = make_engine(llama_dir, {}, tmp_path / "catalogue", lora_extra_vocab_size=3)
    try:
        assert "no tokenizer.json" in refusal(engine, missing)
        assert "another id" in refusal(engine, moved)
        assert "cannot be read" in refusal(engine, broken)
        assert "'more'" in refusal(engine, larger)
        engine.adapters.load("fine", str(token_folder))
    finally:
        engine.close()


def test_room_for_fewer_than_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--lora-extra-vocab-size is -1"):
        check_settings(EngineConfig(lora_extra_vocab_size=-1))
