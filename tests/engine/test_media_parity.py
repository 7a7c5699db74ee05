"""Models that take audio and images: tokens and logits equal transformers' own, and PEFT's, whatever shares the batch."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from engine import Engine, EngineConfig, SamplingParams
from engine.answer import Answer
from engine.config import LoRAModule
from engine.errors import MediaError
from engine.prompt import media_parts
from engine.request import AudioPart, ChatPrompt, ImagePart, Message, TextPart, TextPrompt
from tests.media_models import (
    EXTRA_SPECIALS,
    GEMMA,
    HAS_OMNI,
    LLAVA,
    MEDIA_MODELS,
    OMNI,
    PHI,
    QWEN_AUDIO,
    QWEN_VL,
    VOXTRAL,
    WINDOW_SECONDS,
    media_inputs,
    picture,
)
from tests.oracles import Oracle, make_adapter, make_model, tone
from tests.pace import held_before

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
TARGETS = {
    "tower": r".*(vision_tower|visual|audio_tower|img_processor|audio_embed\.encoder)\.(?!merger|patch_embed).*"
    r"\.(q_proj|v_proj|fc1|qkv|proj|up_proj|gate_up_proj)",
    "connector": r".*(multi_modal_projector\.linear.*|visual\.merger\.mlp\.0|audio_tower\.proj|img_projection_up"
    r"|down_proj_for_\w+)",
    "decoder": r"(.*language_model|model\.layers).*\.(q_proj|qkv_proj|down_proj)",
}

Media = np.ndarray | Image.Image


class World:
    """A tiny model with adapters, an engine on it, and the oracle; `settings` are the engine's."""

    def __init__(self, architecture: str, root: Path, **settings: Any) -> None:
        self.architecture = architecture
        self.folder = make_model(architecture, root / "model")
        parts = [part for part in TARGETS if not (architecture == GEMMA and part == "connector")]
        self.adapters = {
            part: make_adapter(
                self.folder, architecture, root / part, targets=TARGETS[part], rank=3 + index, seed=index
            )
            for index, part in enumerate(parts)
        }
        every = "|".join(TARGETS[part] for part in parts)
        self.adapters["all"] = make_adapter(
            self.folder, architecture, root / "all", targets=every, rank=5, seed=9, std=0.2, use_rslora=True
        )
        self.oracle = Oracle(self.folder, architecture, self.adapters)
        self.engine = Engine(
            EngineConfig(
                model=str(self.folder),
                lora_modules=[LoRAModule(name, str(path)) for name, path in self.adapters.items()],
                max_num_batched_tokens=30, max_num_seqs=6, max_loras=3, max_lora_rank=8, max_model_len=400, block_size=4,
                adapter_dir=str(root / "catalogue"), **settings,
            ),
            checks_integrity=True,
        )  # fmt: skip

    def media(self) -> list[list[Media]]:
        """Items of several requests: one, two, and where the model takes both kinds, one of each."""
        images: list[Media] = [picture(40, 30, 1), picture(23, 61, 2), picture(30, 30, 3)]
        clips: list[Media] = [tone(0.31, 300), tone(0.6, 500), tone(0.13, 700)]
        if self.architecture in (OMNI, PHI):
            return [[images[0]], [clips[0]], [images[1], clips[1]], [clips[2], images[2], images[0]]]
        if self.architecture == VOXTRAL:
            clips[1] = tone(2.4, 500)  # two windows
        items = clips if self.architecture in (QWEN_AUDIO, VOXTRAL) else images
        return [[items[0]], [items[1], items[0]], [items[2]]]

    def start(self, media: list[Media], lora: str | None, text: str = "what?") -> Answer:
        parts: list[Any] = [TextPart("see: ")]
        for item in media:
            parts.append(ImagePart(item) if isinstance(item, Image.Image) else AudioPart((item, 16_000)))
        prompt = ChatPrompt([Message("user", [*parts, TextPart(text)])])
        return self.engine.start_sync(prompt, GREEDY, lora=lora or "none")[0]

    def inputs(self, answer: Answer, media: list[Media]) -> dict[str, Any]:
        """What transformers takes beside the ids of `answer`'s prompt."""
        inputs: dict[str, Any] = media_inputs(self.architecture, media)
        ids = torch.tensor([answer.prompt_token_ids])
        if "image_grid_thw" in inputs and self.architecture != OMNI:
            inputs["mm_token_type_ids"] = (ids == 261).int()
        if self.architecture == GEMMA:
            inputs["token_type_ids"] = (ids == 261).int()
        return inputs


@pytest.fixture(scope="module", params=MEDIA_MODELS if HAS_OMNI else MEDIA_MODELS[:-1])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(request.param, tmp_path_factory.mktemp("media"))
    yield world
    world.engine.close()
    world.engine.check_integrity()


def collect(answer: Answer) -> tuple[list[int], list[float]]:
    deltas = list(answer)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    return [token for delta in deltas for token in delta.token_ids], [entry.logprob for entry in entries]


