"""The engine's settings: one table that feeds the command line, the offline API and the docs.

Owns `EngineConfig` and the helpers that turn any such table into command-line flags. Knows nothing of HTTP; the server's
own settings are the table in `api/settings`. Called by `app.py`, `engine/llm` and the docs' test.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

EMBEDDED_ASSETS = Path(__file__).resolve().parent.parent / "assets"
EMBEDDED_MODEL = EMBEDDED_ASSETS / "models" / "tiny-speech"


def setting(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    nargs: str | None = None,
    metavar: str | None = None,
    shown_default: str | None = None,
) -> Any:
    """One row of a settings table: default, help text, and how a command-line word becomes a value.

    `shown_default` is what docs print where the default is worked out at start. Booleans become `--x/--no-x`.
    """
    metadata = {"help": help, "parse": parse, "nargs": nargs, "metavar": metavar, "shown_default": shown_default}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def json_object(text: str) -> dict[str, Any]:
    """Parse a flag's value as a JSON object; raises `argparse.ArgumentTypeError` with what was expected."""
    try:
        value = json.loads(text)
    except ValueError as error:
        message = f"{text!r} is not JSON ({error}); write an object such as '{{\"audio\": …}}'"
        raise argparse.ArgumentTypeError(message) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is JSON but not an object; write '{{\"audio\": …}}'")
    return value


@dataclass(frozen=True)
class LoRAModule:
    """An adapter to load at start: a name, where its files are, and optionally the base it was trained on."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine needs to know at start; frozen. Field names are the command line's and vLLM's."""

    model: str = setting(
        str(EMBEDDED_MODEL), "Hugging Face id or folder of the base model", metavar="ID_OR_PATH",
        shown_default="the embedded model",
    )  # fmt: skip
    served_model_name: list[str] = setting(
        [], "names that clients use for the base model; the first is canonical", nargs="+", metavar="NAME",
        shown_default="the model's name",
    )  # fmt: skip
    load_format: str = setting("auto", "auto reads weights; dummy makes random weights from the config")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16; auto is the checkpoint's, and float32 on a CPU")
    device: str = setting("auto", "auto, cpu or cuda")
    max_model_len: int | None = setting(
        None, "longest prompt plus answer, in tokens", parse=int, metavar="N", shown_default="the model's own limit"
    )
    max_num_seqs: int = setting(64, "most requests in one batch", parse=int, metavar="N")
    max_num_batched_tokens: int = setting(
        2048, "token budget of one step; longer prompts are computed in chunks", parse=int, metavar="N"
    )
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use", parse=float, metavar="SHARE")
    kv_cache_memory_mb: int | None = setting(
        None, "memory for the KV cache, in MiB", parse=int, metavar="MB",
        shown_default="1024 on a CPU, what is free on a GPU",
    )  # fmt: skip
    packed_weights_mb: int | None = setting(
        None, "memory on a CPU for float32 weights in a second, faster layout, in MiB; 0 packs none", parse=int,
        metavar="MB", shown_default="half of what is free",
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1, "GPUs of this machine that the model is spread over, one process each", parse=int,
        metavar="N",
    )  # fmt: skip
    block_size: int = setting(16, "tokens in one KV cache block", parse=int, metavar="N")
    enable_prefix_caching: bool = setting(True, "reuse the KV cache of equal prompt beginnings")
    enforce_eager: bool = setting(False, "no compilation and no CUDA graphs")
    async_scheduling: bool | None = setting(
        None, "launch each step before the one before it is read, so that the host works while the device computes",
        shown_default="on for a GPU",
    )  # fmt: skip
    seed: int = setting(0, "seed of random weights and of unseeded sampling", parse=int, metavar="N")
    enable_lora: bool = setting(True, "serve adapters")
    lora_modules: list[LoRAModule] = setting(
        [], "adapters to load at start: name=path, or JSON objects with name, path and base_model_name", nargs="+",
        metavar="ITEM", shown_default="the embedded model brings its own",
    )  # fmt: skip
    max_loras: int = setting(8, "adapters that can share one batch (rows of the LoRA buffers)", parse=int, metavar="N")
    max_lora_rank: int = setting(64, "largest rank that is accepted; memory follows it", parse=int, metavar="N")
    max_cpu_loras: int = setting(64, "adapters kept in CPU memory; at least --max-loras", parse=int, metavar="N")
    max_cpu_lora_mb: int | None = setting(
        None, "most CPU memory for adapters, in MiB; those in use or pinned stay beyond it", parse=int, metavar="MB",
        shown_default="no such bound",
    )  # fmt: skip
    enable_dora: bool = setting(
        False,
        "room in CUDA graphs for DoRA magnitudes and trained biases; where none are recorded they need no flag",
    )
    lora_extra_vocab_size: int = setting(
        0, "tokens that an adapter may add to the vocabulary, or replace the rows of", parse=int, metavar="N"
    )
    fully_sharded_loras: bool = setting(
        False,
        "cut both matrices of adapters over the GPUs of --tensor-parallel-size: less memory on each, more communication",
    )
    lora_dtype: str = setting("auto", "auto (the model's), float32, bfloat16 or float16")
    lora_target_modules: list[str] = setting(
        [], "serve LoRA on these module suffixes only; adapters that touch others are refused", nargs="+",
        metavar="SUFFIX", shown_default="all supported",
    )  # fmt: skip
    lora_resolver: list[str] = setting(
        [],
        "where adapters are looked for that requests name and nobody loaded, in this order: local:DIR, "
        "hub:OWNER/REPO[,OWNER/REPO], s3://BUCKET/PREFIX, package.module:Class",
        nargs="+", metavar="SPEC", shown_default="none",
    )  # fmt: skip
    default_mm_loras: Mapping[str, str] | None = setting(
        None, "modality to adapter (name, path or id), applied by itself when a prompt holds that modality",
        parse=json_object, metavar="JSON", shown_default='{"audio": "speech"} with the embedded model',
    )  # fmt: skip
    limit_mm_per_prompt: Mapping[str, int] = setting(
        {}, "most media items of a modality in one prompt", parse=json_object, metavar="JSON",
        shown_default='{"audio": 8, "image": 8}',
    )  # fmt: skip
    max_audio_seconds: float = setting(600.0, "longest audio clip, in seconds", parse=float, metavar="SECONDS")
    max_recording_seconds: float = setting(
        14_400.0, "longest recording to transcribe, in seconds; it is cut at silence", parse=float, metavar="SECONDS"
    )
    transcription_window: float | None = setting(
        None, "longest piece of a recording that the model hears at once, in seconds; less where the context is short",
        parse=float, metavar="SECONDS", shown_default="30, and 12 for the embedded model",
    )  # fmt: skip
    max_upload_mb: int = setting(1024, "largest upload (adapter or media file), in MiB", parse=int, metavar="MB")
    encoder_cache_mb: int = setting(256, "memory for computed media features, in MiB", parse=int, metavar="MB")
    adapter_dir: str | None = setting(
        None,
        "where uploaded adapters and the catalogue are kept",
        metavar="DIR",
        shown_default="the user's data folder",
    )
    quantization: str | None = setting(
        None,
        "quantise the decoder's linears while loading: int8, int8-dynamic, int4, fp8, fp8-dynamic or bitsandbytes; "
        "checkpoints that are quantised already need no flag",
        metavar="METHOD",
    )
    gguf_file: str | None = setting(
        None, "name of a GGUF file inside the model folder, where that holds more than one", metavar="FILE"
    )


