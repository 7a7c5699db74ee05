"""docs/api.md lists the formats of calls that are read, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from engine.tools.template import FORMATS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_format_has_its_row() -> None:
    rows = TEXT.split("| `format` | models |")[1].split("\n\n")[0].splitlines()[2:]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert sorted(names) == sorted(each.name for each in FORMATS)
