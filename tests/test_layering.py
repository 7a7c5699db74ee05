"""The import order of the packages holds, and outer libraries stay where they belong: what the sources say of it."""

from __future__ import annotations

import ast
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
