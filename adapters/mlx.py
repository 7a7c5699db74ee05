"""Reads the adapter format of mlx-lm: its config becomes the PEFT config of the same adapter.

mlx-lm trains on Apple machines and writes `adapters.safetensors` with `lora_a` [in, R] and `lora_b` [R, out], and an
`adapter_config.json` that is a dump of its command line, in which only `fine_tune_type` and `lora_parameters` say what
the adapter computes (https://github.com/ml-explore/mlx-lm, `tuner/utils.py`). Called by `folder` and `plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.errors import AdapterRefused

WEIGHTS_NAME = "adapters.safetensors"
# Fields of the command line that mlx-lm's own loader looks at.
READ_FIELDS = frozenset({"fine_tune_type", "lora_parameters", "num_layers", "lora_layers", "model", "use_dora"})
_READ_PARAMETERS = frozenset({"rank", "scale", "alpha", "dropout", "keys"})


def is_mlx_config(config: Any) -> bool:
    """Whether a config is mlx-lm's: it has no PEFT type, but `lora_parameters` or `fine_tune_type`."""
    return (
        isinstance(config, Mapping)
        and "peft_type" not in config
        and ("lora_parameters" in config or "fine_tune_type" in config)
    )


def as_peft_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The PEFT config of an mlx-lm adapter, without `target_modules`: there the tensors decide.

    Raises `AdapterRefused` where the config does not say what the adapter computes.
    """
    kind = config.get("fine_tune_type") or "lora"
    if kind not in ("lora", "dora"):
        raise AdapterRefused(
            [
                f"fine_tune_type is {str(kind)[:80]!r}, but only lora and dora are adapters; fuse the weights with "
                "mlx_lm.fuse and serve the result as the base"
            ]
        )
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, Mapping):
        raise AdapterRefused(["adapter_config.json has no lora_parameters, without which rank and scale are unknown"])
    rank, scale, alpha = parameters.get("rank"), parameters.get("scale"), parameters.get("alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise AdapterRefused([f"lora_parameters.rank is {str(rank)[:80]}, but must be a whole number of 1 or more"])
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise AdapterRefused([f"lora_parameters.scale is {str(scale)[:80]}, but must be a number"])
    if alpha is not None and alpha != rank:
        raise AdapterRefused(
            [
                f"lora_parameters holds both scale and alpha ({str(alpha)[:80]}): versions of mlx-lm disagree about "
                "whether alpha counts; write the factor that was used in training as scale, and remove alpha"
            ]
        )
    unknown = sorted(str(name)[:40] for name in parameters.keys() - _READ_PARAMETERS)
    if unknown:
        raise AdapterRefused([f"lora_parameters holds {', '.join(unknown[:5])}, which is not known here"])
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": float(scale) * rank,
        "use_dora": kind == "dora" or config.get("use_dora") is True,
        "base_model_name_or_path": config.get("model"),
    }
