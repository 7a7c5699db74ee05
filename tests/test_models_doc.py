"""docs/models.md lists what the engine serves."""

from __future__ import annotations

import re
from pathlib import Path

from engine.architectures import ARCHITECTURES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"


def test_the_table_of_models_is_the_allow_list_with_its_media() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    expected = {
        name: ", ".join(["text", *sorted(architecture.modalities)]) for name, architecture in ARCHITECTURES.items()
    }
    assert dict(rows) == expected
