"""Independent ways to get the right answer: tiny models, PEFT adapters on them, and transformers' own `generate`.

The models are random, with weights large enough that adapters and prompts change the greedy tokens. Nothing here uses
the code under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.media_models import EXTRA_SPECIALS, EXTRA_TOKENS, MEDIA_MODELS, PHI, media_config, save_processor

SPECIALS = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|pad|>", "<|audio|>"]
EOS = 256
AUDIO = 260
VOCAB_SIZE = 261
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start_of_role|>{{ message['role'] }}<|end_of_role|>{{ message['content'] }}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 259,
    "tie_word_embeddings": False,
}


def make_tokenizer(*, takes_media: bool = False) -> PreTrainedTokenizerFast:
    """Bytes as tokens: every text has an encoding, and random ids decode to broken UTF-8 now and then.

    `takes_media` adds the special tokens of `tests/media_models`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = SPECIALS + EXTRA_SPECIALS * takes_media
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIALS[0],
        pad_token=SPECIALS[3],
        extra_special_tokens={"audio_token": SPECIALS[4], **(EXTRA_TOKENS if takes_media else {})},
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _config(architecture: str, **overrides: Any) -> Any:
    if architecture == "GraniteSpeechForConditionalGeneration":
        encoder = {
            "input_dim": 160, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 4, "dim_head": 8,
            "output_dim": 12, "context_size": 50, "max_pos_emb": 64, "conv_kernel_size": 5, "conv_expansion_factor": 2,
        }  # fmt: skip
        projector = {
            "model_type": "blip_2_qformer", "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 48, "encoder_hidden_size": 32, "cross_attention_frequency": 1,
        }  # fmt: skip
        text = {**_TEXT, "model_type": "granite", "attention_multiplier": 0.3, "logits_scaling": 1.0}
        return transformers.GraniteSpeechConfig(
            text_config=text,
            encoder_config=encoder,
            projector_config=projector,
            audio_token_index=AUDIO,
            audio_token_id=AUDIO,
            has_lora_adapter=False,
            downsample_rate=5,
            window_size=15,
            tie_word_embeddings=False,
        )
    if architecture in MEDIA_MODELS:
        return media_config(architecture, {**_TEXT, **overrides})
    special: dict[str, dict[str, Any]] = {
        "LlamaForCausalLM": {},
        "MistralForCausalLM": {"sliding_window": 13},
        "Phi3ForCausalLM": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        },
        "Qwen2ForCausalLM": {},
        "Qwen3ForCausalLM": {"head_dim": 16},
        "GraniteForCausalLM": {"attention_multiplier": 0.3, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
        "Gemma3ForCausalLM": {
            "head_dim": 16,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": True,
        },
    }
    config_class = getattr(transformers, architecture).config_class
    return config_class(**{**_TEXT, **special[architecture], **overrides})


def make_model(architecture: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Save a random model of the architecture with its tokenizer; returns its folder.

    `overrides` are fields of the decoder's config, but for Granite Speech.
    """
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(_config(architecture, **overrides)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for full_name, parameter in model.named_parameters():
            name = re.sub(r"embed_tokens_extend\.(audio|image)_embed", "media", full_name)
            if architecture in MEDIA_MODELS and ("conv" in name or "patch_embed" in name) and parameter.ndim > 2:
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 / fan_in**0.5)
            elif parameter.ndim >= 2 and "embed" not in name and "conv" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.9 / parameter.shape[-1] ** 0.5)
            elif "embed_tokens" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
            elif architecture.startswith("Gemma3") and "post_" in name:
                parameter.fill_(9.0)  # Else the tied head would repeat each token for ever.
    model.generation_config.pad_token_id = 259
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(takes_media=architecture in MEDIA_MODELS)
    save_processor(architecture, tokenizer, folder)
    if architecture.startswith("GraniteSpeech"):
        extractor = transformers.GraniteSpeechFeatureExtractor(projector_window_size=15, projector_downsample_rate=5)
        processor = transformers.GraniteSpeechProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE)
        processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_adapter(
    model_folder: Path,
    architecture: str,
    folder: Path,
    *,
    targets: str | Sequence[str] = ("q_proj", "v_proj"),
    rank: int = 4,
    alpha: float = 8,
    seed: int = 1,
    std: float = 0.25,
    **settings: Any,
) -> Path:
    """Save a PEFT adapter with random, strong weights; returns its folder.

    Magnitudes (DoRA), biases and rows of single tokens are random too; `modules_to_save` stay copies.
    `init_lora_weights` stays true, so that a loader that fails does not recreate the same random weights by chance.
    """
    model = getattr(transformers, architecture).from_pretrained(model_folder)
    target_modules = targets if isinstance(targets, str) else list(targets)
    peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=target_modules, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.5 * torch.rand(parameter.shape, generator=generator))
            elif any(part in name for part in ("lora_A", "lora_B", "lora_embedding_")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            elif parameter.requires_grad and "modules_to_save" not in name:  # biases and rows of single tokens
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    peft.save_pretrained(folder, save_embedding_layers=False)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = model_folder.name
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Oracle:
    """transformers' `generate`, greedy and in float32, with PEFT for adapters.

    Args:
        model_folder, architecture: a model made by `make_model`.
        adapters: name -> folder.
    """

    def __init__(self, model_folder: Path, architecture: str, adapters: Mapping[str, Path] | None = None) -> None:
        self._model_folder = model_folder
        self._class = getattr(transformers, architecture)
        self._adapters = dict(adapters or {})
        # Its image tower takes images without padding for causal otherwise, alone but not beside padded ones.
        self._settings = {"attn_implementation": "eager"} if architecture == PHI else {}
        self._loaded: dict[str | None, Any] = {}

    def model(self, adapter: str | None) -> Any:
        """The plain model, or a PeftModel of it."""
        if adapter not in self._loaded:
            model = self._class.from_pretrained(self._model_folder, dtype=torch.float32, **self._settings).eval()
            if adapter is not None:
                model = PeftModel.from_pretrained(model, self._adapters[adapter]).eval()
            self._loaded[adapter] = model
        return self._loaded[adapter]

    def generate(
        self, token_ids: Sequence[int], max_tokens: int, adapter: str | None = None, **inputs: Any
    ) -> list[int]:
        """The new tokens, end of text not special."""
        ids = torch.tensor([list(token_ids)])
        with torch.inference_mode():
            output = self.model(adapter).generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                **inputs,
            )
        return list(output[0, len(token_ids) :].tolist())

    def logits(self, token_ids: Sequence[int], adapter: str | None = None, **inputs: Any) -> torch.Tensor:
        """[P, V] float32."""
        ids = torch.tensor([list(token_ids)])
        with torch.inference_mode():
            output = self.model(adapter)(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
        return output.logits[0].float()  # type: ignore[no-any-return]


def random_ids(length: int, seed: int) -> list[int]:
    """Token ids of no special meaning."""
    return [int(token_id) for token_id in np.random.default_rng(seed).integers(0, 256, length)]


def tone(seconds: float, pitch: float = 440.0, rate: int = 16_000) -> np.ndarray:
    """[S] float32: a tone with a little noise, so that features differ from clip to clip."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(int(pitch)).normal(size=time.size)
    return (0.3 * np.sin(2 * np.pi * pitch * time) + 0.02 * noise).astype(np.float32)
