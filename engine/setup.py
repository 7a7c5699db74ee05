"""What follows from the settings before anything is built: defaults of the embedded model, contradictions, sizes.

Functions of the settings and the loaded model, without state. Called by `engine/engine`.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.attention import AttentionStep
from engine.config import EMBEDDED_ASSETS, EMBEDDED_MODEL, EngineConfig, LoRAModule
from engine.cpu_linear import default_budget
from engine.errors import InvalidRequest
from engine.flight import FlightTokens
from engine.graphs import StepGraphs
from engine.kv_cache import KVCache
from engine.model import BaseModel, load_model
from kernels import HAS_TRITON, MAX_HEAD_DIM, LoraMetadata

if TYPE_CHECKING:
    from engine.parallel.loading import ShardedLoad

logger = logging.getLogger(__name__)

_DEFAULT_KV_MB = 1024
_WINDOW_SECONDS = 30.0  # Whisper's encoder, which many speech models begin with, hears no more
_EMBEDDED_WINDOW_SECONDS = 12.0


def freeze_startup_objects() -> None:
    """Keep the garbage collector from looking through everything that was made until now, for the program's lifetime.

    Libraries and the model's modules are some 400,000 objects, and looking through them takes a quarter of a second, in
    which every running request stands still; loading adapters makes the collector do it every few dozen loads. For
    programs whose engine lives as long as they do.
    """
    gc.collect()
    gc.freeze()


def check_settings(config: EngineConfig) -> None:
    """Refuse settings that contradict each other."""
    if config.max_cpu_loras < config.max_loras:
        raise InvalidRequest(
            f"--max-cpu-loras is {config.max_cpu_loras}, but must be at least --max-loras, which is {config.max_loras}.",
            param="max_cpu_loras",
        )
    for name in ("max_loras", "max_lora_rank", "max_num_seqs", "max_num_batched_tokens", "block_size"):
        if getattr(config, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise InvalidRequest(f"{flag} is {getattr(config, name)}, but must be 1 or more.", param=name)
    above_zero = (
        "max_audio_seconds", "gpu_memory_utilization", "kv_cache_memory_mb", "max_model_len", "max_upload_mb",
        "max_cpu_lora_mb", "max_recording_seconds", "transcription_window",
    )  # fmt: skip
    for name in above_zero:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise InvalidRequest(f"--{name.replace('_', '-')} is {value}, but must be above 0.", param=name)
    if config.lora_extra_vocab_size < 0:
        raise InvalidRequest(
            f"--lora-extra-vocab-size is {config.lora_extra_vocab_size}, but must be 0 or more.",
            param="lora_extra_vocab_size",
        )
    if not config.enable_lora and (config.lora_modules or config.default_mm_loras):
        raise InvalidRequest(
            "Adapters are named although --no-enable-lora switches them off; leave one of the two out.",
            param="enable_lora",
        )
    _check_folders(config)
    check_parallel_settings(config)


def _check_folders(config: EngineConfig) -> None:
    """Refuse adapters' paths without a folder before the model is loaded; what may be on a hub or in S3 is asked for later."""
    named = [
        (f"--lora-modules {module.name}={module.path}", str(module.path), "lora_modules")
        for module in config.lora_modules
    ]
    named += [
        (f"--default-mm-loras {modality}={path}", path, "default_mm_loras")
        for modality, path in (config.default_mm_loras or {}).items()
    ]
    for setting, path, param in named:
        is_path = path.startswith(("/", "./", "../", "~")) or Path(path).is_absolute()
        if is_path and not _is_folder(path):
            raise InvalidRequest(
                f"{setting}: no folder was found there; give one adapter's folder, best by its absolute path.",
                param=param,
            )


def _is_folder(path: str) -> bool:
    try:
        return Path(path).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, not to be read, nobody's home
        return False


