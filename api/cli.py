"""The command line: words and environment variables become an `EngineConfig` and a `ServerSettings`, or one sentence.

Owns the parsing of `--lora-modules`, flags that are kept for old command lines, and the contradictions that show
without loading anything. Called by `app.py`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from adapters.errors import InvalidSource
from api.settings import ConfigFault, ServerSettings, environment_values
from engine.config import EngineConfig, LoRAModule, add_flags, flag_name, json_object

HELP_HINT = "see `python app.py --help`"


@dataclass(frozen=True)
class CommandLine:
    """What the user asked for, checked; `warnings` are sentences to log once logging is set up."""

    engine: EngineConfig
    server: ServerSettings
    warnings: tuple[str, ...] = ()


def parse_command_line(words: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Turn words and environment into settings; words win.

    Raises `ConfigFault` with one sentence: what is wrong and the remedy; `--help`
    prints and exits as usual.
    """
    parser = _parser()
    given = vars(parser.parse_args(_join_dotted_flags(list(words), parser)))
    model = given.pop("model_word", None)
    if model is not None:
        if given.get("model", model) != model:
            raise ConfigFault(f"the model is given twice, as {model!r} and as --model {given['model']!r}; keep one.")
        given["model"] = model
    warnings = _legacy_warnings(given)
    special = {"lora_modules": parse_lora_modules}
    values = environment_values(EngineConfig, environ, special) | environment_values(ServerSettings, environ) | given
    engine_names = {row.name for row in fields(EngineConfig)}
    engine_values = {name: value for name, value in values.items() if name in engine_names}
    server = ServerSettings(**{name: value for name, value in values.items() if name not in engine_names}).resolve()
    return CommandLine(_engine_config(engine_values), server, tuple(warnings))


def parse_lora_modules(text: str) -> list[LoRAModule]:
    """Parse one item of `--lora-modules`.

    `name=path` is split at the first `=`; text that begins with `{` or `[` is a JSON object with `name`, `path` and
    optionally `base_model_name`, or a list of such objects; empty text is no adapter. Raises `ArgumentTypeError`.
    """
    text = text.strip()
    if not text:
        return []
    if text[0] not in "{[":
        name, equals, path = text.partition("=")
        if not (equals and name.strip() and path.strip()):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH; write for example sql=adapters/sql")
        return [LoRAModule(name.strip(), path.strip())]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid JSON ({error}); write NAME=PATH or {_JSON_EXAMPLE}"
        ) from error
    return [_module_from_json(item) for item in (value if isinstance(value, list) else [value])]


_JSON_EXAMPLE = '{"name": "sql", "path": "adapters/sql"}'


def _module_from_json(item: object) -> LoRAModule:
    if not isinstance(item, dict):
        raise argparse.ArgumentTypeError(f"{json.dumps(item)} is not a JSON object; write {_JSON_EXAMPLE}")
    known = {"name", "path", "base_model_name"}
    unknown, missing = sorted(item.keys() - known), sorted({"name", "path"} - item.keys())
    if unknown or missing:
        fault = f"has the unknown field {unknown[0]!r}" if unknown else f"has no {missing[0]!r}"
        raise argparse.ArgumentTypeError(f"{json.dumps(item)} {fault}; write {_JSON_EXAMPLE}")
    for name, value in item.items():
        if not (isinstance(value, str) and value.strip()) and not (name == "base_model_name" and value is None):
            raise argparse.ArgumentTypeError(f"{json.dumps(item)}: {name!r} must be a text that is not empty")
    return LoRAModule(item["name"].strip(), item["path"].strip(), item.get("base_model_name"))


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one sentence with a remedy."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--?\S+)", message)
        if unknown is None:
            raise ConfigFault(f"{message.removeprefix('argument ')}; {HELP_HINT}.")
        flag = unknown[1].split("=")[0]
        alike = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        raise ConfigFault(f"unknown flag {flag}; " + (f"did you mean {alike[0]}?" if alike else f"{HELP_HINT}."))


