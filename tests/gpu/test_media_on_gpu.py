"""Models that take media on a CUDA device, compiled and with recorded graphs: equal to transformers and PEFT on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("PIL")

from tests.engine.test_media_parity import World, check_mixed_batch
from tests.media_models import HAS_OMNI, MEDIA_MODELS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("architecture", MEDIA_MODELS if HAS_OMNI else MEDIA_MODELS[:-1])
def test_mixed_adapters_and_media_in_one_batch_equal_peft(architecture: str, tmp_path: Path) -> None:
    world = World(architecture, tmp_path, device="cuda", dtype="float32")
    try:
        check_mixed_batch(world)
    finally:
        world.engine.close()
