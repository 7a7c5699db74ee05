"""Which checkpoints are taken: by class, and by what within a class was tried; all others are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from engine.architectures import ARCHITECTURES, find_architecture
from engine.errors import UnsupportedModel
from tests.media_models import GEMMA, LLAVA, media_config

TEXT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def named(architecture: str, config: Any) -> Any:
    config.architectures = [architecture]
    return config


def refusal(config: Any) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        find_architecture(config)
    return str(caught.value)


def test_other_classes_are_refused_with_the_whole_list() -> None:
    message = refusal(named("Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig()))
    assert "Qwen3MoeForCausalLM" in message and all(name in message for name in ARCHITECTURES)


def test_longrope_is_served_where_each_request_gets_its_own_and_dynamic_nowhere() -> None:
    phi = named("Phi3ForCausalLM", transformers.Phi3Config(**TEXT, rope_parameters=LONG))
    assert find_architecture(phi).class_name == "Phi3ForCausalLM"
    llama = named("LlamaForCausalLM", transformers.LlamaConfig(**TEXT, rope_parameters=LONG))
    assert "longrope" in refusal(llama)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    phi.rope_parameters = dynamic
    assert "dynamic" in refusal(phi)


def test_towers_and_windows_that_were_not_tried_are_refused() -> None:
    llava = named(LLAVA, media_config(LLAVA, TEXT))
    assert find_architecture(llava).modalities == {"image"}
    llava.vision_config = transformers.PixtralVisionConfig()
    assert "pixtral" in refusal(llava)
    gemma = named(GEMMA, media_config(GEMMA, TEXT))
    assert find_architecture(gemma).modalities == {"image"}
    gemma.mm_tokens_per_image = gemma.text_config.sliding_window + 1
    assert "sliding window" in refusal(gemma)
