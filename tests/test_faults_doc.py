"""docs/faults.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    line for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
]


def test_each_fault_has_a_test_of_that_name() -> None:
    _, *faults = ROWS
    assert len(faults) > 10
    for row in faults:
        path, name = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)` \|$", row)[0]
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), row
