"""Phi-4-multimodal as people have it: in its published layout, with its two adapters beside it, each a default."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine import Engine, EngineConfig, SamplingParams
from engine import model as engine_model
from engine.answer import Answer
from engine.architectures import find_architecture
from engine.config import LoRAModule
from engine.probe import NUM_POSITIONS
from engine.published_phi4 import native_fields
from engine.request import AudioPart, ChatPrompt, ImagePart, Message, TextPart
from tests.media_models import AUDIO, IMAGE, PHI, media_inputs, picture
from tests.oracles import Oracle, make_adapter, make_model, tone

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DECODER = r"model.layers.\d+.((self_attn.(qkv|o)_proj)|(mlp.(gate_up|down)_proj))"  # as in the published adapters
TOWERS = r".*(audio_embed|img_projection).*(q_proj|o_proj|gate_up_proj|down_proj|up_proj_for_\w+|projection_up)"
# The published names, from transformers' conversion script.
PUBLISHED = {
    r"(layers\.\d+\.(?:self_attn|mlp)\.\w+)\.weight": r"\1.base_layer.weight",
    r"(feed_forward_\w+)\.gate_up_proj": r"\1.net.0.linear",
    r"(feed_forward_\w+)\.down_proj": r"\1.net.2",
    r"(encoders\.\d+\.self_attn)\.(q|k|v)_proj": r"\1.linear_\2",
    r"(encoders\.\d+\.self_attn)\.o_proj": r"\1.linear_out",
    r"img_projection_up": "img_projection.0",
    r"img_projection_down": "img_projection.2",
    r"global_img_feature_extensor": "glb_GN",
    r"sub_img_feature_extensor": "sub_GN",
    r"up_proj_for_speech": "audio_projection.speech.0",
    r"down_proj_for_speech": "audio_projection.speech.2",
    r"up_proj_for_vision_speech": "audio_projection.vision.0",
    r"down_proj_for_vision_speech": "audio_projection.vision.2",
}


SHORT_LEN = 60
"""Longest request that takes the short frequencies."""
ROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 7.0], "original_max_position_embeddings": SHORT_LEN,
}  # fmt: skip


def published_name(name: str) -> str:
    for pattern, replacement in PUBLISHED.items():
        if "img_processor" in name and "layers" in pattern:
            continue
        # `up_proj_for_speech` is not the end of another name.
        name = re.sub(rf"(?<![a-z_]){pattern}", replacement, name)
    return name


def publish(folder: Path, native: Path, adapters: dict[str, Path]) -> Path:
    """The model of `native` in the published layout, with its adapters inside."""
    shutil.copytree(native, folder)
    weights = {published_name(name): tensor for name, tensor in load_file(native / "model.safetensors").items()}
    for number, layer in enumerate(name for name in list(weights) if ".base_layer." in name):
        for adapter in ("speech", "vision"):
            for half in "AB":
                name = layer.replace("base_layer.weight", f"lora_{half}.{adapter}.weight")
                weights[name] = torch.full((2, 2), float(number))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((native / "config.json").read_text())
    audio, vision = config.pop("audio_config"), config.pop("vision_config")
    del config["rope_parameters"]
    config |= {
        "model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"], "rope_theta": ROPE["rope_theta"],
        "partial_rotary_factor": ROPE["partial_rotary_factor"],
        "rope_scaling": {"type": "longrope", **{name: ROPE[name] for name in ("short_factor", "long_factor")}},
        "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig"}, "img_processor": None, "mlp_bias": False,
        "audio_processor": {"name": "cascades", "config": {
            "attention_dim": audio["hidden_size"], "attention_heads": audio["num_attention_heads"], "num_blocks": 2,
            "linear_units": audio["intermediate_size"], "nemo_conv_settings": {"conv_channels": 8}, "kernel_size": 3,
            "depthwise_seperable_out_channel": 32, "ext_pw_out_channel": 32, "input_size": 16, "input_layer": "nemo_conv",
            "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": 20}, "time_reduction": 8,
        }},
        "embd_layer": {
            "audio_embd_layer": {"downsample_rate": 1, "compression_rate": 8},
            "image_embd_layer": {"crop_size": vision["crop_size"], "use_hd_transform": True},
        },
        "speech_lora": {"r": 320}, "vision_lora": {"r": 256},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    processor = json.loads((native / "processor_config.json").read_text())
    merged = processor["image_processor"] | processor["audio_processor"] | {
        "feature_extractor_type": "Phi4MMAudioFeatureExtractor", "image_processor_type": "Phi4MMImageProcessor",
        "auto_map": {"AutoImageProcessor": "processing_phi4mm.Phi4MMImageProcessor"},
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(merged))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Phi4MMProcessor"}))
    for name, adapter in adapters.items():
        shutil.copytree(adapter, folder / name)
    return folder


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as transformers writes it."""
    folder = tmp_path_factory.mktemp("phi4") / "native"
    return make_model(PHI, folder, rope_parameters=ROPE, original_max_position_embeddings=SHORT_LEN)


