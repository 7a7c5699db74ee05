"""docs/api.md lists the fields and formats of transcriptions that the route takes, and no others."""

from __future__ import annotations

import re
from pathlib import Path

from api.transcriptions import FORMATS, STREAMED_FORMATS, known_fields

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## Transcriptions")[1].split("\n## ")[0]


def first_cells(heading: str) -> list[str]:
    """Names in the first column of the table whose headings begin with `heading`."""
    rows = SECTION.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_every_field_has_its_row() -> None:
    assert len(known_fields()) > 15
    assert sorted(first_cells("field")) == sorted(known_fields())


def test_every_format_has_its_row() -> None:
    assert first_cells("`response_format` | answer") == list(FORMATS)
    row = next(line for line in SECTION.splitlines() if line.startswith("| `stream` |"))
    assert re.findall(r"`([^`]+)`", row.split("|")[2]) == list(STREAMED_FORMATS)