def check_parallel_settings(config: EngineConfig) -> None:
    """Refuse settings that do not go with several ranks.

    Raises:
        InvalidRequest: names the flag.
    """
    size = config.tensor_parallel_size
    if size < 1:
        raise InvalidRequest(f"--tensor-parallel-size is {size}, but must be 1 or more.", param="tensor_parallel_size")
    if size == 1:
        if config.fully_sharded_loras:
            raise InvalidRequest(
                "--fully-sharded-loras is for --tensor-parallel-size 2 or more; leave it out.",
                param="fully_sharded_loras",
            )
        return
    if platform.system() != "Linux":
        raise InvalidRequest(
            f"--tensor-parallel-size {size} is served on Linux only, and this is {platform.system()}; leave the flag out.",
            param="tensor_parallel_size",
        )
    others = {
        "--quantization": config.quantization is not None,
        "--gguf-file": config.gguf_file is not None,
        "--enable-dora": config.enable_dora,
        "--lora-extra-vocab-size": config.lora_extra_vocab_size > 0,
    }
    for flag, is_set in others.items():
        if is_set:
            raise InvalidRequest(
                f"{flag} is not served with --tensor-parallel-size {size}; leave one of the two out.",
                param="tensor_parallel_size",
            )
    if config.fully_sharded_loras and config.max_lora_rank % size:
        raise InvalidRequest(
            f"--max-lora-rank is {config.max_lora_rank}, but with --fully-sharded-loras must be a multiple of "
            f"--tensor-parallel-size, which is {size}.",
            param="max_lora_rank",
        )


def with_gguf_file(config: EngineConfig) -> EngineConfig:
    """A model given as a GGUF file, or as a folder that holds one and no config, becomes the folder and the file's name.

    Raises:
        InvalidRequest: the folder holds several such files.
    """
    path = Path(config.model).expanduser()
    if config.gguf_file is not None:
        return config
    if path.suffix.lower() == ".gguf" and path.is_file():
        names = config.served_model_name or [path.stem]
        return dataclasses.replace(config, model=str(path.parent), gguf_file=path.name, served_model_name=names)
    files = [] if (path / "config.json").exists() else sorted(file.name for file in path.glob("*.gguf"))
    if len(files) > 1:
        raise InvalidRequest(
            f"--model {config.model} holds {len(files)} GGUF files ({', '.join(files[:5])}{', …' * (len(files) > 5)}); name one "
            "with --gguf-file.",
            param="gguf_file",
        )
    return dataclasses.replace(config, gguf_file=files[0]) if files else config


def with_embedded_defaults(config: EngineConfig) -> EngineConfig:
    """With the embedded model, its adapters and the audio default come by themselves; what is named wins."""
    if Path(config.model).resolve() != EMBEDDED_MODEL or not config.enable_lora:
        return config
    named = {module.name for module in config.lora_modules}
    folders = [path.parent for path in sorted((EMBEDDED_ASSETS / "adapters").glob("*/adapter_config.json"))]
    embedded = [LoRAModule(folder.name, str(folder)) for folder in folders if folder.name not in named]
    defaults = {"audio": "speech"} if config.default_mm_loras is None else config.default_mm_loras
    return dataclasses.replace(config, lora_modules=[*embedded, *config.lora_modules], default_mm_loras=defaults)


def transcription_window(config: EngineConfig) -> float:
    """Longest piece of a recording, in seconds: what speech models are trained on, unless it is set."""
    is_embedded = Path(config.model).resolve() == EMBEDDED_MODEL
    wanted = config.transcription_window or (_EMBEDDED_WINDOW_SECONDS if is_embedded else _WINDOW_SECONDS)
    return min(wanted, config.max_audio_seconds)


def runs_ahead(config: EngineConfig, base: BaseModel) -> bool:
    """Whether steps are launched ahead; on a CPU that would only delay tokens, since a launch there is the work itself."""
    return base.device.type == "cuda" if config.async_scheduling is None else config.async_scheduling


def check_extra_vocab(config: EngineConfig, base: BaseModel) -> None:
    """Refuse room for added tokens where their ids would be the model's media placeholders."""
    if config.lora_extra_vocab_size and max(base.placeholder_ids, default=-1) >= base.vocab_size:
        raise InvalidRequest(
            f"--lora-extra-vocab-size is {config.lora_extra_vocab_size}, but this model's placeholder for media lies past "
            "its vocabulary, where added tokens would; leave the flag out.",
            param="lora_extra_vocab_size",
        )


def lora_dtype(name: str, base: BaseModel) -> torch.dtype:
    """The type of adapters' weights: the model's own, and nothing else."""
    if name == "auto" or getattr(torch, name, None) is base.dtype:
        return base.dtype
    raise InvalidRequest(
        f"--lora-dtype is {name!r}, but adapters are computed in the model's type, {str(base.dtype)[6:]}; use auto.",
        param="lora_dtype",
    )


def load_base(config: EngineConfig, sharded: ShardedLoad | None = None) -> BaseModel:
    """The base model that the settings name, or with `sharded` one rank's share of it."""
    return load_model(
        config.model,
        load_format=config.load_format,
        dtype=config.dtype,
        device=config.device,
        gguf_file=config.gguf_file,
        seed=config.seed,
        quantization=config.quantization,
        sharded=sharded,
    )