@pytest.fixture(scope="module")
def adapters(native: Path) -> dict[str, Path]:
    root = native.parent
    made = {
        "speech-lora": make_adapter(native, PHI, root / "speech", targets=DECODER, rank=5, alpha=10, seed=1),
        "vision-lora": make_adapter(native, PHI, root / "vision", targets=DECODER, rank=4, seed=2),
        "towers": make_adapter(native, PHI, root / "towers", targets=TOWERS, rank=3, seed=3),
        "image-tower": make_adapter(native, PHI, root / "image", targets=r".*img_processor.*\.fc1", rank=2, seed=4),
    }
    # An adapter that was trained on the published classes has their names.
    file = made["towers"] / "adapter_model.safetensors"
    native_towers = shutil.copytree(made["towers"], root / "native-towers")
    tensors = load_file(file)
    renamed = {published_name(name): tensor for name, tensor in tensors.items()}
    assert sum(name not in tensors for name in renamed) > 20
    save_file(renamed, file)
    return made | {"native-towers": native_towers}


@pytest.fixture(scope="module")
def engine(native: Path, adapters: dict[str, Path]) -> Iterator[Engine]:
    """On the published layout, each of the two adapters in it a default."""
    inside = {name: adapters[name] for name in ("speech-lora", "vision-lora")}
    folder = publish(native.parent / "published", native, inside)
    with pytest.MonkeyPatch.context() as patch:
        # The published config leaves unsaid what transformers' classes have by default.
        sizes = {
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": 24, "patch_size": 4, "image_token_id": IMAGE,
        }  # fmt: skip

        def tiny_fields(published: Mapping[str, Any]) -> dict[str, Any]:
            fields = native_fields(published)
            fields["vision_config"] |= sizes
            fields["audio_config"]["audio_token_id"] = AUDIO
            return fields

        patch.setattr(engine_model, "native_fields", tiny_fields)
        assert engine_model.outline_model(str(folder)).architecture.class_name == PHI
        engine = Engine(
            EngineConfig(
                model=str(folder), max_lora_rank=8, max_loras=3, max_num_seqs=12, max_num_batched_tokens=40, block_size=4,
                lora_modules=[
                    LoRAModule("speech", str(folder / "speech-lora")), LoRAModule("vision", str(folder / "vision-lora")),
                    LoRAModule("towers", str(adapters["towers"])),
                ],
                default_mm_loras={"audio": "speech", "image": "vision"}, adapter_dir=str(native.parent / "catalogue"),
            ),
            checks_integrity=True,
        )  # fmt: skip
    yield engine
    engine.close()
    engine.check_integrity()


Media = np.ndarray | Image.Image
CLIP, PICTURE = tone(0.4, 500), picture(40, 30, 1)
CASES: list[tuple[list[Media], str | None, str | None, str]] = [
    # media, the request's `lora`, who answers, why
    ([], None, None, "base"),
    ([PICTURE], None, "vision", "default:image"),
    ([CLIP], None, "speech", "default:audio"),
    ([CLIP, PICTURE], None, None, "conflict:audio=speech,image=vision"),
    ([PICTURE, CLIP], "vision", "vision", "explicit"),
    ([CLIP], "none", None, "opt-out"),
    ([CLIP], "towers", "towers", "explicit"),
    ([CLIP, PICTURE], "towers", "towers", "explicit"),
]


def start(engine: Engine, media: list[Media], lora: str | None) -> Answer:
    parts = [ImagePart(item) if isinstance(item, Image.Image) else AudioPart((item, 16_000)) for item in media]
    return engine.start_sync(ChatPrompt([Message("user", [*parts, TextPart("what?")])]), GREEDY, lora=lora)[0]


