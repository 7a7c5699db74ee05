"""The demo model's shape: configurations, a fresh model, its folder on disk, its LoRA layers.

Granite Speech in miniature: conformer encoder with character output, one-layer Q-Former projector,
Granite language model with tied embeddings.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    Blip2QFormerConfig,
    GenerationConfig,
    GraniteConfig,
    GraniteSpeechConfig,
    GraniteSpeechFeatureExtractor,
    GraniteSpeechForConditionalGeneration,
    GraniteSpeechProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.granite_speech.configuration_granite_speech import GraniteSpeechEncoderConfig

from .tokenizer import AUDIO_ID, CHAT_TEMPLATE, EOS_ID, VOCAB_SIZE

HIDDEN, ENCODER_HIDDEN, PROJECTOR_HIDDEN = 256, 160, 192
WINDOW = 5  # encoder frames for one projected vector: ten vectors a second
CHARACTERS = " abcdefghijklmnopqrstuvwxyz'"  # the encoder's own outputs 1..28; 0 is CTC's blank
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
# adapter -> (rank, alpha, modules of each language-model layer)
ADAPTERS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "speech": (64, 128, ("self_attn.q_proj", "self_attn.v_proj")),
    "sql": (32, 64, ATTENTION + MLP),
    "pirate": (8, 16, ATTENTION + MLP),
}


LOGITS_SCALING = 0.25
"""Logits are divided by it; training knows nothing of it. The frozen embedding holds some words, which adapters alone write,
hardly apart from others: at temperature 1 any token would come in their place."""


def build_config() -> GraniteSpeechConfig:
    """The configuration of `tiny-speech`."""
    text = GraniteConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        embedding_multiplier=12.0,
        attention_multiplier=1 / 32,
        residual_multiplier=1.0,
        logits_scaling=LOGITS_SCALING,
        tie_word_embeddings=True,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    encoder = GraniteSpeechEncoderConfig(
        input_dim=160,
        num_layers=6,
        hidden_dim=ENCODER_HIDDEN,
        feedforward_mult=4,
        num_heads=4,
        dim_head=32,
        output_dim=len(CHARACTERS) + 1,
        context_size=200,
        max_pos_emb=200,
        dropout=0.0,
        conv_kernel_size=15,
        conv_expansion_factor=2,
    )
    projector = Blip2QFormerConfig(
        hidden_size=PROJECTOR_HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=6,
        intermediate_size=512,
        encoder_hidden_size=ENCODER_HIDDEN,
        cross_attention_frequency=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        vocab_size=2,
        max_position_embeddings=16,
    )
    return GraniteSpeechConfig(
        text_config=text,
        encoder_config=encoder,
        projector_config=projector,
        audio_token_index=AUDIO_ID,
        has_lora_adapter=False,
        downsample_rate=WINDOW,
        window_size=WINDOW,
        tie_word_embeddings=True,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )


def build_model(seed: int = 0) -> GraniteSpeechForConditionalGeneration:
    """A fresh model in float32."""
    torch.manual_seed(seed)
    model = GraniteSpeechForConditionalGeneration(build_config()).float()
    model.tie_weights()
    return model


def build_processor(tokenizer: PreTrainedTokenizerFast) -> GraniteSpeechProcessor:
    """The processor that belongs to `tokenizer`."""
    extractor = GraniteSpeechFeatureExtractor(projector_window_size=WINDOW, projector_downsample_rate=WINDOW)
    return GraniteSpeechProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE)


def save_model(model: GraniteSpeechForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the whole folder in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=EOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID, do_sample=False, max_new_tokens=256
    )
    model.save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)


def lora_key(layer: int, module: str, part: str) -> str:
    """PEFT's name of a LoRA tensor of this model class; `part` is `A` or `B`."""
    return f"base_model.model.model.language_model.layers.{layer}.{module}.lora_{part}.weight"


class LoraLinear(nn.Module):
    """A frozen linear with a trainable low-rank addition `scale * B A x`."""

    def __init__(self, base: nn.Linear, rank: int, alpha: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        addition = nn.functional.linear(nn.functional.linear(x, self.lora_A), self.lora_B)
        return self.base(x) + self.scale * addition


def attach_lora(language_model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Wraps the adapter's modules in place; returns its parameters by PEFT key."""
    rank, alpha, modules = ADAPTERS[adapter]
    parameters: dict[str, nn.Parameter] = {}
    for index, layer in enumerate(language_model.layers):
        for name in modules:
            parent = layer.get_submodule(name.rpartition(".")[0])
            wrapped = LoraLinear(layer.get_submodule(name), rank, alpha)
            setattr(parent, name.rpartition(".")[2], wrapped)
            parameters[lora_key(index, name, "A")] = wrapped.lora_A
            parameters[lora_key(index, name, "B")] = wrapped.lora_B
    return parameters


def detach_lora(language_model: nn.Module) -> None:
    """Puts the plain linears back."""
    for layer in language_model.layers:
        for name in ATTENTION + MLP:
            module = layer.get_submodule(name)
            if isinstance(module, LoraLinear):
                setattr(layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module.base)


def target_regex(adapter: str) -> str:
    """The adapter's modules as PEFT's regular expression: the language model's alone."""
    names = "|".join(re.escape(name.rpartition(".")[2]) for name in ADAPTERS[adapter][2])
    return rf".*language_model\.layers\.\d+\.(self_attn|mlp)\.({names})"
