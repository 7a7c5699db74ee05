"""Decides which tensor of an adapter lands on which layer of the running model, or why the adapter is refused.

Judges everything that names, shapes and the config show, without reading a number, so that a bad file is refused in
milliseconds. Every tensor lands on exactly one layer, or nothing is served. Called by `weights`, and alone for stored
adapters at start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from adapters.errors import AdapterRefused
from adapters.folder import AdapterFolder
from adapters.keys import KeyResolver, TensorKey, split_key
from adapters.places import TensorPlace
from adapters.planned import AdapterPlan, PlannedPair
from adapters.spec import AdapterSpec, OtherKind, declared_rank, parse_spec, scale_for
from adapters.surface import LinearSite, ModelSurface
from adapters.targets import target_warnings
from adapters.tensor_file import FLOAT_DTYPES

MAX_LISTED = 5
FULL_REMEDY = "merge the adapter into the model and serve that as the base, or train without it"


def check_adapter(folder: Path, surface: ModelSurface) -> AdapterPlan:
    """Everything that `read_adapter` checks but the numbers; cheap. The plan's files are closed again."""
    with AdapterFolder(folder) as files:
        return plan_adapter(files, surface)


def plan_adapter(files: AdapterFolder, surface: ModelSurface) -> AdapterPlan:
    """Decide which tensor lands where; raises `AdapterRefused` with every reason found."""
    reasons: list[str] = []
    spec = _parse(files, reasons)
    keys = [split_key(raw) for raw in files.tensors]
    reasons += _foreign_tensors(keys, spec)
    halves = _pair_up(keys, files.tensors, reasons)
    landed = _land(halves, surface, reasons)
    if spec is None:
        raise AdapterRefused(reasons)
    outcomes = {name: _plan_pair(spec, surface.linears[name], *landed[name], surface) for name in sorted(landed)}
    pairs = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, PlannedPair)}
    reasons += _first([outcome for outcome in outcomes.values() if isinstance(outcome, str)])
    reasons += _rank_reasons(pairs, surface)
    if not halves and not reasons:
        reasons.append("the files hold no LoRA tensors")
    if reasons:
        raise AdapterRefused(reasons)
    warnings = [*spec.warnings, *_base_warning(spec, surface)]
    names = {name: pair.file_name for name, pair in pairs.items()}
    warnings += target_warnings(spec, names, [name for name in surface.linears if surface.is_targeted(name)])
    return AdapterPlan(spec, pairs, warnings)


_Halves = dict[str, TensorPlace]


def _parse(files: AdapterFolder, reasons: list[str]) -> AdapterSpec | None:
    """The config, or None with its faults in `reasons`; raises where looking at the tensors would explain nothing."""
    try:
        return parse_spec(files.config)
    except OtherKind:
        raise
    except AdapterRefused as error:
        reasons += error.reasons
        return None


def _foreign_tensors(keys: Sequence[TensorKey], spec: AdapterSpec | None) -> list[str]:
    """Refusals for tensors that are no LoRA halves, one sentence a kind."""
    by_kind: dict[str, list[TensorKey]] = {}
    for key in keys:
        by_kind.setdefault(key.kind, []).append(key)
    reasons = []
    has_magnitude = "magnitude" in by_kind
    if has_magnitude or (spec is not None and spec.use_dora):
        reasons.append(_dora_reason(has_magnitude, spec))
    sentences = {
        "bias": "trained bias vectors are not served ({names}); train with bias='none' and lora_bias=False",
        "embedding": "LoRA on embeddings is not served ({names}); leave embed_tokens out of target_modules",
        "token": "trained token embeddings are not served ({names}); train without trainable_token_indices",
        "diag": "tensors of other LoRA variants (KaSA, AdaLoRA) are not served ({names}); train a plain LoRA",
        "full": f"full weight matrices (modules_to_save or saved embeddings) are not served ({{names}}); {FULL_REMEDY}",
        "other": "tensors of unknown meaning ({names}); only lora_A and lora_B weights are served",
    }
    for kind, sentence in sentences.items():
        if kind in by_kind:
            reasons.append(sentence.format(names=_listed([key.raw for key in by_kind[kind]])))
    return reasons


