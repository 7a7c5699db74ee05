"""The base model: transformers' own class, loaded and driven through its decoder submodule.

Owns the weights and knows what the architecture table says about them. The engine calls four things: `embed`, `decode`,
`logits` and `encode`. Nothing here knows of requests or adapters' contents.

T packed tokens, H hidden width, V vocabulary, R rows.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from adapters.surface import EmbeddingSite, LinearSite, ModelSurface, any_tokenizer
from engine.added_tokens import AddedTokens
from engine.architectures import Architecture, find_architecture, rope_types
from engine.attention import PAGED_ATTENTION
from engine.errors import AppError, InvalidRequest, UnsupportedModel
from engine.kv_cache import KVShape
from engine.linears import device_of, float_dtype, is_linear, is_plain_tensor, stored_bytes
from engine.lora_embedding import EmbeddingLora
from engine.origin import find_origin
from engine.positions import NUM_GRID_ROWS, LongRope
from engine.published_phi4 import PUBLISHED_TYPE, native_fields
from engine.quantization import Quantization, choose_quantization, declared_in, explained, outlined
from engine.request import Modality

if TYPE_CHECKING:
    from engine.parallel.loading import ShardedLoad
    from engine.parallel.split import Split

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_ADAPTER = {"subfolder": "no-adapter-is-loaded-with-the-base"}
"""Granite Speech folders hold an adapter beside the model, which transformers would switch on for every request."""


class BaseModel:
    """A loaded base model.

    Attributes:
        model: the transformers model, in eval mode.
        config: its config; `text_config` is the decoder's.
        architecture: how to drive it.
        origin: the folder or hub id that its tokenizer and processors are read from too.
        quantization: how its weights are quantised; None in full precision.
        device: where it lies.
        embedding_name: module name of the decoder's embedding table.
        embedding_lora: adapters of that table; None without.
        added_tokens: rows that adapters add to the vocabulary; None without.
        long_rope: the rotary embedding, where requests of different length take different frequencies.
        split: how the linears are cut, where this is one rank's share of a model; None where it is all of it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        name: str,
        origin: str,
        quantization: Quantization | None = None,
        split: Split | None = None,
    ) -> None:
        self.model = model
        self.split = split
        self.name = name
        self.origin = origin
        self.quantization = quantization
        self.architecture = architecture
        self.config = model.config
        self.text_config = model.config.get_text_config()
        self.decoder = cast(Any, model.get_submodule(architecture.decoder))
        self.device = device_of(model)
        self.dtype = float_dtype(self.decoder)
        self._embedding = self.decoder.get_input_embeddings()
        self.embedding_name = next(name for name, module in model.named_modules() if module is self._embedding)
        self.embedding_lora: EmbeddingLora | None = None
        self.added_tokens: AddedTokens | None = None
        self._lm_head = cast(Any, model.get_submodule("lm_head"))
        # An outline has plain linears where the checkpoint's are quantised.
        is_outline = self.device.type == "meta" and quantization is not None and not quantization.is_unpacked
        self._hidden = frozenset(site.name for site in self._decoder_linears()) if is_outline else frozenset()
        self.long_rope: LongRope | None = None
        if "longrope" in rope_types(self.config):
            self.decoder.rotary_emb = self.long_rope = LongRope(self.decoder.rotary_emb, self.text_config)
        # The decoder's layers read the implementation from this config at each call; towers have configs of their own.
        # The empty name leaves the towers' out, where all hang on one config.
        self.decoder.config._attn_implementation = {"": PAGED_ATTENTION}

        if architecture.two_way_tower:
            for module_name, module in model.named_modules():
                if module_name.startswith(architecture.two_way_tower) and hasattr(module, "is_causal"):
                    cast(Any, module).is_causal = False

    @property
    def vocab_size(self) -> int:
        """V, rows of the embedding."""
        return int(self._embedding.num_embeddings)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """The token ids that stand for media."""
        return tuple(_placeholder_id(self.config, kind) for kind in self.architecture.media)

    @property
    def max_positions(self) -> int:
        """Longest context that the model was made for, in tokens."""
        return int(getattr(self.text_config, "max_position_embeddings", 4096))

    @property
    def num_position_rows(self) -> int:
        """K, numbers that place a token."""
        return NUM_GRID_ROWS if self.architecture.has_grid_positions else 1

    @property
    def max_in_features(self) -> int:
        """Input columns of the widest linear of the decoder and head."""
        modules = [*self.decoder.modules(), self._lm_head]
        return max(int(module.in_features) for module in modules if is_linear(module))

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights that lie here."""
        num_bytes = stored_bytes(self.model)
        if self._hidden and self.quantization is not None and self.quantization.bits is not None:
            num_numbers = sum(site.in_features * site.out_features for site in self._decoder_linears())
            num_bytes -= int(num_numbers * (self.dtype.itemsize - self.quantization.bits / 8))
        return num_bytes

    @property
    def kv_shape(self) -> KVShape:
        """Shape of the KV cache that the decoder needs here."""
        config = self.text_config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        kv_parts = 1 if self.split is None else self.split.kv_parts
        return KVShape(config.num_hidden_layers, num_kv_heads // kv_parts, head_dim, self.dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, H]; ids outside the embedding give row 0, to be overwritten by their media."""
        is_inside = token_ids < self.vocab_size
        if self.architecture.hides_placeholders:
            is_inside = is_inside & (token_ids != self.placeholder_ids[0])
        table_ids = torch.where(is_inside, token_ids, 0)
        embeddings: torch.Tensor = self._embedding(table_ids)
        if self.embedding_lora is not None:
            self.embedding_lora.add_(embeddings, table_ids)
        if self.added_tokens is not None:
            self.added_tokens.replace_(embeddings, token_ids)
        return embeddings

    def decode(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, H], [K, T] -> hidden states [T, H] after the final norm."""
        position_ids = positions if positions.shape[0] == 1 else positions[:, None]
        output = self.decoder(inputs_embeds=embeddings[None], position_ids=position_ids, use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, V] float32, with the architecture's scale or soft cap; wider where adapters add tokens."""
        logits = self._finish(self._lm_head(hidden)).float()
        return logits if self.added_tokens is None else self.added_tokens.extend(logits, hidden, self._finish)

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        return self.architecture.finish_logits(logits, self.text_config)

    def encode(self, modality: Modality, items: Sequence[Mapping[str, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """What the tower takes of K items, of equal shapes since padding could change the result -> K tensors [n, H].

        Convolutions in float32 are exact: cuDNN would round their inputs to 10 bits (TF32) by default.
        """
        inputs = {
            name: torch.cat([item[name] for item in items]).to(
                self.device, self.dtype if tensor.is_floating_point() else None
            )
            for name, tensor in items[0].items()
        }
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return self.architecture.media[modality].encode(self.model, inputs, len(items))

    def surface(
        self,
        *,
        max_lora_rank: int,
        lora_dtype: torch.dtype,
        target_suffixes: tuple[str, ...] = (),
        has_scale_shift: bool = True,
        extra_vocab_size: int = 0,
        why_tokenizer_unfit: Callable[[Mapping[str, bytes], int], str | None] = any_tokenizer,
    ) -> ModelSurface:
        """What adapters may touch, for `adapters`, in the whole model's sizes.

        `has_scale_shift` says whether DoRA and trained biases have room; a model that is split serves LoRA pairs alone.
        """
        split = self.split
        has_extras = split is None
        linears = {site.name: site if split is None else split.whole_site(site) for site in self._sites()}
        unsupported: dict[str, str] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and module is not self._embedding:
                unsupported[name] = "LoRA on embeddings is not served"
            elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                unsupported[name] = "LoRA on convolutions is not served"
        is_tied = getattr(self._lm_head, "weight", None) is self._embedding.weight
        embedding = EmbeddingSite(
            self.embedding_name, self.vocab_size, self._embedding.embedding_dim, "lm_head" if is_tied else None
        )
        return ModelSurface(
            model_name=self.name,
            linears=linears,
            unsupported=unsupported,
            rename_key=_key_renamer(self.model, self.architecture.renames),
            max_lora_rank=max_lora_rank,
            lora_dtype=lora_dtype,
            target_suffixes=target_suffixes,
            serves_dora=has_scale_shift and has_extras,
            serves_bias=has_scale_shift and has_extras,
            scale_shift_flag="--enable-dora" if has_extras else "",
            serves_embeddings=has_extras,
            extra_vocab_size=extra_vocab_size,
            why_tokenizer_unfit=why_tokenizer_unfit,
            embeddings={embedding.name: embedding},
            base_tensor=self._tensor,
            base_tensor_names=[name for name, _ in _named_tensors(self.model)],
        )

    def _tensor(self, name: str) -> torch.Tensor | None:
        """A parameter or buffer as it is now: linears that are computed together replace theirs by views.

        None where its numbers cannot be read as they are, as those of quantised layers.
        """
        parent, _, leaf = name.rpartition(".")
        if self.split is not None and parent in self.split.shards:
            return None
        try:
            tensor = getattr(self.model.get_submodule(parent), leaf, None)
        except AttributeError:
            return None
        is_hidden = leaf == "weight" and parent in self._hidden
        return cast(torch.Tensor, tensor).detach() if is_plain_tensor(tensor) and not is_hidden else None

    def _sites(self) -> Iterator[LinearSite]:
        """All linears, plain or quantised, with the shapes that they say they have."""
        for name, module in self.model.named_modules():
            if is_linear(module) and not _is_inside_attention_block(self.model, name):
                # Ways of quantising differ in what they keep as a number.
                yield LinearSite(name, int(module.in_features), int(module.out_features), self._part_of(name))

    def _decoder_linears(self) -> list[LinearSite]:
        return [site for site in self._sites() if site.part == "decoder"]

    def _part_of(self, name: str) -> Any:
        if name == "lm_head":
            return "head"
        return next((part for prefix, part in self.architecture.parts if name.startswith(prefix)), "decoder")


def load_model(
    path: str,
    *,
    load_format: str,
    dtype: str,
    device: str,
    gguf_file: str | None,
    seed: int,
    quantization: str | None,
    sharded: ShardedLoad | None = None,
) -> BaseModel:
    """Load a base model from a folder or hub id; with `sharded`, one rank's share of it.

    Raises:
        UnsupportedModel: the architecture is not served.
        InvalidRequest: a setting is wrong, or no model is at the path.
    """
    if load_format not in ("auto", "dummy"):
        raise InvalidRequest(f"--load-format is {load_format!r}, but must be auto or dummy.", param="load_format")
    origin = find_origin(path, gguf_file)
    target = _pick_device(device)
    with _plain_errors(path):
        config = _read_config(origin, gguf_file)
    architecture = find_architecture(config)
    declared = {"quant_method": "gguf"} if gguf_file else declared_in(config)
    config = architecture.own_config(config)
    torch_dtype = _pick_dtype(dtype, config, target)
    chosen = choose_quantization(
        declared, quantization, architecture=architecture, device=target, dtype=torch_dtype,
        is_random=load_format == "dummy",
    )  # fmt: skip
    _declare(config, None if chosen is None else chosen.declared)
    model_class = getattr(transformers, architecture.class_name)
    if sharded is not None:
        if chosen is not None:
            raise UnsupportedModel(
                "Quantised models are not served with --tensor-parallel-size; take the full-precision checkpoint.",
                param="tensor_parallel_size",
            )
        sharded.begin(architecture, config, target)
    if load_format == "dummy" and sharded is not None:
        model = sharded.random_model(model_class, copy.deepcopy(config), torch_dtype, target, seed)
    elif load_format == "dummy":
        torch.manual_seed(seed)
        with torch.device(target):
            model = model_class._from_config(copy.deepcopy(config), dtype=torch_dtype)
        if chosen is not None:
            chosen.quantize_(model, architecture)
    else:
        with _plain_errors(path), explained(chosen):
            model, report = model_class.from_pretrained(
                origin,
                config=copy.deepcopy(config),
                dtype=torch_dtype,
                adapter_kwargs=dict(_NO_ADAPTER),
                output_loading_info=True,
                **({"key_mapping": dict(architecture.renames)} if architecture.renames else {}),
                **_gguf(gguf_file),
                **({} if chosen is None else chosen.loading),
                **({} if sharded is None else sharded.arguments),
            )
        missing = sorted(report["missing_keys"])
        if missing:
            raise UnsupportedModel(
                f"The checkpoint lacks {len(missing)} weights of {architecture.class_name}, the first is {missing[0]!r}; "
                "it may be damaged, or an adapter folder.",
                param="model",
            )
        if sharded is not None:
            sharded.localise(model)
    if not any(name == architecture.decoder for name, _ in model.named_modules()):
        raise UnsupportedModel(
            f"{architecture.class_name} of transformers {transformers.__version__} is laid out in another way than the one "
            "that is served; install a newer transformers.",
            param="model",
        )
    name = Path(path).name if Path(path).exists() else path
    model = model.eval().requires_grad_(False)
    if device_of(model) != target:
        model = model.to(target)
    split = None if sharded is None else sharded.split
    return BaseModel(model, architecture, name, origin, chosen, split)


def outline_model(path: str, quantization: str | None = None) -> BaseModel:
    """A base model's layers and shapes without its weights: built on the meta device, from the config alone.

    Raises:
        UnsupportedModel: the architecture is not served.
        InvalidRequest: no config is at the path, or `quantization` is none that weights can be given while loading.
    """
    origin = find_origin(path)
    device = torch.device("meta")
    with _plain_errors(path):
        config = _read_config(origin, None)
    architecture = find_architecture(config)
    chosen = outlined(declared_in(config), quantization)
    _declare(config, None)
    model_class = getattr(transformers, architecture.class_name)
    with device:
        model = model_class._from_config(copy.deepcopy(config), dtype=_pick_dtype("auto", config, device))
    name = Path(path).name if Path(path).exists() else path
    return BaseModel(model.eval().requires_grad_(False), architecture, name, origin, chosen)


def _read_config(path: str, gguf_file: str | None) -> PretrainedConfig:
    """The model's config; no code that its files name is ever run."""
    if gguf_file is None:
        content, _ = PretrainedConfig.get_config_dict(path)
        if content.get("model_type") == PUBLISHED_TYPE:
            return AutoConfig.for_model(**native_fields(content))
    return cast(PretrainedConfig, AutoConfig.from_pretrained(path, trust_remote_code=False, **_gguf(gguf_file)))


def _declare(config: PretrainedConfig, quantization: Mapping[str, Any] | None) -> None:
    """Make a config declare this quantisation, or none at all."""
    for place in (config, config.get_text_config()):
        if hasattr(place, "quantization_config"):
            del place.quantization_config
    if quantization is not None:
        config.quantization_config = dict(quantization)


def _gguf(gguf_file: str | None) -> dict[str, str]:
    return {"gguf_file": gguf_file} if gguf_file else {}


class _plain_errors:
    """Turns what transformers raises for a bad path into one sentence."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, AppError) or not isinstance(error, (OSError, ValueError, KeyError)):
            return
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequest(
            f"No base model could be loaded from {self._path!r} ({first_line}); give a folder with config.json and "
            "safetensors, or a Hugging Face id that this machine can reach.",
            param="model",
        ) from error


def _pick_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("--device is cuda, but torch sees no GPU; use --device cpu.", param="device")
    if device not in ("cpu", "cuda"):
        raise InvalidRequest(f"--device is {device!r}, but must be auto, cpu or cuda.", param="device")
    return torch.device(device)


def _pick_dtype(dtype: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's type on a GPU; on a CPU float32, which is exact and mostly faster there."""
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        own = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        return own if isinstance(own, torch.dtype) else torch.bfloat16
    if dtype in ("half", "float"):
        dtype = {"half": "float16", "float": "float32"}[dtype]
    if dtype not in _DTYPES:
        raise InvalidRequest(f"--dtype is {dtype!r}, but must be auto or one of {', '.join(_DTYPES)}.", param="dtype")
    return _DTYPES[dtype]


def _placeholder_id(config: Any, modality: Modality) -> int:
    """The token id of a modality: at the config's top, where older ones call it an index, or in the tower's part."""
    tower = getattr(config, "audio_config" if modality == "audio" else "vision_config", None)
    places = [(config, "id"), (config, "index"), (tower, "id")]
    return next(
        int(getattr(place, f"{modality}_token_{word}"))
        for place, word in places
        if hasattr(place, f"{modality}_token_{word}")
    )


def _is_inside_attention_block(model: nn.Module, name: str) -> bool:
    """`nn.MultiheadAttention` never calls its children's forward, so LoRA there would do nothing."""
    parent = name.rpartition(".")[0]
    return bool(parent) and isinstance(model.get_submodule(parent), nn.MultiheadAttention)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _key_renamer(model: PreTrainedModel, renames: Mapping[str, str]) -> Any:
    """transformers' own renames of checkpoint keys for this model, and `renames`, as a function on module paths."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]

    def rename(path: str) -> str:
        for renaming in renamings:
            path, _ = renaming.rename_source_key(path)
        for pattern, replacement in renames.items():
            path = re.sub(pattern, replacement, f"{path}.").removesuffix(".")
        return path

    return rename
