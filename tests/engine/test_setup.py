"""What is done once when a program starts."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import setup
from engine.config import EngineConfig
from engine.setup import freeze_startup_objects, has_graphs, make_graphs


def test_the_collector_leaves_out_what_was_there_at_the_start_and_still_frees_what_comes_later() -> None:
    class Ring:
        """Refers to itself, so that only the collector can free it."""

        def __init__(self) -> None:
            self.me = self

    gc.collect()
    num_before = len(gc.get_objects())
    try:
        freeze_startup_objects()
        assert gc.get_freeze_count() >= num_before * 0.9 and len(gc.get_objects()) < num_before * 0.1
        for _ in range(10):
            Ring()
        assert gc.collect() >= 10
    finally:
        gc.unfreeze()


def base_on(device: str, head_dim: int = 64, quantization: Any = None) -> Any:
    """A base model as far as the choice of graphs looks at it."""
    return SimpleNamespace(
        device=torch.device(device), quantization=quantization, kv_shape=SimpleNamespace(head_dim=head_dim)
    )


def test_a_gpu_that_runs_launch_by_launch_unasked_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reason(base: Any, **settings: Any) -> str | None:
        """What a start logs; None where steps are recorded."""
        config = EngineConfig(model="none", **settings)
        if has_graphs(config, base):
            return None
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert make_graphs(config, base, None, {}, None, max_num_seqs=1, max_model_len=1) is None  # type: ignore[arg-type]
        return "".join(caplog.messages)

    not_recorded = SimpleNamespace(method="int8-dynamic", can_be_recorded=False)
    monkeypatch.setattr(setup, "HAS_TRITON", True)
    assert reason(base_on("cuda")) is None
    assert reason(base_on("cpu")) == reason(base_on("cuda"), enforce_eager=True) == ""
    assert "layers of int8-dynamic" in str(reason(base_on("cuda", quantization=not_recorded)))
    assert "heads of 4096" in str(reason(base_on("cuda", head_dim=4096)))
    monkeypatch.setattr(setup, "HAS_TRITON", False)
    assert "triton cannot be imported" in str(reason(base_on("cuda")))
