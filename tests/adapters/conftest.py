"""The small model, its surface, and the reference adapter, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from adapters.surface import ModelSurface
from tests.adapters.world import make_llama, save_peft, surface_of


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture(scope="session")
def surface(llama: LlamaForCausalLM) -> ModelSurface:
    return surface_of(llama)


@pytest.fixture(scope="session")
def reference(llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 4, alpha 8, on q_proj and v_proj of both layers."""
    return save_peft(llama, tmp_path_factory.mktemp("reference") / "adapter")