def is_switch(row: Field[Any]) -> bool:
    """Whether a row of a settings table is on or off (or worked out at start), so that its flag takes no word."""
    return str(row.type).startswith("bool")


def flag_name(row: Field[Any]) -> str:
    """`max_loras` -> `--max-loras`."""
    return "--" + row.name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, table: type, *, special: Mapping[str, Any] | None = None) -> None:
    """Add one flag for each field of a settings dataclass; values not given on the command line stay absent.

    `special` maps a field's name to extra `add_argument` keywords (a custom action, say).
    """
    for row in fields(table):
        keywords: dict[str, Any] = {"dest": row.name, "help": row.metadata["help"], "default": argparse.SUPPRESS}
        if is_switch(row):
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords |= {"type": row.metadata["parse"], "metavar": row.metadata["metavar"]}
            if row.metadata["nargs"]:
                keywords["nargs"] = row.metadata["nargs"]
        keywords |= (special or {}).get(row.name, {})
        parser.add_argument(flag_name(row), **keywords)


def flag_rows(table: type) -> list[tuple[str, str, str]]:
    """`(flag, default, help)` of each row, for the docs."""
    rows = []
    for row in fields(table):
        default: Any = row.default_factory() if callable(row.default_factory) else row.default
        words = {"True": "on", "False": "off", "None": "none"}
        shown = row.metadata["shown_default"] or words.get(str(default), str(default))
        rows.append((flag_name(row), shown, row.metadata["help"]))
    return rows
