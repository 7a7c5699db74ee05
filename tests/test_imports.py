"""The core imports where few packages are, and our folders are taken for nobody else's: seen in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.test_layering import IMPORTS, ROOT

CORE_DISTRIBUTIONS = ("torch", "transformers", "safetensors", "numpy")

# Runs in its own process: hides each installed package that the core packages do not need, then imports.
BARE = """
import importlib, importlib.metadata, json, pkgutil, re, sys
from importlib.machinery import PathFinder

def closure(names):
    todo, seen = list(names), set()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        seen.add(name)
        # Extras are options, which a bare machine does not have.
        todo += [re.match(r"[\\w.-]+", text)[0] for text in requires if "extra ==" not in text]
    return seen

core = closure(json.loads(sys.argv[1]))
hidden = {
    package
    for package, owners in importlib.metadata.packages_distributions().items()
    if not any(re.sub(r"[-_.]+", "-", owner).lower() in core for owner in owners)
} - {"kernels"}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(f"{name}: {error}")
"""


def missing_on_a_bare_machine(*modules: str) -> dict[str, str]:
    """What does not import in a fresh process that has torch, transformers, safetensors, numpy and what these need."""
    words = [sys.executable, "-c", BARE, json.dumps(CORE_DISTRIBUTIONS), json.dumps(modules)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    return dict(line.split(": ", 1) for line in result.stdout.splitlines())


def test_the_core_imports_on_a_machine_with_torch_and_transformers_alone() -> None:
    modules = [module for module in IMPORTS if module.split(".")[0] in ("kernels", "adapters", "engine")]
    assert len(modules) > 20
    assert missing_on_a_bare_machine(*modules) == {}


def test_the_bare_machine_of_these_tests_lacks_other_packages() -> None:
    others = ("fastapi", "gradio", "soundfile", "av", "librosa", "peft", "api.app")
    missing = missing_on_a_bare_machine(*others, "safetensors")
    assert set(missing) == set(others)
    assert missing["gradio"] == "No module named 'gradio'"


def test_transformers_does_not_take_our_kernels_folder_for_the_package_of_that_name() -> None:
    script = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
config = LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
logits = LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits
assert logits.shape == (1, 3, 31) and logits.isfinite().all()
assert not is_kernels_available()
import kernels
print(kernels.__file__)
"""
    words = [sys.executable, "-c", script]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == ROOT / "kernels" / "__init__.py"


def has_triton_without(module: str) -> subprocess.CompletedProcess[str]:
    """Prints whether the kernels have Triton, in a fresh process where a module cannot be imported."""
    script = f"import sys; sys.modules[{module!r}] = None; import kernels; print(kernels.HAS_TRITON)"
    words = [sys.executable, "-c", script]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_kernels_do_without_triton_only_where_triton_is_what_is_missing() -> None:
    assert has_triton_without("nothing").stdout == "True\n"
    assert has_triton_without("triton").stdout == "False\n"
    for module in ("kernels.lora_embedding", "kernels.paged_attention"):
        result = has_triton_without(module)
        assert result.returncode != 0 and module in result.stderr, result.stdout
