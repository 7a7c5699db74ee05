"""Adapter files -> LoRA pairs that fit the running model, or a refusal that says why.

Has what `plan` has laid out read into a slab, each module's scale folded into B, and judges the numbers. Called by
`intake`; runs on loader threads.

R rank, in/out features of a layer.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from adapters.digest import content_hash, first_format_hash
from adapters.errors import AdapterRefused
from adapters.extras import AdapterExtras, read_extras, with_shared_heads
from adapters.folder import AdapterFolder
from adapters.full_tensors import check_copies
from adapters.landing import short_model_name
from adapters.plan import base_match, plan_adapter
from adapters.planned import AdapterPlan, PlannedEmbedding, PlannedPair
from adapters.report import AdapterReport, file_dtypes, module_groups
from adapters.slab import Half, read_slab
from adapters.slab_pool import Memory, fresh_memory
from adapters.spec import AdapterSpec
from adapters.surface import ModelSurface
from adapters.tokenizer_files import read_tokenizer_files


@dataclass(frozen=True)
class LoraPair:
    """LoRA of one layer, on the CPU in the serving dtype: the layer adds `b @ (a @ x)`.

    All pairs of an adapter are views of one storage, its slab.

    Attributes:
        a: [R, in].
        b: [out, R], the scale folded in (multiplied in fp32, then cast), and DoRA's gain where there is one.
        rank: R, as the tensors have it.
        scale: the factor that was folded into `b`; nothing downstream needs it.
    """

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scale: float


class AdapterContent(NamedTuple):
    """What was read from an adapter's folder; `pairs` and what `extras` holds go by `named_modules()` names."""

    spec: AdapterSpec
    pairs: dict[str, LoraPair]
    report: AdapterReport
    extras: AdapterExtras


def read_adapter(
    folder: Path,
    surface: ModelSurface,
    *,
    allowed_roots: Sequence[Path] | None = None,
    memory: Memory = fresh_memory,
) -> AdapterContent:
    """Read a PEFT folder for the running model; its pairs lie in `memory`.

    Raises `AdapterFilesNotFound` where there is no adapter and `AdapterRefused`, with all reasons that were found, where
    it cannot be served exactly.
    """
    with AdapterFolder(folder, allowed_roots=allowed_roots) as files:
        plan = with_shared_heads(plan_adapter(files, surface), surface)
        check_copies(plan.copies, surface)
        halves = {name: (Half(planned.a, 1.0), Half(planned.b, planned.scale)) for name, planned in plan.pairs.items()}
        in_order = [half for pair in halves.values() for half in pair]
        hashes = read_slab(in_order, surface.lora_dtype, memory=memory) if halves else []
        pairs = {name: _checked_pair(plan.pairs[name], a, b, surface.lora_dtype) for name, (a, b) in halves.items()}
        is_zero_effect = not any(pair.a.any() and pair.b.any() for pair in pairs.values())
        digest = content_hash(plan, hashes)
        read_tokenizer = functools.partial(read_tokenizer_files, folder, allowed_roots=allowed_roots)
        extras = read_extras(plan, {name: pair.b for name, pair in pairs.items()}, surface, digest, read_tokenizer)
        files.check_unchanged()
    is_zero_effect = is_zero_effect and extras.is_zero
    report = _report(plan, surface, "sha256:" + digest.hexdigest(), is_zero_effect=is_zero_effect)
    return AdapterContent(plan.spec, pairs, report, extras)


def has_first_format_digest(folder: Path, surface: ModelSurface, digest: str) -> bool:
    """Whether this digest is what an earlier version of this program computed for the folder's content."""
    with AdapterFolder(folder) as files:
        return "sha256:" + first_format_hash(plan_adapter(files, surface)).hexdigest() == digest


def _checked_pair(planned: PlannedPair, a: Half, b: Half, dtype: torch.dtype) -> LoraPair:
    """The pair, if all its numbers are finite as they are stored and as they are served."""
    for half in (a, b):
        if not half.is_finite:
            name = half.place.name
            raise AdapterRefused([f"tensor {name} holds NaN or infinity; the training run went wrong"])
    if not (a.fits and b.fits):
        raise AdapterRefused(
            [
                f"{planned.file_name} does not fit {_dtype_name(dtype)} (numbers too large); start with "
                "--lora-dtype float32"
            ]
        )
    return LoraPair(a.tensor, b.tensor, planned.rank, planned.scale)


def _report(plan: AdapterPlan, surface: ModelSurface, digest: str, *, is_zero_effect: bool) -> AdapterReport:
    pairs: list[PlannedPair | PlannedEmbedding] = [*plan.pairs.values(), *plan.embeddings.values()]
    names = [*plan.pairs, *plan.biases, *plan.embeddings, *plan.rows]
    ranks = Counter(pair.rank for pair in pairs)
    scales = Counter(pair.scale for pair in pairs)
    warnings = list(plan.warnings)
    if is_zero_effect:
        warnings.append(
            "the adapter changes nothing: A or B is zero in every module, so answers equal the base model's"
        )
    return AdapterReport(
        matched=len(pairs),
        total=len(pairs),
        rank=max(ranks, default=0),
        ranks=dict(sorted(ranks.items())),
        alpha=plan.spec.alpha,
        scale=scales.most_common(1)[0][0] if scales else 0.0,
        scales=dict(sorted(scales.items())),
        target_modules=sorted({name.rpartition(".")[2] for name in names}),
        parts=sorted({surface.part_of(name) for name in names}),
        num_modules=len({*names}),
        num_bytes=plan.num_bytes(surface.lora_dtype),
        dtype=_dtype_name(surface.lora_dtype),
        digest=digest,
        base_model=short_model_name(plan.spec.base_model_name_or_path),
        warnings=warnings,
        is_zero_effect=is_zero_effect,
        base_match=base_match(plan.spec, surface.model_name),
        file_dtypes=file_dtypes(plan),
        groups=module_groups(plan),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