def test_the_published_folder_and_its_adapters_answer_as_the_converted_ones(
    engine: Engine, native: Path, adapters: dict[str, Path]
) -> None:
    """All in one batch: one clip under both projections, long and short frequencies, each default and none."""
    names = {"speech": "speech-lora", "vision": "vision-lora", "towers": "native-towers"}
    oracle = Oracle(native, PHI, {name: adapters[folder] for name, folder in names.items()})
    answers = [start(engine, media, lora) for media, lora, _, _ in CASES]
    lengths = set()
    for (media, lora, name, reason), answer in zip(CASES, answers, strict=True):
        tokens = [token for delta in answer for token in delta.token_ids]
        assert (answer.receipt.name, answer.receipt.reason) == (name, reason)
        expected = oracle.generate(answer.prompt_token_ids, 8, name, **media_inputs(PHI, media))
        assert tokens == expected, (len(media), lora)
        lengths.add(len(answer.prompt_token_ids) > SHORT_LEN)
    assert lengths == {True, False}, "both kinds of frequencies must occur, or this proves less than it says"


def test_a_clip_has_features_of_its_own_beside_an_image(engine: Engine) -> None:
    [alone] = engine._intake._decode([AudioPart((CLIP, 16_000))])
    beside, image = engine._intake._decode([AudioPart((CLIP, 16_000)), ImagePart(PICTURE)])
    assert alone.num_tokens == beside.num_tokens and image.modality == "image"
    assert alone.digest != beside.digest and alone.batch_key != beside.batch_key
    with torch.inference_mode():
        features = [engine.base.encode("audio", [item.features])[0] for item in (alone, beside)]
    assert float((features[0] - features[1]).abs().max()) > 0.05


def test_clips_longer_than_the_towers_window_are_batched_without_changing_each_other(engine: Engine) -> None:
    """Its window is 40 seconds; clips of equal length come in one call."""
    frames = torch.randn(2, 4001, 16, generator=torch.Generator().manual_seed(0))
    clips = [{"input_features": clip[None]} for clip in frames]
    with torch.inference_mode():
        together = engine.base.encode("audio", clips)
        alone = [engine.base.encode("audio", [clip])[0] for clip in clips]
    num_tokens = engine._intake._frontends["audio"].num_tokens(400 + 4000 * 160)  # type: ignore[attr-defined]
    assert [len(features) for features in together] == [num_tokens] * 2
    assert float((alone[0] - alone[1]).abs().max()) > 0.05
    for batched, single in zip(together, alone, strict=True):
        torch.testing.assert_close(batched, single, atol=2e-5, rtol=1e-4)


def test_the_probe_sees_what_an_adapter_of_the_image_tower_alone_does(
    engine: Engine, adapters: dict[str, Path]
) -> None:
    modalities = [[span.media.modality for span in built.spans] for built in engine._prober.built_prompts()]
    assert modalities == [[], [], [], ["audio"], ["image"]]
    engine.adapters.load("image-tower", str(adapters["image-tower"]))
    report = engine.probe("image-tower", timeout_s=120)
    assert report.num_tokens == NUM_POSITIONS * 5 and report.mean_kl is not None and report.mean_kl > 1e-5
    assert report.verdict in ("effect", "slight effect")
    engine.adapters.unload("image-tower")


def test_a_published_config_becomes_one_of_transformers_with_the_released_sizes() -> None:
    audio = {
        "attention_dim": 1024, "attention_heads": 16, "linear_units": 1536, "num_blocks": 24, "input_size": 80,
        "nemo_conv_settings": {"conv_channels": 1024}, "batch_norm": False, "time_reduction": 8,
        "relative_attention_bias_args": {"type": "t5", "t5_bias_max_distance": 500},
    }  # fmt: skip
    published = {
        "model_type": "phi4mm", "auto_map": {"AutoConfig": "x.y"}, "hidden_size": 3072, "rope_theta": 10_000.0,
        "tie_word_embeddings": True, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        "num_attention_heads": 24, "audio_processor": {"config": audio, "name": "cascades"},
        "embd_layer": {"audio_embd_layer": {"downsample_rate": 1}, "image_embd_layer": {"crop_size": 448}},
    }  # fmt: skip
    config = AutoConfig.for_model(**native_fields(published))
    assert type(config).__name__ == "Phi4MultimodalConfig" and find_architecture(config).class_name == PHI
    assert (config.hidden_size, config.tie_word_embeddings) == (3072, True)
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["partial_rotary_factor"], rope["original_max_position_embeddings"]) == (
        "longrope", 0.75, 4096,
    )  # fmt: skip
    audio_config, vision_config = config.audio_config, config.vision_config
    assert (audio_config.hidden_size, audio_config.bias_max_distance, audio_config.audio_token_id) == (
        1024,
        500,
        200011,
    )
    assert (vision_config.crop_size, vision_config.patch_size, vision_config.num_hidden_layers) == (448, 14, 27)
    assert not hasattr(config, "auto_map")
