"""The import order of the packages holds, outer libraries stay where they belong, and the core needs few packages."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Each imports only what stands to its left, and itself.
ORDER = ("kernels", "adapters", "engine", "api", "ui", "app", "deploy")
# Programs: they start the packages, as app.py does, and nothing imports them.
PROGRAMS = ("adapters.__main__", "engine.__main__", "engine.parallel.worker")
# Who may import a library. A file's module name must equal one of these or lie below it.
CONFINED = {
    # ui.app puts the page on the server's application, sharing a route beside the server's own
    "fastapi": {"api", "app", "ui.app", "deploy.replicas.sharing"},
    "ray": {"deploy"},
    "uvicorn": {"api", "app"},
    "gradio": {"ui", "app"},
    "transformers": {
        f"engine.{name}"
        for name in (
            "architectures",
            "attention",
            "encoders",
            "model",
            "parallel.loading",
            "positions",
            "prompt",
            "quantization",
            "tokenizer",
        )
    },
    "peft": set(),
    "openai": set(),
    "pytest": set(),
}
KERNEL_IMPORTS = {"kernels", "torch", "triton", *sys.stdlib_module_names}
CORE_DISTRIBUTIONS = ("torch", "transformers", "safetensors", "numpy")


def source_files() -> Iterator[tuple[str, Path]]:
    """Module name and path of each file of the layers."""
    for layer in ORDER:
        for path in sorted((ROOT / layer).rglob("*.py")):
            yield module_name(path), path
    yield "app", ROOT / "app.py"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Full names of the modules that a file imports anywhere in it, relative ones resolved."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            parents = parts[: len(parts) - node.level + 1] if node.level else []
            names.add(".".join([*parents, *([node.module] if node.module else [])]))
    return names


def upward_imports(module: str, imported: set[str]) -> set[str]:
    """The imports that break the order."""
    layer = len(ORDER) - 1 if module in PROGRAMS else ORDER.index(module.split(".")[0])
    return {name for name in imported if name.split(".")[0] in ORDER[layer + 1 :]}


def strayed_imports(module: str, imported: set[str]) -> set[str]:
    """The imports of libraries that this module may not import."""
    strayed = set()
    for name in imported:
        owners = CONFINED.get(name.split(".")[0])
        if owners is not None and not any(module == owner or module.startswith(f"{owner}.") for owner in owners):
            strayed.add(name)
    return strayed


IMPORTS = {
    module: imports_of(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
    for module, path in source_files()
    if path.exists()
}


@pytest.mark.parametrize("module", IMPORTS)
def test_a_file_imports_only_what_stands_to_its_left(module: str) -> None:
    assert upward_imports(module, IMPORTS[module]) == set()


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_imports_a_program(program: str) -> None:
    assert program in IMPORTS
    assert [module for module, names in IMPORTS.items() if program in names] == []


@pytest.mark.parametrize("module", IMPORTS)
def test_libraries_stay_where_they_belong(module: str) -> None:
    assert strayed_imports(module, IMPORTS[module]) == set()


@pytest.mark.parametrize("module", [module for module in IMPORTS if module.split(".")[0] == "kernels"])
def test_kernels_know_torch_and_triton_alone(module: str) -> None:
    assert {name for name in IMPORTS[module] if name.split(".")[0] not in KERNEL_IMPORTS} == set()


def test_the_rules_find_what_they_forbid() -> None:
    source = "def f():\n    import gradio as gr\n    from api.app import create_app\n    from . import tuning\n"
    imported = imports_of(source, "engine.loop")
    assert imported == {"gradio", "api.app", "engine"}
    assert upward_imports("engine.loop", imported) == {"api.app"}
    assert strayed_imports("engine.loop", imported) == {"gradio"}
    assert strayed_imports("engine.loop", {"transformers.models"}) == {"transformers.models"}
    assert strayed_imports("engine.model", {"transformers.models"}) == set()
    assert imports_of("from .tuning import x", "kernels", is_package=True) == {"kernels.tuning"}
    assert upward_imports("kernels.lora", {"adapters.spec"}) == {"adapters.spec"}


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
