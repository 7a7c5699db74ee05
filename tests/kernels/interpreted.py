"""Runs kernels on the CPU by Triton's interpreter, in a process of its own: Triton decides at import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(*words: str) -> str:
    """Run Python with these words and kernels interpreted; returns what it prints, and fails with its errors."""
    result = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def call_interpreted(module: str, function: str) -> str:
    """Call a function without arguments of a module under the interpreter; returns what it prints."""
    return run_interpreted("-c", f"from {module} import {function}; {function}()")