def check_mixed_batch(world: World) -> None:
    """Base, and adapters on tower, connector, decoder and all of them, at once, in chunks smaller than the prompts."""
    plan = [(media, name) for media in world.media() for name in (None, *world.adapters)]
    answers = [world.start(media, name) for media, name in plan]
    generated = [collect(answer) for answer in answers]
    for (media, name), answer, (tokens, logprobs) in zip(plan, answers, generated, strict=True):
        inputs = world.inputs(answer, media)
        assert tokens == world.oracle.generate(answer.prompt_token_ids, 12, name, **inputs), name
        if len(media) == 1:  # Whole logits, since a small fault need not change a greedy token.
            logits = world.oracle.logits(answer.prompt_token_ids, name, **inputs)[-1]
            assert logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[tokens[0]]), abs=2e-4)
    by_adapter = {name: tokens for (_, name), (tokens, _) in zip(plan, generated, strict=True) if name}
    assert len(set(map(tuple, by_adapter.values()))) == len(by_adapter), "adapters must differ, or this proves nothing"


def test_mixed_adapters_and_media_in_one_batch_equal_peft(world: World) -> None:
    check_mixed_batch(world)


def test_other_media_give_other_answers(world: World) -> None:
    first, second = (collect(world.start(media, None))[1] for media in world.media()[0:3:2])
    assert first != pytest.approx(second, abs=1e-3)


def test_text_alone_equals_generate(world: World) -> None:
    answer = world.start([], None, "no media, " * 5)
    assert collect(answer)[0] == world.oracle.generate(answer.prompt_token_ids, 12)


def items_at_awkward_sizes(world: World) -> list[AudioPart | ImagePart]:
    lengths = [1, 159, 400, 401, 479, 480, 481, 639, 641, 799, 4799, 4801, 15_999, 16_000]
    lengths += [16_001, 31_999, 32_000, 32_001, 159_999, 160_000] if world.architecture in (OMNI, VOXTRAL) else []
    sizes = [(1, 1), (8, 8), (15, 17), (23, 24), (25, 24), (64, 9), (9, 64), (300, 40), (31, 333)]
    sound, modalities = tone(11, 300), world.engine.modalities
    clips = [AudioPart((sound[:length], 16_000)) for length in lengths if "audio" in modalities]
    return clips + [ImagePart(picture(*size, seed=size[0])) for size in sizes if "image" in modalities]


def test_placeholders_are_as_many_as_features_at_awkward_sizes(world: World) -> None:
    frontends = world.engine._intake._frontends
    for part in items_at_awkward_sizes(world):
        modality = "audio" if isinstance(part, AudioPart) else "image"
        media = frontends[modality].read(part, world.engine._intake._limits)
        with torch.inference_mode():
            [features] = world.engine.base.encode(modality, [media.features])
        assert features.shape == (media.num_tokens, world.engine.base.text_config.hidden_size) and media.num_tokens > 0


def test_items_of_equal_shape_in_one_call_have_the_features_of_each_alone(world: World) -> None:
    frontends, base = world.engine._intake._frontends, world.engine.base
    for modality in world.engine.modalities:
        parts = [
            AudioPart((tone(0.4, pitch), 16_000)) if modality == "audio" else ImagePart(picture(40, 30, pitch))
            for pitch in (300, 400, 500)
        ]
        items = [frontends[modality].read(part, world.engine._intake._limits) for part in parts]
        assert len({item.batch_key for item in items}) == 1
        with torch.inference_mode():
            together = base.encode(modality, [item.features for item in items])
            alone = [base.encode(modality, [item.features])[0] for item in items]
        assert float((alone[0] - alone[1]).abs().max()) > 0.02
        for batched, single in zip(together, alone, strict=True):
            torch.testing.assert_close(batched, single, atol=2e-5, rtol=1e-4)


def test_media_that_the_model_cannot_take_are_refused_with_the_part(world: World) -> None:
    if world.architecture in (QWEN_AUDIO, OMNI):
        longest = WINDOW_SECONDS[world.architecture]
        with pytest.raises(MediaError, match=f"hears {longest} seconds at most") as caught:
            world.engine.tokenize(
                ChatPrompt([Message("user", [AudioPart((tone(longest + 0.001), 16_000), "messages[0]")])])
            )
        assert caught.value.param == "messages[0]"
    if world.architecture in (QWEN_VL, OMNI):
        with pytest.raises(MediaError, match="cannot take this image") as caught:
            world.engine.tokenize(
                ChatPrompt([Message("user", [ImagePart(Image.new("RGB", (5000, 3)), "messages[0]")])])
            )
        assert caught.value.param == "messages[0]"


def test_typed_placeholders_are_text(world: World) -> None:
    names = "".join(["<|audio|>", *EXTRA_SPECIALS])
    media = world.media()[-1]
    plain, typed = world.start(media, None), world.start(media, None, f"{names}?")
    tokenizer = world.engine.tokenizer
    assert names in tokenizer.decode(typed.prompt_token_ids, clean_up_tokenization_spaces=False)
    specials = [[token for token in answer.prompt_token_ids if token >= 256] for answer in (plain, typed)]
    assert specials[0] == specials[1]
    assert collect(typed)[0] == world.oracle.generate(typed.prompt_token_ids, 12, **world.inputs(typed, media))


