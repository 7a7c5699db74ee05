"""Quantised weights: what a checkpoint declares or `--quantization` asks for, and what transformers is told of it.

A checkpoint that is quantised already loads as it declares. One in full precision is quantised while it loads, on its
decoder's linears alone: towers, connectors and the head stay as they are. LoRA lies on top in full precision either way
(see `engine/lora_layers`). Formats whose layers transformers would unpack at the first call are unpacked while they load, so
that memory is counted right. Called by `engine/model`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from engine.errors import InvalidRequest
from engine.linears import is_linear

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from engine.architectures import Architecture

INT4_GROUP = 128
"""Weights that share a scale."""

ON_THE_FLY: Mapping[str, float] = MappingProxyType(
    {
        "int8": 8,
        "int8-dynamic": 8,
        "int4": 4 + 32 / INT4_GROUP,  # scale and zero point, 16 bits each
        "fp8": 8,
        "fp8-dynamic": 8,
        "bitsandbytes": 4 + 32 / 64,
    }
)
"""Method -> bits that a weight of the decoder's linears takes; `dynamic` ones round the inputs too, each token by itself."""

# Method of checkpoints -> packages that it needs beside transformers, as (name to import, name to install).
_ACCELERATE = ("accelerate", "accelerate")
_TORCHAO = ("torchao", "torchao")
_BITSANDBYTES = ("bitsandbytes", "bitsandbytes")
_PACKAGES: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "torchao": (_TORCHAO,),
        "bitsandbytes": (_BITSANDBYTES, _ACCELERATE),
        "compressed-tensors": (("compressed_tensors", "compressed-tensors"),),
        "gptq": (("gptqmodel", "gptqmodel"), ("optimum", "optimum"), _ACCELERATE),
        "awq": (("gptqmodel", "gptqmodel"), _ACCELERATE),
        "fp8": (_ACCELERATE,),
        "quanto": (("optimum.quanto", "optimum-quanto"), _ACCELERATE),
        "hqq": (("hqq", "hqq"), _ACCELERATE),
        "gguf": (("gguf", "gguf"),),
    }
)
_RECORDED = frozenset({"torchao", "compressed-tensors"})
"""Methods whose layers can be compiled and recorded, as unpacked ones always can; others run step by step."""
_NOT_COMPILED = re.compile(r"int8-dynamic|Int8Dynamic\w*|compressed-tensors")
"""Methods, and torchao's names of them in checkpoints, whose products the compiler breaks (torch has none of int8 for 16 rows
and fewer, which torchao pads outside compiled code) or cannot read (float8 ones of compressed-tensors layers)."""
_NOT_RECORDED = re.compile(r"int8-dynamic|Int8Dynamic\w*")
"""Those of them whose products, outside compiled code, look at numbers on the device, which no graph can record."""
_LOADED_PLAIN = frozenset({"gguf"})
"""Methods that are loaded without `device_map`, which is what needs accelerate on a GPU."""
_UNPACKED = frozenset({"compressed-tensors", "fp8"})
"""Methods whose layers are made plain while loading, but for products of float8 on a GPU that has them."""


@dataclass(frozen=True)
class Quantization:
    """How a model's weights are quantised.

    Attributes:
        method: of the checkpoint, or the one that was asked for.
        declared: the checkpoint's own settings, to load by; None where it is in full precision.
        loading: keywords for `from_pretrained`.
        torchao: the config for `torchao.quantization.quantize_`, where torchao quantises while loading.
        bits: that a weight of the decoder's linears takes; None where that is not known, or they are unpacked.
        is_unpacked: whether they are made plain while loading.
        can_be_recorded: whether its layers can be recorded in CUDA graphs.
        can_be_compiled: whether they can be compiled too.
    """

    method: str
    declared: Mapping[str, Any] | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    torchao: Any = None
    bits: float | None = None
    is_unpacked: bool = False
    can_be_recorded: bool = True
    can_be_compiled: bool = True

    def quantize_(self, model: nn.Module, architecture: Architecture) -> None:
        """Quantise a model that is there already, in place (random weights)."""
        if self.torchao is not None:
            from torchao.quantization import quantize_

            keeps = re.compile("|".join(_kept_patterns(architecture)))
            quantize_(model, self.torchao, lambda module, name: is_linear(module) and not keeps.fullmatch(name))


