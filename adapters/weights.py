"""Adapter files -> LoRA pairs that fit the running model, or a refusal that says why.

Reads what `plan` has laid out, checks and casts the numbers, and folds each module's scale into B. Called by `intake`;
runs on loader threads.

R rank, in/out features of a layer.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from adapters.errors import AdapterRefused
from adapters.folder import AdapterFolder
from adapters.plan import AdapterPlan, PlannedPair, plan_adapter, short_model_name
from adapters.report import AdapterReport
from adapters.spec import AdapterSpec
from adapters.surface import ModelSurface


@dataclass(frozen=True)
class LoraPair:
    """LoRA of one layer, on the CPU in the serving dtype: the layer adds `b @ (a @ x)`.

    Attributes:
        a: [R, in].
        b: [out, R], the scale folded in (multiplied in fp32, then cast).
        rank: R, as the tensors have it.
        scale: the factor that was folded into `b`; nothing downstream needs it.
    """

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scale: float


def read_adapter(
    folder: Path, surface: ModelSurface, *, allowed_roots: Sequence[Path] | None = None
) -> tuple[AdapterSpec, dict[str, LoraPair], AdapterReport]:
    """Read a PEFT folder for the running model.

    Returns the config, the pairs by `named_modules()` name, and a report. Raises `AdapterFilesNotFound` where there is
    no adapter and `AdapterRefused`, with all reasons that were found, where it cannot be served exactly.
    """
    with AdapterFolder(folder, allowed_roots=allowed_roots) as files:
        plan = plan_adapter(files, surface)
        digest = hashlib.sha256()
        pairs, num_zero = {}, 0
        for name, planned in plan.pairs.items():
            pairs[name], is_zero = _read_pair(planned, surface.lora_dtype, digest)
            num_zero += is_zero
        files.check_unchanged()
    report = _report(plan, surface, "sha256:" + digest.hexdigest(), is_zero_effect=num_zero == len(pairs))
    return plan.spec, pairs, report


def _read_pair(planned: PlannedPair, dtype: torch.dtype, digest: hashlib._Hash) -> tuple[LoraPair, bool]:
    """Read, check and cast one pair; True where it adds exactly zero."""
    halves = []
    for place in (planned.a, planned.b):
        tensor, buffer = place.file.read(place.entry)
        header = [planned.site.name, place.entry.dtype, place.entry.shape, repr(planned.scale)]
        digest.update(json.dumps(header).encode())
        digest.update(buffer)
        if not torch.isfinite(tensor).all():
            raise AdapterRefused([f"tensor {place.entry.name} holds NaN or infinity; the training run went wrong"])
        halves.append(tensor)
    a = halves[0].to(dtype, copy=True)
    b = (halves[1].float() * planned.scale).to(dtype, copy=True)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise AdapterRefused(
            [
                f"{planned.file_name} does not fit {_dtype_name(dtype)} (numbers too large); start with "
                "--lora-dtype float32"
            ]
        )
    is_zero = planned.scale == 0.0 or not halves[0].any() or not halves[1].any()
    return LoraPair(a, b, planned.rank, planned.scale), bool(is_zero)


def _report(plan: AdapterPlan, surface: ModelSurface, digest: str, *, is_zero_effect: bool) -> AdapterReport:
    pairs = plan.pairs.values()
    ranks = Counter(pair.rank for pair in pairs)
    scales = Counter(pair.scale for pair in pairs)
    warnings = list(plan.warnings)
    if is_zero_effect:
        warnings.append(
            "the adapter changes nothing: A or B is zero in every module, so answers equal the base model's"
        )
    return AdapterReport(
        matched=len(plan.pairs),
        total=len(plan.pairs),
        rank=max(ranks),
        ranks=dict(sorted(ranks.items())),
        alpha=plan.spec.alpha,
        scale=scales.most_common(1)[0][0],
        scales=dict(sorted(scales.items())),
        target_modules=sorted({name.rpartition(".")[2] for name in plan.pairs}),
        parts=sorted({pair.site.part for pair in pairs}),
        num_modules=len(plan.pairs),
        num_bytes=plan.num_bytes(surface.lora_dtype),
        dtype=_dtype_name(surface.lora_dtype),
        digest=digest,
        base_model=short_model_name(plan.spec.base_model_name_or_path),
        warnings=warnings,
        is_zero_effect=is_zero_effect,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