def test_media_are_encoded_once_a_tower_whatever_is_preempted(world: World, tmp_path: Path) -> None:
    """No cache, too few blocks for all, chunks that cut spans: each request's items are encoded once under its tower."""
    config = dataclasses.replace(
        world.engine.config, encoder_cache_mb=0, kv_cache_memory_mb=None, enable_prefix_caching=False,
        adapter_dir=str(tmp_path),
    )  # fmt: skip
    engine = Engine(config, checks_integrity=True)
    encoded: list[int] = []
    encode = engine.base.encode

    def counting(modality: Any, items: Any) -> Any:
        encoded.append(len(items))
        return encode(modality, items)

    engine.base.encode = counting  # type: ignore[method-assign]
    blocks = engine._scheduler.blocks
    media = world.media()
    prompts = [len(world.start(items, None).prompt_token_ids) for items in media]
    kept = 1 + -(-(max(prompts) + 12) // 4) * 3 // 2
    for block in range(kept, blocks.num_blocks):
        del blocks._free[block]
    blocks.num_blocks = kept
    del blocks._num_refs[kept:]
    names = [None, "decoder", "tower"]
    other = World.__new__(World)
    other.__dict__.update(world.__dict__, engine=engine)
    try:
        with held_before(engine, len(media) * len(names)):
            answers = [(items, name, other.start(items, name)) for items in media for name in names]
        for items, name, answer in answers:
            expected = world.oracle.generate(answer.prompt_token_ids, 12, name, **world.inputs(answer, items))
            assert collect(answer)[0] == expected
        assert engine.stats().num_preemptions > 0, "preemption was not exercised"
        assert sum(encoded) <= sum(len(items) for items in media) * len(names)
    finally:
        engine.close()


@pytest.mark.parametrize("world", [GEMMA, LLAVA, QWEN_VL, PHI], indirect=True)
def test_the_probes_picture_is_seen_as_transformers_sees_it(world: World) -> None:
    prober = world.engine._prober
    built = prober.built_prompts()[-1]
    image = next(part.source for part in media_parts(prober._prompts[-1]))
    logits = prober._logits(built, list(built.token_ids), None, time.monotonic() + 120)
    asked = SimpleNamespace(prompt_token_ids=built.token_ids)
    inputs = world.inputs(asked, [Image.fromarray(image)])  # type: ignore[arg-type]
    torch.testing.assert_close(logits.float(), world.oracle.logits(built.token_ids, **inputs)[-1], atol=2e-4, rtol=1e-4)


# The other models' processors need packages that are no part of the installation.
@pytest.mark.parametrize("world", [GEMMA, LLAVA, QWEN_AUDIO], indirect=True)
def test_ids_equal_the_processors_own(world: World) -> None:
    processor = AutoProcessor.from_pretrained(world.folder)
    kind = "audio" if world.architecture == QWEN_AUDIO else "images"
    marker = {GEMMA: "<|begin|>", LLAVA: "<|image|>", QWEN_AUDIO: "<|audio_bos|><|audio|><|audio_eos|>"}
    for media in world.media():
        text = "\n\none" + marker[world.architecture] * len(media) + "\n two"
        extra = {"sampling_rate": 16_000} if kind == "audio" else {}
        expected = processor(text=text, **{kind: list(media)}, **extra)["input_ids"][0]
        parts = [ImagePart(item) if kind == "images" else AudioPart((item, 16_000)) for item in media]
        prompt = TextPrompt(text, parts if kind == "audio" else (), parts if kind == "images" else ())  # type: ignore[arg-type]
        assert world.engine.tokenize(prompt) == list(expected)


@pytest.mark.parametrize("world", [OMNI] if HAS_OMNI else [], indirect=True)
def test_a_checkpoint_of_which_the_model_is_a_part_is_served(world: World, tmp_path: Path) -> None:
    """Released Qwen2.5-Omni folders hold the thinker beside a talker, which is left out."""
    folder = shutil.copytree(world.folder, tmp_path / "whole")
    weights = load_file(folder / "model.safetensors")
    whole = {f"thinker.{name}": tensor for name, tensor in weights.items()} | {"talker.x.weight": torch.zeros(3)}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    whole_config = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": config}
    (folder / "config.json").write_text(json.dumps(whole_config))
    other = World.__new__(World)
    settings = dataclasses.replace(world.engine.config, model=str(folder), adapter_dir=str(tmp_path / "catalogue"))
    other.__dict__.update(world.__dict__, engine=Engine(settings, checks_integrity=True))
    try:
        for name in (None, "all"):
            media = world.media()[2]
            assert collect(other.start(media, name))[0] == collect(world.start(media, name))[0]
    finally:
        other.engine.close()