def make_graphs(
    config: EngineConfig,
    base: BaseModel,
    attention_step: AttentionStep,
    lora_metadata: Mapping[str, LoraMetadata],
    flight_tokens: FlightTokens,
    *,
    max_num_seqs: int,
    max_model_len: int,
) -> StepGraphs | None:
    """Steps to be recorded; None where every step is run launch by launch."""
    if not has_graphs(config, base):
        if base.device.type == "cuda" and not config.enforce_eager:
            logger.warning("event=eager reason=%r", _eager_reason(config, base))
        return None
    return StepGraphs(
        base, attention_step, lora_metadata, flight_tokens, max_num_seqs=max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens,
        max_blocks=-(-max_model_len // config.block_size), block_size=config.block_size,
    )  # fmt: skip


def has_graphs(config: EngineConfig, base: BaseModel) -> bool:
    """Whether layers are compiled and steps recorded."""
    return _eager_reason(config, base) is None


def _eager_reason(config: EngineConfig, base: BaseModel) -> str | None:
    """Why steps are run launch by launch; None where they are recorded."""
    if base.device.type != "cuda":
        return "graphs are CUDA's"
    if config.enforce_eager:
        return "--enforce-eager"
    if base.quantization is not None and not base.quantization.can_be_recorded:
        return f"layers of {base.quantization.method} are not recorded"
    if not HAS_TRITON:
        return "the package triton cannot be imported, so plain PyTorch stands in for all kernels; install it"
    if base.kv_shape.head_dim > MAX_HEAD_DIM:
        return f"heads of {base.kv_shape.head_dim} are wider than the attention kernels' {MAX_HEAD_DIM}"
    return None


def kv_bytes(config: EngineConfig, base: BaseModel) -> int:
    """Bytes for the KV cache on this device."""
    return (config.kv_cache_memory_mb or _default_kv_mb(config, base)) * 2**20


def make_cache(config: EngineConfig, base: BaseModel, num_bytes: int) -> KVCache:
    """As many KV blocks as `num_bytes` hold, but no more than all requests could ever use."""
    shape, block_size = base.kv_shape, config.block_size
    num_blocks = num_bytes // (shape.bytes_per_token * block_size)
    longest = config.max_model_len or base.max_positions
    most_useful = config.max_num_seqs * -(-longest // block_size)
    return KVCache(shape, max(2, min(num_blocks, most_useful) + 1), block_size, base.device)


def packing_budget(config: EngineConfig, reserved_bytes: int) -> int:
    """Bytes for packed copies of weights on a CPU; `reserved_bytes` are promised to others but not touched yet."""
    if config.packed_weights_mb is None:
        return default_budget(reserved_bytes)
    return config.packed_weights_mb * 2**20


def fit_context(config: EngineConfig, base: BaseModel, cache: KVCache) -> int:
    """The context's length in tokens: what was asked for, else the model's own, shortened to what the cache holds.

    Raises:
        InvalidRequest: the model or the cache cannot hold what was asked for.
    """
    capacity = (cache.num_blocks - 1) * cache.block_size
    wanted, limit = config.max_model_len, base.max_positions
    if wanted is None:
        if capacity < limit:
            logger.warning("event=context_shortened max_model_len=%d model_limit=%d", capacity, limit)
        return min(capacity, limit)
    if wanted > limit:
        raise InvalidRequest(
            f"--max-model-len is {wanted}, but the model was made for {limit} tokens; lower it, or leave it out.",
            param="max_model_len",
        )
    if wanted > capacity:
        raise InvalidRequest(
            f"--max-model-len is {wanted}, but the KV cache holds {capacity} tokens; lower it, or raise "
            "--kv-cache-memory-mb.",
            param="max_model_len",
        )
    return wanted


def _default_kv_mb(config: EngineConfig, base: BaseModel) -> int:
    if base.device.type != "cuda":
        return _DEFAULT_KV_MB
    free, total = torch.cuda.mem_get_info(base.device)
    reserved = int(total * (1 - config.gpu_memory_utilization))
    return int(max(64, (free - reserved) // 2**20))


def user_data_dir() -> Path:
    """Where this user's applications keep data: XDG on Linux, Library on macOS, AppData on Windows."""
    if sys.platform == "darwin":
        root = Path.home() / "Library" / "Application Support"
    elif sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        root = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return root / "switchboard"