class _Modules(argparse.Action):
    """Collects the items of `--lora-modules`; the flag may be repeated."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        found = [module for item in values for module in item]
        setattr(namespace, self.dest, getattr(namespace, self.dest, []) + found)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="app.py",
        description="Serve one base model with many LoRA adapters: a browser app and an OpenAI-compatible API.",
        allow_abbrev=False,
    )
    parser.add_argument("model_word", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")
    # An empty --lora-modules means none, as with vLLM, so "*" and not "+".
    add_flags(parser, EngineConfig, special={"lora_modules": {"type": parse_lora_modules, "action": _Modules}})
    add_flags(parser, ServerSettings)
    old = parser.add_argument_group("kept for old command lines")
    old.add_argument(
        "--enable-tower-connector-lora",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="on is the only value served: adapters reach the tower and the connector where the model has them",
    )
    old.add_argument(
        "--long-lora-scaling-factors", nargs="+", default=argparse.SUPPRESS, metavar="X", help="has no effect"
    )
    return parser


def _join_dotted_flags(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Turn `--default-mm-loras.audio PATH` into the JSON that the flag takes; several keys of a flag are joined."""
    tables = {flag_name(row) for row in fields(EngineConfig) if row.metadata["parse"] is json_object}
    joined: dict[str, dict[str, Any]] = {}
    others: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        flag, dot, rest = word.partition(".")
        if not dot or flag not in tables:
            others.append(word)
            continue
        key, equals, value = rest.partition("=")
        if not equals and not queue:
            parser.error(f"{word}: expected one argument")
        value = value if equals else queue.pop(0)
        joined.setdefault(flag, {})[key] = int(value) if value.isdecimal() else value
    return others + [f"{flag}={json.dumps(values)}" for flag, values in joined.items()]


def _legacy_warnings(given: dict[str, Any]) -> list[str]:
    if not given.pop("enable_tower_connector_lora", True):
        raise ConfigFault(
            "--no-enable-tower-connector-lora is not served; leave it out, or name the decoder's modules with "
            "--lora-target-modules so that other adapters are refused."
        )
    if given.pop("long_lora_scaling_factors", None) is None:
        return []
    return [
        (
            "--long-lora-scaling-factors has no effect: long-context adapters bring their scaling in their own files; "
            "leave the flag out"
        )
    ]


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    if not values.get("enable_lora", True):
        for name in ("lora_modules", "default_mm_loras", "lora_resolver"):
            if values.get(name):
                raise ConfigFault(f"--no-enable-lora contradicts --{name.replace('_', '-')}; drop one of them.")
    config = EngineConfig(**values)
    _check(config)
    return config


def _check(config: EngineConfig) -> None:
    """Refuse values that no engine can work with; what depends on the model is the engine's to check."""
    for name, lowest in _LOWEST.items():
        value = getattr(config, name)
        if value is not None and value < lowest:
            raise ConfigFault(f"--{name.replace('_', '-')} is {value}, but must be {lowest} or more.", param=name)
    for name, allowed in _CHOICES.items():
        value = getattr(config, name)
        if value not in allowed:
            listed = ", ".join(allowed)
            raise ConfigFault(f"--{name.replace('_', '-')} is {value!r}, but must be one of {listed}.", param=name)
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigFault(
            f"--gpu-memory-utilization is {config.gpu_memory_utilization}, but must be above 0 and at most 1."
        )
    _check_names(config)
    _check_resolvers(config)
    for modality, most in config.limit_mm_per_prompt.items():
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise ConfigFault(f"--limit-mm-per-prompt: {modality!r} is {most!r}, but must be a count, 0 or more.")
    for modality, adapter in (config.default_mm_loras or {}).items():
        if not isinstance(adapter, str) or not adapter:
            raise ConfigFault(
                f"--default-mm-loras: {modality!r} is {adapter!r}, but must be an adapter's name or path."
            )


def _check_resolvers(config: EngineConfig) -> None:
    if config.lora_resolver:
        from adapters.resolvers import check_spec

        for spec in config.lora_resolver:
            try:
                check_spec(spec)
            except InvalidSource as error:
                raise ConfigFault(error.message, param="lora_resolver") from None


def _check_names(config: EngineConfig) -> None:
    seen: set[str] = set()
    for module in config.lora_modules:
        if module.name in seen:
            raise ConfigFault(f"--lora-modules names {module.name!r} twice; give each adapter a name of its own.")
        seen.add(module.name)
        if module.name in config.served_model_name:
            raise ConfigFault(f"{module.name!r} is both an adapter's and the base model's name; rename one of them.")


_LOWEST = {
    "lora_extra_vocab_size": 0,
    "max_model_len": 1,
    "kv_cache_memory_mb": 1,
    "packed_weights_mb": 0,
    "max_audio_seconds": 1,
    "max_recording_seconds": 1,
    "transcription_window": 1,
    "max_upload_mb": 1,
    "encoder_cache_mb": 0,
}
_CHOICES = {
    "load_format": ("auto", "dummy"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "lora_dtype": ("auto", "float32", "bfloat16", "float16"),
}
