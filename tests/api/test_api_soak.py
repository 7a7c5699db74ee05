"""Some seconds of what `make soak` does for half an hour, each kind of work twice at least."""

from __future__ import annotations

import pytest

from tests.soak import soak


@pytest.mark.timeout(900)
def test_mixed_work_leaves_nothing_behind_and_fails_where_it_should_alone() -> None:
    result = soak(5)
    assert result.faults == []
    kinds = {kind for kind, _ in result.statuses}
    assert {
        "chat", "stream", "slow", "audio", "complete", "json", "leave", "bad", "bad upload", "load", "other", "look",
        "try upload", "upload", "pin", "own", "fetch", "delete", "transcribe",
    } <= kinds, result.statuses  # fmt: skip
    assert result.num_ended["chat"] and result.num_ended["completions"]
