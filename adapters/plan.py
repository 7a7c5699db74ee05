"""Decides which tensor of an adapter lands on which layer of the running model, or why the adapter is refused.

Judges everything that names, shapes and the config show, without reading a number, so that a bad file is refused in
milliseconds. Every tensor lands on exactly one layer, or nothing is served. Called by `weights`, and alone for stored
adapters at start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from adapters.errors import AdapterRefused
from adapters.folder import AdapterFolder
from adapters.full_tensors import Extras, plan_extras
from adapters.keys import TensorKey, split_key
from adapters.landing import Halves, Piece, first_few, land, listed, pair_up, short_model_name
from adapters.mlx import as_peft_config, is_mlx_config
from adapters.pairs import Misfit, plan_embedding, plan_linear
from adapters.planned import AdapterPlan, PlannedBias, PlannedEmbedding, PlannedPair
from adapters.readme import MAX_HEADER_LEN, README_NAME, readme_base
from adapters.spec import AdapterSpec, OtherKind, declared_alphas, parse_spec
from adapters.surface import ModelSurface
from adapters.targets import target_warnings
from adapters.token_rows import refused_combinations

# Endings of a quantised copy's name; LoRA trained on the copy is meant for the model itself too.
_QUANTISED_ENDINGS = ("-unsloth-bnb-4bit", "-bnb-4bit", "-4bit", "-8bit", "-bf16", "-mlx")


def check_adapter(folder: Path, surface: ModelSurface) -> AdapterPlan:
    """Everything that `read_adapter` checks but the numbers; cheap. The plan's files are closed again."""
    with AdapterFolder(folder) as files:
        return plan_adapter(files, surface)


def plan_adapter(files: AdapterFolder, surface: ModelSurface) -> AdapterPlan:
    """Decide which tensor lands where; raises `AdapterRefused` with every reason found."""
    reasons: list[str] = []
    spec = _parse(files, reasons)
    keys = [split_key(raw) for raw in files.tensors]
    reasons += _foreign_tensors(keys, surface)
    served = [key for key in keys if surface.serves_embeddings or key.kind not in ("embedding_a", "embedding_b")]
    halves = pair_up(served, files.tensors, reasons)
    reasons += _dora_reasons(halves, spec, surface)
    landed = land(halves, surface, reasons)
    if spec is None:
        others = plan_extras(keys, files.tensors, files.added_rows, AdapterSpec(rank=1, alpha=1.0), surface)
        raise AdapterRefused(reasons + others.reasons)
    pairs, biases, embeddings, faults = _fit(spec, landed.pieces, surface, is_mlx=is_mlx_config(files.config))
    reasons += first_few(faults) + _rank_reasons([*pairs.values(), *embeddings.values()], surface)
    extras = plan_extras(keys, files.tensors, files.added_rows, spec, surface)
    reasons += extras.reasons
    reasons += first_few(refused_combinations(pairs, biases | extras.biases, embeddings, extras.rows, surface))
    if not (pairs or biases or embeddings or extras.biases or extras.rows or halves or reasons):
        reasons.append("the files hold no LoRA tensors")
    if reasons:
        raise AdapterRefused(list(dict.fromkeys(reasons)))
    names = {name: pair.file_name for name, pair in pairs.items()}
    targets = target_warnings(spec, names, [name for name in surface.linears if surface.is_targeted(name)])
    return AdapterPlan(
        spec,
        pairs,
        [*spec.warnings, *_base_warning(spec, surface), *_alpha_warning(spec, pairs), *extras.warnings, *targets],
        biases=dict(sorted((biases | extras.biases).items())),
        embeddings=embeddings,
        rows=dict(sorted(extras.rows.items())),
        copies=tuple(extras.copies),
        num_added_tokens=_num_added_tokens(extras, surface),
    )


def parse_config(config: object) -> AdapterSpec:
    """The config of a folder, PEFT's or mlx-lm's; raises `AdapterRefused`."""
    if not (isinstance(config, Mapping) and is_mlx_config(config)):
        return parse_spec(config)  # type: ignore[arg-type]
    return parse_spec(as_peft_config(config))


def _parse(files: AdapterFolder, reasons: list[str]) -> AdapterSpec | None:
    """The config, or None with its faults in `reasons`; raises where looking at the tensors would explain nothing."""
    try:
        spec = parse_config(files.config)
        if not spec.base_model_name_or_path:
            spec = replace(spec, base_model_name_or_path=readme_base(files.read_start(README_NAME, MAX_HEADER_LEN)))
        return spec
    except OtherKind:
        raise
    except AdapterRefused as error:
        reasons += error.reasons
        return None


def _foreign_tensors(keys: Sequence[TensorKey], surface: ModelSurface) -> list[str]:
    """Refusals for tensors of other methods and formats, one sentence a kind."""
    sentences = {
        "diag": "tensors of other LoRA variants (KaSA, AdaLoRA) are not served ({names}); train a plain LoRA",
        "kohya": (
            "tensors in the format of diffusion trainers (kohya, diffusers: lora_up, lora_down, alpha) are not served "
            "({names}); convert them to PEFT's names, with alpha in adapter_config.json"
        ),
        "mlx_vlm": (
            "tensors in the format of mlx-vlm (A and B) are not served ({names}); transpose them into PEFT's lora_A and "
            "lora_B, and set lora_alpha so that lora_alpha / r is the factor of training"
        ),
    }
    reasons = []
    for kind, sentence in sentences.items():
        names = [key.raw for key in keys if key.kind == kind]
        if names:
            reasons.append(sentence.format(names=listed(names)))
    names = [key.raw for key in keys if key.kind in ("embedding_a", "embedding_b")]
    if names and not surface.serves_embeddings:
        reasons.append(f"LoRA on embeddings is not served ({listed(names)}); leave embed_tokens out of target_modules")
    return reasons