def declared_in(config: PretrainedConfig) -> dict[str, Any] | None:
    """The quantisation that a checkpoint's config declares; None where it is in full precision."""
    for place in (config, config.get_text_config()):
        found = getattr(place, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else cast(dict[str, Any], found.to_dict())
    return None


def method_of(declared: Mapping[str, Any]) -> str:
    """The method's name in a declaration; files of old bitsandbytes leave it out."""
    if declared.get("load_in_8bit") or declared.get("load_in_4bit"):
        return "bitsandbytes"
    return str(declared.get("quant_method") or "unknown")


def choose_quantization(
    declared: Mapping[str, Any] | None,
    asked: str | None,
    *,
    architecture: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    is_random: bool = False,
) -> Quantization | None:
    """What a checkpoint's declaration and `--quantization` come to; None for full precision.

    Args:
        declared: what the checkpoint declares. asked: the flag's word.
        device, dtype: of the model. is_random: whether weights are made up, so that a declaration says nothing of them.

    Raises:
        InvalidRequest: the two contradict each other, the machine cannot do it, or a package is missing.
    """
    if declared is not None and not is_random:
        method = method_of(declared)
        if asked not in (None, method):
            raise _refusal(f"the checkpoint is quantised already, with {method}; leave the flag out", asked)
        return _as_declared(method, dict(declared), device)
    if asked is None:
        return None
    if asked not in ON_THE_FLY:
        ways = ", ".join(ON_THE_FLY)
        if asked in _PACKAGES:
            raise _refusal(f"the checkpoint is not quantised with it; what can be done while loading is {ways}", asked)
        raise _refusal(f"it must be one of {ways}, or the method of a checkpoint that is quantised already", asked)
    return _on_the_fly(asked, architecture, device, dtype, is_random=is_random)


def outlined(declared: Mapping[str, Any] | None, asked: str | None) -> Quantization | None:
    """As `choose_quantization`, for a model without weights: neither packages nor devices matter, nor is much refused."""
    if declared is not None:
        method = method_of(declared)
        return Quantization(
            method, declared=declared, bits=_declared_bits(method, declared), is_unpacked=method in _UNPACKED
        )
    if asked is None:
        return None
    if asked not in ON_THE_FLY:
        raise _refusal(f"it must be one of {', '.join(ON_THE_FLY)}", asked)
    return Quantization(asked, bits=ON_THE_FLY[asked])


@contextlib.contextmanager
def explained(quantization: Quantization | None) -> Iterator[None]:
    """Turns what transformers and the packages raise while they load quantised weights into one sentence."""
    try:
        yield
    except (ImportError, RuntimeError, NotImplementedError, AttributeError, TypeError, AssertionError) as error:
        if quantization is None:
            raise
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InvalidRequest(
            f"The weights could not be loaded with the quantization {quantization.method} ({first_line}).",
            param="quantization",
        ) from error


def _refusal(reason: str, asked: str | None) -> InvalidRequest:
    return InvalidRequest(f"--quantization {asked}: {reason}.", param="quantization")


def _as_declared(method: str, declared: dict[str, Any], device: torch.device) -> Quantization:
    """How to load a checkpoint that is quantised already."""
    _require(method, f"the checkpoint is quantised with {method}", device)
    if method == "gguf":
        return Quantization(method, loading=_gguf_loading(), is_unpacked=True)
    can_be_recorded = method in _RECORDED
    has_fp8_products = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if method == "compressed-tensors":
        keeps_fp8 = has_fp8_products and _is_fp8(declared)
        declared |= {"dequantize": not keeps_fp8, "use_optimized_inference": keeps_fp8}
    elif method == "fp8" and not (has_fp8_products and _has_hub_kernels()):
        declared["dequantize"] = True
    elif method == "bitsandbytes":
        # The 8-bit product looks for large inputs, whose number differs from step to step.
        can_be_recorded = bool(declared.get("load_in_4bit"))
        # It says at each product of each layer that it rounds its input.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    names, is_unpacked = f"{method} {declared.get('quant_type')}", bool(declared.get("dequantize"))
    return Quantization(
        method,
        declared=declared,
        loading={} if device.type == "cpu" else {"device_map": {"": device}},
        bits=_declared_bits(method, declared),
        is_unpacked=is_unpacked,
        can_be_recorded=is_unpacked or (can_be_recorded and _NOT_RECORDED.search(names) is None),
        can_be_compiled=is_unpacked or _NOT_COMPILED.search(names) is None,
    )


def _has_hub_kernels() -> bool:
    """Whether the package `kernels` is there; transformers tells it from this project's folder of that name."""
    from transformers.utils.import_utils import is_kernels_available

    return bool(is_kernels_available())


def _gguf_loading() -> dict[str, Any]:
    """Unpack the blocks even where there are kernels for them, which bring an attention of their own."""
    import transformers

    config_class = getattr(transformers, "GgufConfig", None)
    return {} if config_class is None else {"quantization_config": config_class(dequantize=True)}


def _is_fp8(declared: Mapping[str, Any]) -> bool:
    """Whether all of a compressed-tensors checkpoint's weights are float8."""
    groups = dict(declared.get("config_groups") or {}).values()
    weights = [dict(group.get("weights") or {}) for group in groups]
    return bool(weights) and all(one.get("type") == "float" and one.get("num_bits") == 8 for one in weights)


def _declared_bits(method: str, declared: Mapping[str, Any]) -> float | None:
    """Bits that a weight of a checkpoint's quantised linears takes in memory; None where that is not known."""
    if method in ("gptq", "awq"):
        bits, group = declared.get("bits") or declared.get("w_bit"), declared.get("group_size") or 0
        return None if bits is None else float(bits) + (16 + float(bits)) / group * (group > 0)
    if method == "bitsandbytes":
        return 8 if declared.get("load_in_8bit") else 4 + 32 / 64
    kind = str(declared.get("quant_type") if method == "torchao" else declared.get("weights"))
    found = re.search(r"(?:int|float)(\d)", kind, re.IGNORECASE) if method in ("torchao", "quanto") else None
    return float(found[1]) if found else None


def _on_the_fly(
    asked: str, architecture: Architecture, device: torch.device, dtype: torch.dtype, *, is_random: bool
) -> Quantization:
    if asked == "bitsandbytes":
        if is_random:
            raise _refusal("random weights are not quantised with it; use int8", asked)
        _require("bitsandbytes", f"--quantization {asked}", device)
    else:
        _check_machine(asked, device, dtype)
        _require("torchao", f"--quantization {asked}", device)
    config, torchao = _loading_config(asked, _kept_patterns(architecture), dtype)
    loading = {"quantization_config": config}
    if device.type != "cpu":
        loading["device_map"] = {"": device}
    return Quantization(
        asked,
        loading=loading,
        torchao=torchao,
        bits=ON_THE_FLY[asked],
        can_be_recorded=_NOT_RECORDED.search(asked) is None,
        can_be_compiled=_NOT_COMPILED.search(asked) is None,
    )


def _check_machine(asked: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what torchao has no product for."""
    if asked == "int4" and (device.type != "cuda" or dtype != torch.bfloat16):
        raise _refusal(
            "4-bit products of torchao need a CUDA GPU and --dtype bfloat16; use bitsandbytes or int8", asked
        )
    if asked == "fp8-dynamic" and (
        device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9) or dtype != torch.bfloat16
    ):
        raise _refusal(
            "float8 products need an Ada or Hopper GPU or newer, and --dtype bfloat16; use fp8 or int8", asked
        )


def _loading_config(asked: str, kept: list[str], dtype: torch.dtype) -> tuple[Any, Any]:
    """transformers' config and, of torchao, the one inside it."""
    if asked == "bitsandbytes":
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=kept
        )
        return config, None
    from torchao import quantization
    from transformers import TorchAoConfig

    per_row = quantization.PerRow()
    # torchao's settings for the compiler are for the whole process and slow it down; ours stay.
    makers: dict[str, Any] = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(set_inductor_config=False),
        "int8-dynamic": lambda: quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
        "int4": lambda: quantization.Int4WeightOnlyConfig(
            group_size=INT4_GROUP,
            int4_packing_format="tile_packed_to_4d",
            int4_choose_qparams_algorithm="hqq",
            set_inductor_config=False,
        ),
        "fp8": lambda: quantization.Float8WeightOnlyConfig(set_inductor_config=False),
        "fp8-dynamic": lambda: quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=per_row, set_inductor_config=False
        ),
    }
    torchao = makers[asked]()
    return TorchAoConfig(torchao, modules_to_not_convert=kept), torchao


def _kept_patterns(architecture: Architecture) -> list[str]:
    """Patterns of whole module names, for all that is not the decoder's."""
    outside = rf"(?!{re.escape(architecture.decoder)}\.).*"
    return [outside, *(rf"{re.escape(prefix)}.*" for prefix, _ in architecture.parts)]


def _require(method: str, what: str, device: torch.device) -> None:
    """Refuse what needs a package that is not installed, with the command that installs it."""
    packages = _PACKAGES.get(method, ())
    if device.type != "cpu" and method not in _LOADED_PLAIN and _ACCELERATE not in packages:
        packages = (*packages, _ACCELERATE)
    missing = [to_install for to_import, to_install in packages if not _is_installed(to_import)]
    if missing:
        verb = "package" if len(missing) == 1 else "packages"
        raise InvalidRequest(
            f"{what}, which needs the {verb} {' and '.join(missing)}; install with: pip install {' '.join(missing)}",
            param="quantization",
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # The package around it is missing.
        return False