def _dora_reason(has_magnitude: bool, spec: AdapterSpec | None) -> str:
    remedy = "train with use_dora=False, or merge the adapter into the model"
    if has_magnitude and spec is not None and not spec.use_dora:
        return f"DoRA adapters are not supported: the files hold magnitude vectors, though use_dora is false; {remedy}"
    if not has_magnitude:
        return (
            f"DoRA adapters are not supported: use_dora is true, though the files hold no magnitude vectors; {remedy}"
        )
    return f"DoRA adapters are not supported (use_dora); {remedy}"


def _pair_up(keys: Sequence[TensorKey], tensors: Mapping[str, TensorPlace], reasons: list[str]) -> dict[str, _Halves]:
    """File module name -> its A and B. Refuses missing halves, doubles, and files that hold several adapters."""
    lora_keys = [key for key in keys if key.kind in ("A", "B")]
    adapters = sorted({key.adapter for key in lora_keys if key.adapter is not None})
    if len(adapters) > 1:
        reasons.append(f"the files hold several adapters ({_listed(adapters)}); save each one into a folder of its own")
        return {}
    halves: dict[str, _Halves] = {}
    doubles = []
    for key in lora_keys:
        pair = halves.setdefault(key.module, {})
        if key.kind in pair:
            doubles.append(key.raw)
        pair[key.kind] = tensors[key.raw]
    if doubles:
        reasons.append(f"these tensors occur twice under different names: {_listed(doubles)}")
    for kind in ("A", "B"):
        missing = [module for module, pair in halves.items() if kind not in pair]
        if missing:
            reasons.append(
                f"lora_{kind} is missing for {_listed(missing)}; the checkpoint is incomplete, save it again"
            )
    return halves


def _land(
    halves: Mapping[str, _Halves], surface: ModelSurface, reasons: list[str]
) -> dict[str, tuple[str, TensorPlace, TensorPlace]]:
    """Layer name -> (name in the files, A, B) for whole pairs; every pair that has no layer becomes a reason."""
    resolver = KeyResolver(surface)
    landed: dict[str, tuple[str, TensorPlace, TensorPlace]] = {}
    unmatched, filtered, ambiguous, doubles = [], [], [], []
    unsupported: dict[str, list[str]] = {}
    for module, pair in halves.items():
        landing = resolver.resolve(module)
        name, why = landing.name, resolver.why_unsupported(module)
        if name is not None and name in surface.linears and why is None:
            if not surface.is_targeted(name):
                filtered.append(module)
            elif name in landed:
                doubles.append(f"{landed[name][0]} and {module}")
            elif len(pair) == 2:
                landed[name] = (module, pair["A"], pair["B"])
        elif why is not None:
            unsupported.setdefault(why, []).append(module)
        elif landing.candidates:
            ambiguous.append(f"{module} ({' or '.join(landing.candidates[:3])})")
        else:
            unmatched.append(module)
    model = short_model_name(surface.model_name)
    total = len(halves)
    num_lost = len(unmatched) + len(filtered) + len(ambiguous) + len(doubles) + sum(map(len, unsupported.values()))
    count = f"matched {total - num_lost} of {total} tensor pairs"
    if num_lost and num_lost == total:
        count = f"the adapter changes 0 modules of this model ({count})"
    if unmatched:
        reasons.append(
            f"{count}: the model {model!r} has no layer for {_listed(unmatched)}; was it trained on another base model?"
        )
    if filtered:
        allowed = ", ".join(surface.target_suffixes)
        reasons.append(
            f"{count}: this server takes LoRA on {allowed} only (--lora-target-modules), but the adapter also has "
            f"{_listed(filtered)}"
        )
    for why, modules in unsupported.items():
        reasons.append(f"{count}: LoRA on {_listed(modules)} is not served: {why}")
    if ambiguous:
        reasons.append(
            f"{count}: these names fit more than one layer: {_listed(ambiguous)}; rename the tensors in full"
        )
    if doubles:
        reasons.append(f"{count}: two names lead to one layer: {_listed(doubles)}")
    return landed


