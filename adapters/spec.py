"""What an `adapter_config.json` asks for, and whether it can be served exactly.

Owns the parsed form, `AdapterSpec`, the refusals that follow from the config alone, and the one place where a scale is
computed. Knows nothing of tensors or of the running model. Called by `weights`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adapters.config_fields import (
    BASE_CHANGING_INITS,
    CONVERTIBLE_KINDS,
    INERT_FIELDS,
    PLAIN_INITS,
    PROMPT_KINDS,
    READ_FIELDS,
    REFUSED_FIELDS,
)
from adapters.errors import AdapterRefused
from adapters.patterns import UnsafePattern, compile_peft_pattern

log = logging.getLogger(__name__)

MAX_PATTERNS = 4096
MAX_RANK = 1 << 20


class OtherKind(AdapterRefused):
    """The config is not that of a LoRA at all."""


@dataclass(frozen=True)
class AdapterSpec:
    """A validated LoRA config.

    Attributes:
        rank: `r`, the rank of modules that no entry of `rank_pattern` names.
        alpha: `lora_alpha`, likewise.
        use_rslora: scale is alpha / sqrt(rank) instead of alpha / rank (https://arxiv.org/abs/2312.03732).
        target_modules: names, a regular expression, `all-linear`, or None where the config says nothing.
        rank_pattern, alpha_pattern: regular expression on module names -> value, in the config's order.
        use_dora: the config's flag; `weights` compares it with the tensors before it refuses.
        base_model_name_or_path: what the adapter was trained on, as the config says.
        bias: which biases of the base were trained: `none`, `all` or `lora_only`.
        lora_bias: lora_B has a trained bias.
        modules_to_save: modules of which the files hold full weights.
        trainable_tokens: module name (a suffix) -> token ids whose rows were trained (`trainable_token_indices`).
        ensure_weight_tying: LoRA and rows of an embedding hold for a head that shares its table, too.
        warnings: sentences for the report.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    base_model_name_or_path: str | None = None
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    modules_to_save: tuple[str, ...] = ()
    trainable_tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ensure_weight_tying: bool = False
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        compiled = {key: compile_peft_pattern(key) for key in (*self.rank_pattern, *self.alpha_pattern)}
        object.__setattr__(self, "_compiled", compiled)

    def pattern_values(self, patterns: Mapping[str, Any], *names: str) -> list[Any]:
        """Values of the entries of `patterns` that match one of a module's `names`, the first of these that has any.

        The first value is the one that PEFT's `get_pattern_key` picks from the file. It need not be the one that was
        picked in training, because PEFT sorts the entries when it saves.
        """
        if not patterns:
            return []
        compiled: dict[str, re.Pattern[str]] = self._compiled  # type: ignore[attr-defined]
        for name in names:
            values = [value for key, value in patterns.items() if compiled[key].match(name)]
            if values:
                return values
        return []


def declared_ranks(spec: AdapterSpec, *names: str) -> list[int]:
    """The ranks that the config may give a module, the likeliest first; `names` are its name in the files and, optionally,
    in the model."""
    return spec.pattern_values(spec.rank_pattern, *names) or [spec.rank]


def declared_alphas(spec: AdapterSpec, *names: str) -> list[float]:
    """The alphas that the config may give a module, the one that counts first."""
    return spec.pattern_values(spec.alpha_pattern, *names) or [spec.alpha]


def scale_for(spec: AdapterSpec, module_name: str, rank: int, *aliases: str) -> float:
    """The factor on B @ A of one module: alpha / rank, or alpha / sqrt(rank) with rsLoRA. Computed nowhere else.

    `module_name` is the module's name in the adapter's files, on which its patterns were written; `aliases` are tried
    where no pattern matches that one. `rank` is that of the tensors.
    """
    alpha = declared_alphas(spec, module_name, *aliases)[0]
    return alpha / (math.sqrt(rank) if spec.use_rslora else rank)


def parse_spec(config: Mapping[str, Any]) -> AdapterSpec:
    """Read an adapter's config; raises `AdapterRefused` with one sentence for each thing that is wrong with it."""
    if not isinstance(config, Mapping):
        raise OtherKind([f"adapter_config.json must hold a JSON object, but holds {_shown(config)}"])
    reader = _Reader(config)
    reader.check_kind()
    if reader.reasons:
        raise OtherKind(reader.reasons)
    values: dict[str, Any] = {
        "rank": reader.rank("r"),
        "alpha": reader.number("lora_alpha"),
        "use_rslora": reader.flag("use_rslora"),
        "use_dora": reader.flag("use_dora"),
        "target_modules": reader.names_or_regex("target_modules"),
        "exclude_modules": reader.names_or_regex("exclude_modules"),
        "layers_to_transform": reader.layer_indexes(),
        "layers_pattern": reader.layers_pattern(),
        "rank_pattern": reader.patterns("rank_pattern", is_rank=True),
        "alpha_pattern": reader.patterns("alpha_pattern", is_rank=False),
        "base_model_name_or_path": reader.base_model(),
        "bias": reader.bias(),
        "lora_bias": reader.flag("lora_bias"),
        "modules_to_save": reader.modules_to_save(),
        "trainable_tokens": reader.trainable_tokens(),
        "ensure_weight_tying": reader.flag("ensure_weight_tying"),
    }
    reader.check_init()
    reader.check_other_fields()
    if reader.reasons:
        raise AdapterRefused(reader.reasons)
    return AdapterSpec(**values, warnings=tuple(reader.warnings))


class _Reader:
    """Reads fields of one config, collecting reasons instead of stopping at the first."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.reasons: list[str] = []
        self.warnings: list[str] = []

    def check_kind(self) -> None:
        kind = self.config.get("peft_type")
        if kind is None:
            self.warnings.append("adapter_config.json names no peft_type; it was read as LORA")
        elif not isinstance(kind, str) or kind.upper() != "LORA":
            self.reasons.append(_other_kind(kind))

    def rank(self, name: str) -> int:
        if self.config.get(name) is None:
            self._missing(name, "the rank")
            return 0
        value = _whole_number(self.config[name])
        if value is None or not 0 < value <= MAX_RANK:
            self._wrong(name, self.config[name], "a whole number of 1 or more")
            return 0
        return value

    def number(self, name: str) -> float:
        if self.config.get(name) is None:
            self._missing(name, "the scale")
            return 0.0
        value = _number(self.config[name])
        if value is None:
            self._wrong(name, self.config[name], "a finite number")
            return 0.0
        return value

    def flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        if isinstance(value, (int, float)) and value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        self._wrong(name, value, "true or false")
        return False

    def names_or_regex(self, name: str) -> tuple[str, ...] | str | None:
        value = self.config.get(name)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._wrong(name, value, "a list of module names, a regular expression or null")
        return None

    def layer_indexes(self) -> tuple[int, ...] | None:
        value = self.config.get("layers_to_transform")
        if value is None or value == []:
            return None
        numbers = [_whole_number(item) for item in (value if isinstance(value, list) else [value])]
        if any(number is None or number < 0 for number in numbers):
            self._wrong("layers_to_transform", value, "a layer number or a list of them")
            return None
        return tuple(number for number in numbers if number is not None)

    def layers_pattern(self) -> tuple[str, ...]:
        value = self.config.get("layers_pattern")
        if not value:
            return ()
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._wrong("layers_pattern", value, "a name or a list of names")
        return ()

    def patterns(self, name: str, *, is_rank: bool) -> dict[str, Any]:
        value = self.config.get(name)
        if not value:
            return {}
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            self._wrong(name, value, f"an object of at most {MAX_PATTERNS} entries from module name to number")
            return {}
        result: dict[str, Any] = {}
        for key, item in value.items():
            number = _whole_number(item) if is_rank else _number(item)
            if number is None or (is_rank and not 0 < number <= MAX_RANK):
                self._wrong(f"{name}[{_shown(key)}]", item, "a whole number of 1 or more" if is_rank else "a number")
                continue
            try:
                compile_peft_pattern(key)
            except UnsafePattern as error:
                self.reasons.append(f"{name}: the key {_shown(key)} {error}; write the module names out instead")
                continue
            result[key] = number
        return result

    def base_model(self) -> str | None:
        value = self.config.get("base_model_name_or_path")
        if value is None or isinstance(value, str):
            return value or None
        self._wrong("base_model_name_or_path", value, "a text or null")
        return None

    def bias(self) -> str:
        value = self.config.get("bias")
        if value in (None, False, "none"):
            return "none"
        if value not in ("all", "lora_only"):
            self._wrong("bias", value, "none, all or lora_only")
        return str(value)

    def modules_to_save(self) -> tuple[str, ...]:
        value = self.config.get("modules_to_save")
        if not value:
            return ()
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list) and all(isinstance(item, str) for item in names):
            return tuple(names)
        self._wrong("modules_to_save", value, "a list of module names or null")
        return ()

    def trainable_tokens(self) -> dict[str, tuple[int, ...]]:
        """Module name -> token ids; a bare list is about the input embedding, whatever its name, here the empty name."""
        value = self.config.get("trainable_token_indices")
        if not value:
            return {}
        by_module = value if isinstance(value, dict) else {"": value}
        result = {}
        for name, items in by_module.items():
            numbers = [_whole_number(item) for item in items] if isinstance(items, list) else [None]
            ids = [number for number in numbers if number is not None and number >= 0]
            if len(ids) != len(numbers) or len(set(ids)) != len(ids):
                self._wrong("trainable_token_indices", value, "a list of different token ids, or such a list by module")
                return {}
            result[str(name)] = tuple(ids)
        return result

    def check_init(self) -> None:
        value = self.config.get("init_lora_weights")
        if value is None or isinstance(value, bool):
            return
        name = value.lower() if isinstance(value, str) else ""
        if name in PLAIN_INITS:
            return
        if name.startswith(BASE_CHANGING_INITS):
            self.reasons.append(
                f"init_lora_weights is {_shown(value)}, which also changes the base model's weights, so the adapter "
                "does not fit the unchanged base; save it with save_pretrained(..., "
                "path_initial_model_for_weight_conversion=...), which turns it into a plain LoRA"
            )
        else:
            self.reasons.append(
                f"init_lora_weights is {_shown(value)}, which is not known here; if it left the base model's weights "
                "alone, set the field to true in adapter_config.json"
            )

    def check_other_fields(self) -> None:
        ignored: list[str] = []
        for name, value in self.config.items():
            if name in READ_FIELDS or name in INERT_FIELDS:
                continue
            is_neutral = _is_neutral(value)
            if name in REFUSED_FIELDS:
                if not is_neutral:
                    self.reasons.append(REFUSED_FIELDS[name] + self._named_modules(name, value))
            elif is_neutral:
                log.info("event=adapter_config_field_ignored field=%r value=%r", name, value)
                ignored.append(_shown(name))
            else:
                self.reasons.append(
                    f"the field {_shown(name)} of adapter_config.json is {_shown(value)}, which is not known here and "
                    "may change the result; if it does not matter at inference, set it to null"
                )
        if ignored:
            more = f" and {len(ignored) - 5} more" if len(ignored) > 5 else ""
            self.warnings.append(
                f"fields of adapter_config.json that are not known here were ignored, because their values switch nothing "
                f"on: {', '.join(ignored[:5])}{more}"
            )

    @staticmethod
    def _named_modules(name: str, value: Any) -> str:
        is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return f" ({name}: {', '.join(_clip(item) for item in value[:5])})" if is_list else ""

    def _missing(self, name: str, what: str) -> None:
        self.reasons.append(
            f"adapter_config.json has no {name}, without which {what} is unknown; add the value used in training"
        )

    def _wrong(self, name: str, value: Any, allowed: str) -> None:
        self.reasons.append(f"{name} in adapter_config.json is {_shown(value)}, but must be {allowed}")


def _other_kind(kind: Any) -> str:
    name = kind.upper() if isinstance(kind, str) else ""
    if name in CONVERTIBLE_KINDS:
        return (
            f"peft_type is {_clip(kind)}, but only LORA is served; PEFT can turn it into a LoRA: load it with "
            "PeftModel.from_pretrained and call peft.save_as_lora(folder, model, rank=64)"
        )
    if name in PROMPT_KINDS:
        return (
            f"peft_type is {_clip(kind)}, but only LORA is served; it trains virtual tokens or extra attention, which no "
            "LoRA equals; train a LoRA"
        )
    return (
        f"peft_type is {_shown(kind)}, but only LORA is served; merge the adapter into the model and serve that, or "
        "train a LoRA"
    )


def _whole_number(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number == int(number) else None


def _number(value: Any) -> float | None:
    """A finite number, also when written as text; None for anything else (booleans included)."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or len(str(value)) > 40:
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_neutral(value: Any) -> bool:
    """Whether a field's value switches nothing on: null, false, 0, or empty."""
    return value is None or value is False or value in ("", 0, [], {})


def _clip(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _shown(value: Any) -> str:
    """A value as a message shows it: short, on one line."""
    if isinstance(value, (dict, list)):
        return _clip(f"{'an object' if isinstance(value, dict) else 'a list'} {str(value)[:60]}")
    return repr(_clip(value)) if isinstance(value, str) else _clip(str(value)[:200])
