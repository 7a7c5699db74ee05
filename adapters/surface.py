"""What an adapter needs to know about the running model: its linear layers by name, and what is out of reach.

The engine builds one `ModelSurface` from the loaded model; everything in this package judges adapter files against it.
Knows nothing of transformers or of any architecture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from adapters.keys import SurfaceNames

Part = Literal["decoder", "tower", "connector", "head"]

# Names that command lines use for fused layers, and the separate layers that they mean.
PACKED_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def identity(name: str) -> str:
    """A model without checkpoint renames."""
    return name


def no_tensor(name: str) -> torch.Tensor | None:
    """A model that does not show its weights."""
    return None


def any_tokenizer(files: Mapping[str, bytes], num_added: int) -> str | None:
    """A model that takes every tokenizer."""
    return None


@dataclass(frozen=True)
class LinearSite:
    """A linear layer that can carry LoRA. `name` is its name in `model.named_modules()`; weight [out, in]."""

    name: str
    in_features: int
    out_features: int
    part: Part = "decoder"


@dataclass(frozen=True)
class EmbeddingSite:
    """An embedding table that adapters may touch: `num_tokens` rows of `width` numbers.

    `tied_head` is the head that shares the table, or None.
    """

    name: str
    num_tokens: int
    width: int
    tied_head: str | None = None


@dataclass(frozen=True)
class ModelSurface:
    """The running model as adapters see it.

    Attributes:
        model_name: the base model's id, for messages.
        linears: module name -> linear layer, names exactly as `model.named_modules()` gives them.
        unsupported: module name -> why LoRA there is not served (embeddings, experts …); a name covers its children.
        rename_key: turns a module path as checkpoints write it into the running model's.
        max_lora_rank: largest rank that the server has room for.
        lora_dtype: dtype that A and B are cast to.
        target_suffixes: deploy-time filter on the last name components; empty means all. `qkv_proj` and
            `gate_up_proj` mean their parts too.
        serves_dora: pairs may carry a DoRA magnitude vector.
        serves_bias: layers may carry a trained bias.
        scale_shift_flag: the flag that lets a server like this one serve DoRA and trained biases; empty where none would.
        serves_embeddings: tables of `embeddings` may carry LoRA and replaced rows, and so may their heads.
        extra_vocab_size: how many tokens an adapter may add past the base's table.
        embeddings: module name -> embedding table.
        base_tensor: the base's own parameter or buffer by its name, any device and dtype, or None where there is none of
            that name. Lets an adapter be served whose files hold a copy of base weights.
        base_tensor_names: the names that `base_tensor` knows.
        why_tokenizer_unfit: from a tokenizer's files and the number of added tokens, why it cannot be used with this
            model (the end of a sentence), or None.
    """

    model_name: str
    linears: Mapping[str, LinearSite]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    rename_key: Callable[[str], str] = identity
    max_lora_rank: int = 64
    lora_dtype: torch.dtype = torch.float32
    target_suffixes: tuple[str, ...] = ()
    serves_dora: bool = False
    serves_bias: bool = False
    scale_shift_flag: str = ""
    serves_embeddings: bool = False
    extra_vocab_size: int = 0
    embeddings: Mapping[str, EmbeddingSite] = field(default_factory=dict)
    base_tensor: Callable[[str], torch.Tensor | None] = no_tensor
    base_tensor_names: Collection[str] = ()
    why_tokenizer_unfit: Callable[[Mapping[str, bytes], int], str | None] = any_tokenizer

    @functools.cached_property
    def names(self) -> SurfaceNames:
        """What names in adapters' files mean here; made once, since every load asks for all of them."""
        return SurfaceNames(self)

    def is_targeted(self, module_name: str) -> bool:
        """Whether the deploy-time filter lets LoRA through on this module."""
        if not self.target_suffixes:
            return True
        suffixes = set(self.target_suffixes)
        for packed, members in PACKED_SUFFIXES.items():
            if packed in suffixes:
                suffixes.update(members)
        return any(module_name == suffix or module_name.endswith("." + suffix) for suffix in suffixes)

    def part_of(self, module_name: str) -> Part:
        """The part of the model that a module belongs to; embeddings are the decoder's."""
        site = self.linears.get(module_name)
        return "decoder" if site is None else site.part

    def why_unsupported(self, module_name: str) -> str | None:
        """The reason why LoRA on this module, or on a module that holds it, is not served; None if there is none."""
        name = module_name
        while name:
            if name in self.unsupported:
                return self.unsupported[name]
            name = name.rpartition(".")[0]
        return None