def _plan_pair(
    spec: AdapterSpec, site: LinearSite, file_name: str, a: TensorPlace, b: TensorPlace, surface: ModelSurface
) -> PlannedPair | str:
    """One pair if it fits its layer, else the sentence that says why not."""
    a_shape, b_shape = a.shape, b.shape
    both = f"{file_name}: lora_A {list(a_shape)} and lora_B {list(b_shape)}"
    for half in (a, b):
        if 0 in half.shape:
            return (
                f"tensor {half.name} is empty ({list(half.shape)}); the checkpoint was probably saved from "
                "a sharded trainer (ZeRO-3, FSDP) without gathering the weights, save it again"
            )
        if half.dtype not in FLOAT_DTYPES:
            return f"tensor {half.name} is {half.dtype}; save it as one of {', '.join(FLOAT_DTYPES)}"
    if len(a_shape) != 2 or len(b_shape) != 2:
        return f"{both} must have two dimensions each"
    rank = a_shape[0]
    if b_shape[1] != rank:
        return f"{both} disagree about the rank: {rank} and {b_shape[1]}"
    if a_shape[1] != site.in_features or b_shape[0] != site.out_features:
        return (
            f"{both} do not fit the model {short_model_name(surface.model_name)!r}, which needs "
            f"[{rank}, {site.in_features}] and [{site.out_features}, {rank}] there{_trained_on(spec)}"
        )
    declared = declared_rank(spec, file_name, site.name)
    if declared != rank:
        return f"{both} have rank {rank}, but adapter_config.json gives rank {declared} (r or rank_pattern)"
    return PlannedPair(site, file_name, a, b, rank, scale_for(spec, file_name, rank, site.name))


def _rank_reasons(pairs: Mapping[str, PlannedPair], surface: ModelSurface) -> list[str]:
    rank = max((pair.rank for pair in pairs.values()), default=0)
    if rank <= surface.max_lora_rank:
        return []
    return [
        f"the adapter's rank is {rank}, but this server has room for rank {surface.max_lora_rank}; start it with "
        f"--max-lora-rank {rank}"
    ]


def _base_warning(spec: AdapterSpec, surface: ModelSurface) -> list[str]:
    declared = short_model_name(spec.base_model_name_or_path)
    if declared is None or _last_level(declared) == _last_level(surface.model_name):
        return []
    served = short_model_name(surface.model_name)
    return [f"the adapter was trained on {declared!r}, and is served on {served!r}; all its shapes fit"]


def _trained_on(spec: AdapterSpec) -> str:
    declared = short_model_name(spec.base_model_name_or_path)
    return f"; the adapter says that it was trained on {declared!r}" if declared else ""


def short_model_name(name: str | None) -> str | None:
    """A base model's name as it may be shown: `owner/name` as it is, a path without its folders."""
    if not name:
        return None
    levels = [level for level in name.replace("\\", "/").split("/") if level]
    is_hub_id = len(levels) <= 2 and not name.startswith(("/", ".", "~"))
    return "/".join(levels if is_hub_id else levels[-1:])[:120] or None


def _last_level(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(name[:200] for name in names[:MAX_LISTED]) + more


def _first(faults: list[str], limit: int = 3) -> list[str]:
    """The first of the faults that tend to repeat for every module, and how many more there are."""
    return [*faults[:limit], f"{len(faults) - limit} more modules have such faults"] if len(faults) > limit else faults
