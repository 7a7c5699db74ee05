"""Compares `target_modules` of a config with the tensors that the files hold. Tensors decide; differences are reported.

Which modules a config means follows PEFT's `check_target_module_exists` (0.21). Called by `weights`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping

from adapters.patterns import UnsafePattern, compile_pattern
from adapters.spec import AdapterSpec

ALL_LINEAR = "all-linear"
TIME_LIMIT_S = 0.5


def target_warnings(spec: AdapterSpec, file_names: Mapping[str, str], linears: Collection[str]) -> list[str]:
    """Sentences about modules that the config names without tensors, and the other way round.

    `file_names` maps each touched layer of the model to its name in the files; `linears` are all layers of the model
    that can carry LoRA.
    """
    if spec.target_modules is None or spec.target_modules == ALL_LINEAR:
        return []
    try:
        is_target = _Targets(spec)
    except UnsafePattern as error:
        return [f"target_modules {error}, so it was not compared with the tensors"]
    deadline = time.monotonic() + TIME_LIMIT_S
    unnamed, empty = [], []
    for name in linears:
        if time.monotonic() > deadline:
            return ["target_modules takes too long to match, so it was not compared with the tensors"]
        is_named = is_target(name) or (name in file_names and is_target(file_names[name]))
        if is_named and name not in file_names:
            empty.append(name)
        elif not is_named and name in file_names:
            unnamed.append(name)
    warnings = []
    if empty:
        warnings.append(
            f"target_modules names {len(empty)} modules that the files hold no tensors for ({_list(empty)}); "
            "they are served unchanged"
        )
    if unnamed:
        warnings.append(
            f"the files hold tensors for {len(unnamed)} modules that target_modules does not name ({_list(unnamed)})"
        )
    return warnings


class _Targets:
    """Whether PEFT would put LoRA on a module with this config."""

    def __init__(self, spec: AdapterSpec) -> None:
        self._is_named = _matcher(spec.target_modules or ())
        self._is_excluded = _matcher(spec.exclude_modules or ())
        self._layers = spec.layers_to_transform
        self._layer_patterns = (
            [
                compile_pattern(pattern, prefix=r"(?:^|.*?\.)", suffix=r"\.(?P<idx>\d+)\.")
                for pattern in spec.layers_pattern
            ]
            if spec.layers_pattern
            else [re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")]
        )

    def __call__(self, name: str) -> bool:
        if self._is_excluded(name) or not self._is_named(name):
            return False
        if self._layers is None:
            return True
        matches = (pattern.match(name) for pattern in self._layer_patterns)
        match = next((match for match in matches if match is not None), None)
        return match is not None and int(match["idx"]) in self._layers


def _matcher(names: tuple[str, ...] | str) -> Callable[[str], bool]:
    if isinstance(names, str):
        pattern = compile_pattern(names)
        return lambda name: pattern.fullmatch(name) is not None
    exact, suffixes = set(names), tuple("." + name for name in names)
    return lambda name: name in exact or name.endswith(suffixes)


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