def _dora_reasons(halves: Mapping[str, Halves], spec: AdapterSpec | None, surface: ModelSurface) -> list[str]:
    """DoRA is served whole or refused; leaving a magnitude out would serve another adapter."""
    with_magnitude = [module for module, one in halves.items() if one.magnitude is not None]
    is_declared = spec is not None and spec.use_dora
    restart = f"start the server with {surface.scale_shift_flag}, " if surface.scale_shift_flag else ""
    remedy = restart + "train with use_dora=False, or merge the adapter into the model"
    if with_magnitude and spec is not None and not spec.use_dora:
        return [
            f"DoRA adapters are not supported: the files hold magnitude vectors, though use_dora is false; {remedy}"
        ]
    if is_declared and not with_magnitude:
        return [
            f"DoRA adapters are not supported: use_dora is true, though the files hold no magnitude vectors; {remedy}"
        ]
    if with_magnitude and not surface.serves_dora:
        return [f"DoRA adapters are not supported (use_dora); {remedy}"]
    without = [module for module in halves if with_magnitude and module not in with_magnitude]
    if without:
        return [f"use_dora is true, but the magnitude vector is missing for {listed(without)}; save the adapter again"]
    return []


def _fit(
    spec: AdapterSpec, pieces: Mapping[str, list[Piece]], surface: ModelSurface, *, is_mlx: bool
) -> tuple[dict[str, PlannedPair], dict[str, PlannedBias], dict[str, PlannedEmbedding], list[str]]:
    """Pairs, biases and embeddings by layer name, sorted, and what does not fit."""
    pairs: dict[str, PlannedPair] = {}
    biases: dict[str, PlannedBias] = {}
    embeddings: dict[str, PlannedEmbedding] = {}
    faults = []
    for name in sorted(pieces):
        try:
            if name in surface.linears:
                pairs[name], bias = plan_linear(spec, surface.linears[name], pieces[name], surface)
                if bias is not None:
                    biases[name] = bias
            else:
                site = surface.embeddings[name]
                # mlx-lm's tied heads read the embedding with its LoRA; PEFT's do where the config ties them, and then
                # it mostly writes the head's pair out as well
                is_shared = (spec.ensure_weight_tying or is_mlx) and site.tied_head not in (None, *pieces)
                embeddings[name] = plan_embedding(spec, site, pieces[name][0], surface, also_head=is_shared)
        except Misfit as misfit:
            faults.append(str(misfit))
    return pairs, biases, embeddings, faults


def _rank_reasons(pairs: Sequence[PlannedPair | PlannedEmbedding], surface: ModelSurface) -> list[str]:
    rank = max((pair.rank for pair in pairs), default=0)
    if rank <= surface.max_lora_rank:
        return []
    return [
        f"the adapter's rank is {rank}, but this server has room for rank {surface.max_lora_rank}; start it with "
        f"--max-lora-rank {rank}"
    ]


def _num_added_tokens(extras: Extras, surface: ModelSurface) -> int:
    num_tokens = max((site.num_tokens for site in surface.embeddings.values()), default=0)
    last = max((max(rows.token_ids) for rows in extras.rows.values()), default=-1)
    return max(0, last + 1 - num_tokens)


def _alpha_warning(spec: AdapterSpec, pairs: Mapping[str, PlannedPair]) -> list[str]:
    """Overlapping entries of `alpha_pattern`: the tensors show which rank was trained, but not which alpha."""
    unclear = [name for name, pair in pairs.items() if len(set(declared_alphas(spec, pair.file_name, name))) > 1]
    if not unclear:
        return []
    return [
        f"several entries of alpha_pattern match {listed(unclear)}; the first in the file counts, as it does in PEFT, but "
        "PEFT sorts them when it saves: check the scale, or leave only the entry that was meant"
    ]


def base_match(spec: AdapterSpec, model_name: str) -> str:
    """How the base that the config names relates to the served one: `same`, `other` or `unnamed`."""
    declared = short_model_name(spec.base_model_name_or_path)
    if declared is None:
        return "unnamed"
    return "same" if _plain_name(declared) == _plain_name(model_name) else "other"


def _base_warning(spec: AdapterSpec, surface: ModelSurface) -> list[str]:
    if base_match(spec, surface.model_name) != "other":
        return []
    declared, served = short_model_name(spec.base_model_name_or_path), short_model_name(surface.model_name)
    return [f"the adapter was trained on {declared!r}, and is served on {served!r}; all its shapes fit"]


def _plain_name(name: str) -> str:
    """The last level of a model's name, without the endings of its quantised copies."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
    return next((last.removesuffix(ending) for ending in _QUANTISED_ENDINGS if last.endswith(ending)), last)
