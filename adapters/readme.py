"""The YAML header of an adapter's `README.md`, as the Hugging Face hub has it: what it says of base, licence and use.

Stands in where an adapter has no `adapter_card.json`. Whoever wrote it is a stranger and wrote it for another program: what is
understood and within the card's bounds is taken, the rest is left, and nothing in it ever refuses an adapter. Called by
`reader`, `intake`, `inspection` and `plan`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from adapters.card import (
    MAX_EXAMPLES,
    MAX_LICENSE_LEN,
    AdapterCard,
    CardExample,
    CardFault,
    example_of,
    number_field,
    read_card,
    text_field,
)
from adapters.folder import read_start

log = logging.getLogger(__name__)

README_NAME = "README.md"
MAX_HEADER_LEN = 32 << 10
"""Bytes of the file that are looked at; a header that does not end in them counts as none."""
MAX_OPEN_BRACKETS = 20
MAX_BASE_LEN = 200
_NOTHING = ("", "~", "null", "none")

T = TypeVar("T")


def find_card(folder: Path, *, allowed_roots: Sequence[Path] | None = None) -> AdapterCard | None:
    """The card of a folder: its `adapter_card.json`, else what its README says; None where neither says anything.

    Raises `AdapterRefused` for an `adapter_card.json` that is not understood.
    """
    card = read_card(folder, allowed_roots=allowed_roots)
    return card or readme_card(read_start(folder, README_NAME, MAX_HEADER_LEN, allowed_roots))


def readme_card(start: bytes) -> AdapterCard | None:
    """The card in the beginning of a README; None where it says nothing that a card holds."""
    header = parse_header(start)
    sampling = _sampling(header)
    card = AdapterCard(
        license=_license(header),
        temperature=sampling("temperature"),
        top_p=sampling("top_p"),
        max_tokens=None if (limit := sampling("max_tokens")) is None else int(limit),
        examples=_examples(header.get("widget")),
    )
    return None if card == AdapterCard() else card


def readme_base(start: bytes) -> str | None:
    """The base model that the beginning of a README names, where it names one."""
    named = _listed(parse_header(start).get("base_model"))
    return _words({"base_model": named[0]}, "base_model", MAX_BASE_LEN) or None if len(named) == 1 else None


def parse_header(start: bytes) -> Mapping[str, Any]:
    """The fields of the header, all scalars as text; empty where there is none that can be read."""
    import yaml

    class Loader(yaml.BaseLoader):  # type: ignore[misc,unused-ignore]
        """Makes text, lists and dictionaries alone, and follows no alias: a few of them can stand for any number of items."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not read")
            return super().compose_node(parent, index)

        def fetch_flow_collection_start(self, token_class: Any) -> None:
            """Looks further ahead the more brackets are open, at a cost that grows with their square."""
            if self.flow_level >= MAX_OPEN_BRACKETS:
                raise yaml.YAMLError("too many brackets are open")
            super().fetch_flow_collection_start(token_class)

    lines = start.decode("utf-8-sig", "replace").splitlines()
    ends = [place for place, line in enumerate(lines[1:], 1) if line.rstrip() in ("---", "...")]
    if not ends or lines[0].rstrip() != "---":
        return {}
    try:
        header = yaml.load("\n".join(lines[1 : ends[0]]), Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        log.info("event=readme_not_understood reason=%r", type(error).__name__)
        return {}
    return header if isinstance(header, dict) else {}


def _license(header: Mapping[str, Any]) -> str:
    """The licence's name; `other` is told by its own."""
    name = ", ".join(_listed(header.get("license")))
    if name.lower() == "other":
        name = ", ".join(_listed(header.get("license_name"))) or name
    return _words({"license": name}, "license", MAX_LICENSE_LEN)


def _listed(value: Any) -> list[str]:
    """One text or several."""
    items = value if isinstance(value, list) else [value]
    return [item.strip() for item in items if isinstance(item, str) and item.strip().lower() not in _NOTHING]


def _sampling(header: Mapping[str, Any]) -> Callable[[str], float | None]:
    inference = header.get("inference")
    given = inference.get("parameters") if isinstance(inference, dict) else None
    given = given if isinstance(given, dict) else {}
    given = {**given, "max_tokens": given.get("max_new_tokens")}

    def read(name: str) -> float | None:
        try:
            value = float(given.get(name) or "")
        except (TypeError, ValueError):
            return None
        return _kept(lambda: number_field({name: value}, name), None)

    return read


def _examples(widget: Any) -> tuple[CardExample, ...]:
    """Prompts of the hub's widget: `text`, or the one message of a user. Those that need a file are left."""
    examples: list[CardExample] = []
    for item in widget if isinstance(widget, list) else []:
        if not isinstance(item, dict) or "src" in item or len(examples) == MAX_EXAMPLES:
            continue
        prompt = item.get("text")
        if isinstance(item.get("messages"), list):
            turns = [turn for turn in item["messages"] if isinstance(turn, dict) and turn.get("role") == "user"]
            prompt = turns[0].get("content") if len(turns) == 1 else None
        example = _example({"title": item.get("example_title", ""), "prompt": prompt}) or _example(prompt)
        examples += [] if example is None else [example]
    return tuple(examples)


def _example(loaded: Any) -> CardExample | None:
    return _kept(lambda: example_of(loaded, "widget"), None)


def _words(fields: Mapping[str, str], name: str, max_len: int) -> str:
    return _kept(lambda: text_field(fields, name, "", max_len), "")


def _kept(read: Callable[[], T], otherwise: T) -> T:
    """What `read` gives, or `otherwise` where it breaks one of the card's rules."""
    try:
        return read()
    except CardFault:
        return otherwise
