"""What the empty conversation offers: sample clips that ship with the app, a prompt for each text adapter, one for the base.

Owns the choice of examples; they are only offered where the running model and its adapters can answer them. Called by
`ui/chat`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from engine.config import EMBEDDED_ASSETS
from engine.routing import AUTO, NONE
from ui.text import Texts

MAX_CLIPS = 3
PROMPTS = {
    "sql": (
        "Write a SQL query to answer the question based on the table schema.\n\n"
        " context: CREATE TABLE table_name_74 (icao VARCHAR, airport VARCHAR)\n\n"
        " question: Name the ICAO for lilongwe international airport"
    ),
    "pirate": "What is the opposite of hot?",
}


@dataclass(frozen=True)
class Example:
    """One card: what it shows, what it sends, and with which adapter (`auto`, `none` or a name).

    `said` is what is said in the recording, if it is known.
    """

    label: str
    text: str
    audio: Path | None
    lora: str
    said: str = ""


def find_examples(
    text: Texts, *, takes_audio: bool, adapters: Collection[str], folder: Path = EMBEDDED_ASSETS / "audio"
) -> list[Example]:
    """The cards for this model and these adapters."""
    clips = _clips(text, folder) if takes_audio else []
    prompts = [
        Example(text(f"example.{name}"), prompt, None, name) for name, prompt in PROMPTS.items() if name in adapters
    ]
    story = [Example(text("example.base"), text("example.base_prompt"), None, NONE)] if clips or prompts else []
    return clips + prompts + story


def _clips(text: Texts, folder: Path) -> list[Example]:
    """The manifest's examples, else its first clips."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        return []
    loaded = json.loads(manifest.read_text(encoding="utf-8"))
    entries = loaded["clips"] if isinstance(loaded, dict) else loaded
    chosen = [entry for entry in entries if entry.get("example")] or entries
    return [
        Example(
            text("example.clip", title=Path(entry["file"]).stem.replace("-", " ")),
            "",
            folder / entry["file"],
            AUTO,
            said=entry.get("text", ""),
        )
        for entry in chosen[:MAX_CLIPS]
    ]
