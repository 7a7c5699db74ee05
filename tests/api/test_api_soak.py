"""A quarter of a minute of what `make soak` does for half an hour."""

from __future__ import annotations

import pytest

from tests.soak import soak


@pytest.mark.timeout(180)
def test_mixed_work_leaves_nothing_behind_and_fails_where_it_should_alone() -> None:
    result = soak(15)
    assert result.faults == []
    kinds = {kind for kind, _ in result.statuses}
    assert {"chat", "stream", "audio", "leave", "json", "bad", "load", "own", "unload"} <= kinds, result.statuses
