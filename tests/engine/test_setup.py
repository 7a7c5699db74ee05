"""What is done once when a program starts."""

from __future__ import annotations

import gc

from engine.setup import freeze_startup_objects


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
