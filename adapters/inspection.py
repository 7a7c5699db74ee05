"""Looks at an adapter's files and says all that can be said: on a base model, or by themselves.

Without a base the files are judged against a model made up from their own names and shapes, on which everything lands:
what is left to find are faults of the config, damaged files, and methods that are not served. Called by `__main__`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from adapters.errors import AdapterRefused
from adapters.folder import AdapterFolder
from adapters.intake import with_card
from adapters.keys import TensorKey, split_key
from adapters.landing import pair_up, short_model_name
from adapters.mlx import is_mlx_config
from adapters.places import TensorPlace
from adapters.plan import check_adapter, parse_config
from adapters.planned import AdapterPlan
from adapters.readme import find_card
from adapters.report import AdapterReport
from adapters.spec import AdapterSpec
from adapters.surface import EmbeddingSite, LinearSite, ModelSurface
from adapters.tensor_file import FLOAT_DTYPES
from adapters.weights import read_adapter

_ANY_RANK = 1 << 20


@dataclass(frozen=True)
class Inspection:
    """What was found out about an adapter.

    Attributes:
        format: which trainer's format the files have, such as `PEFT 0.21.2`.
        base: the base that it was judged on, or None.
        report: as the server makes it; None where the adapter is refused.
        reasons: why it is refused, one sentence each.
        notes: what could not be judged here, one sentence each.
    """

    format: str
    base: str | None
    report: AdapterReport | None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def inspect_adapter(folder: Path, surface: ModelSurface | None) -> Inspection:
    """Judge a folder. `surface` is the base's, which may be without weights (meta tensors), or None.

    Raises `AdapterFilesNotFound` where there is no adapter.
    """
    base = None if surface is None else short_model_name(surface.model_name)
    try:
        return _inspect(folder, surface, base)
    except AdapterRefused as error:
        return Inspection("not readable", base, None, error.reasons)


def _inspect(folder: Path, surface: ModelSurface | None, base: str | None) -> Inspection:
    with AdapterFolder(folder) as files:
        kind = "mlx-lm" if is_mlx_config(files.config) else "PEFT"
        version = files.config.get("peft_version") if isinstance(files.config, dict) else None
        spec = _spec_or_none(files)
        target = surface or surface_of_files(files, spec)
    name = f"{kind} {version}" if kind == "PEFT" and isinstance(version, str) else kind
    try:
        plan = check_adapter(folder, target)
        report = with_card(read_adapter(folder, target).report, find_card(folder))
    except AdapterRefused as error:
        return Inspection(name, base, None, error.reasons)
    if surface is None:
        report = replace(report, parts=[], base_match="unnamed" if report.base_model is None else "unknown")
    return Inspection(name, base, report, [], _notes(plan, surface))


def surface_of_files(files: AdapterFolder, spec: AdapterSpec | None) -> ModelSurface:
    """A model on which the files' own tensors land, each where its name says."""
    keys = [split_key(raw) for raw in files.tensors]
    linears, embeddings = {}, {}
    tables = {key.module for key in keys if key.kind in ("embedding_a", "embedding_b")}
    for module, halves in pair_up(keys, files.tensors, []).items():
        a, b = halves.a, halves.b
        if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2:
            linears[module] = LinearSite(module, 0, 0)
        elif module in tables:
            embeddings[module] = EmbeddingSite(module, a.shape[1], b.shape[0])
        else:
            linears[module] = LinearSite(module, a.shape[1], b.shape[0])
    embeddings |= _tables_of_rows(keys, files, spec)
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": (site.out_features, site.in_features) for name, site in linears.items()
    }
    shapes |= {
        f"{key.module}.{'bias' if key.kind == 'bias' else 'weight'}": files.tensors[key.raw].shape
        for key in keys
        if key.kind in ("bias", "full")
    }
    return ModelSurface(
        model_name=(spec.base_model_name_or_path if spec else None) or "unknown",
        linears=linears,
        max_lora_rank=_ANY_RANK,
        lora_dtype=_common_dtype(files.tensors.values()),
        serves_dora=True,
        serves_bias=True,
        serves_embeddings=True,
        extra_vocab_size=_ANY_RANK,
        embeddings=embeddings,
        base_tensor=lambda name: torch.empty(shapes[name], device="meta") if name in shapes else None,
        base_tensor_names=list(shapes),
    )


def _tables_of_rows(
    keys: Sequence[TensorKey], files: AdapterFolder, spec: AdapterSpec | None
) -> dict[str, EmbeddingSite]:
    last = max((max(ids) for ids in spec.trainable_tokens.values()), default=0) if spec else 0
    rows = {key.module: files.tensors[key.raw].shape for key in keys if key.kind == "rows"}
    if "input_embeddings" in files.added_rows:
        rows["embed_tokens"] = files.added_rows["input_embeddings"].shape
    return {module: EmbeddingSite(module, last + 1, shape[-1]) for module, shape in rows.items() if len(shape) == 2}


def _common_dtype(places: Iterable[TensorPlace]) -> torch.dtype:
    names = Counter(place.dtype for place in places if place.dtype in FLOAT_DTYPES)
    return FLOAT_DTYPES[names.most_common(1)[0][0]] if names else torch.float32


def _spec_or_none(files: AdapterFolder) -> AdapterSpec | None:
    try:
        return parse_config(files.config)
    except AdapterRefused:
        return None


def _notes(plan: AdapterPlan, surface: ModelSurface | None) -> list[str]:
    notes = []
    if surface is None:
        notes.append("no base was given: whether the adapter fits one is not known (--base MODEL)")
    if plan.copies:
        names = ", ".join(sorted({copy.file_name for copy in plan.copies})[:5])
        notes.append(
            f"the files hold full weights of {names}; a server serves the adapter if they equal the base model's, which "
            "cannot be seen without its weights"
        )
    if surface is None:
        kinds = {
            "DoRA": any(pair.magnitude is not None for pair in plan.pairs.values()),
            "trained biases": bool(plan.biases),
            "LoRA on embeddings": bool(plan.embeddings),
            "trained or added tokens": bool(plan.rows),
        }
        held = [kind for kind, is_held in kinds.items() if is_held]
        if held:
            notes.append(f"the adapter has {', '.join(held)}, which a server may refuse for its base model")
    return notes
