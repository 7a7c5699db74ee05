"""An adapter's own card, `adapter_card.json`: how its author would have it asked. Nothing of it reaches the model by itself.

Owns the file's format and its bounds. Whoever wrote it is a stranger: everything is checked, and a card that is not understood
whole refuses the adapter. Called by `reader` and `inspection`; the web app fills its panel from it.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapters.errors import AdapterRefused
from adapters.folder import is_under

CARD_NAME = "adapter_card.json"
MAX_BYTES = 64 << 10
MAX_DESCRIPTION_LEN = 500
MAX_SYSTEM_LEN = 8_000
MAX_PROMPT_LEN = 4_000
MAX_TITLE_LEN = 80
MAX_EXAMPLES = 8
MAX_MAX_TOKENS = 1 << 20

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class CardExample:
    """A prompt to try, and what it is called."""

    title: str
    prompt: str


@dataclass(frozen=True)
class AdapterCard:
    """What a card says; what it leaves out is empty or None.

    Attributes:
        description: what the adapter does, in a sentence or two.
        system_prompt: what it wants to stand before a conversation.
        temperature, top_p, max_tokens: sampling that suits it.
        examples: prompts to try.
    """

    description: str = ""
    system_prompt: str = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    examples: tuple[CardExample, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"examples": [asdict(example) for example in self.examples]}

    @classmethod
    def from_dict(cls, values: Fields) -> AdapterCard:
        """The inverse of `to_dict`."""
        return cls(**{**values, "examples": tuple(CardExample(**example) for example in values["examples"])})


class _Fault(Exception):
    """What is wrong with a card, as the end of a sentence that begins with the file's name."""


def read_card(folder: Path, *, allowed_roots: Sequence[Path] | None = None) -> AdapterCard | None:
    """The card of a folder; None where it has none.

    Raises `AdapterRefused` where the file is no regular one, leads out of the allowed roots, is too large, or is no card.
    """
    path = folder / CARD_NAME
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise AdapterRefused([f"{CARD_NAME} cannot be read ({error.strerror or 'unknown reason'})"]) from error
    if allowed_roots is not None and not is_under(path, allowed_roots):
        raise AdapterRefused([f"{CARD_NAME} is a link that leads out of the folders that adapters may be loaded from"])
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        raise AdapterRefused([f"{CARD_NAME} is not a regular file of at most {MAX_BYTES >> 10} KiB"])
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise AdapterRefused([f"{CARD_NAME} cannot be read ({error.strerror or 'unknown reason'})"]) from error
    return parse_card(content)


def parse_card(content: bytes) -> AdapterCard:
    """The card that a file's bytes hold; raises `AdapterRefused`."""
    try:
        if len(content) > MAX_BYTES:
            raise _Fault(f"is over {MAX_BYTES >> 10} KiB")
        return _card(_loaded(content))
    except _Fault as fault:
        raise AdapterRefused([f"{CARD_NAME} {fault}; mend it, or leave the file out"]) from None


def _loaded(content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_fields_once)
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, json.JSONDecodeError) else "it cannot be decoded"
        raise _Fault(f"is not JSON: {detail}") from None


def _fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _Fault("has a field twice in one object")
    return fields


def _card(loaded: Any) -> AdapterCard:
    card = _object(loaded, "", ("description", "system_prompt", "sampling", "examples"))
    sampling = _object(card.get("sampling", {}), "sampling", ("temperature", "top_p", "max_tokens"))
    examples = card.get("examples", [])
    if not isinstance(examples, list) or len(examples) > MAX_EXAMPLES:
        raise _Fault(f"has examples that are not a list of at most {MAX_EXAMPLES}")
    max_tokens = _number(sampling, "max_tokens", lambda value: 1 <= value <= MAX_MAX_TOKENS and value == int(value))
    return AdapterCard(
        description=_text(card, "description", "", MAX_DESCRIPTION_LEN),
        system_prompt=_text(card, "system_prompt", "", MAX_SYSTEM_LEN),
        temperature=_number(sampling, "temperature", lambda value: 0 <= value <= 2),
        top_p=_number(sampling, "top_p", lambda value: 0 < value <= 1),
        max_tokens=None if max_tokens is None else int(max_tokens),
        examples=tuple(_example(example, f"examples[{place}]") for place, example in enumerate(examples)),
    )


def _example(loaded: Any, where: str) -> CardExample:
    fields = _object({"prompt": loaded} if isinstance(loaded, str) else loaded, where, ("title", "prompt"))
    prompt = _text(fields, "prompt", where, MAX_PROMPT_LEN)
    if not prompt.strip():
        raise _Fault(f"has an empty {where}.prompt")
    title = " ".join(_text(fields, "title", where, MAX_TITLE_LEN).split())
    return CardExample(title or _shortened(" ".join(prompt.split())), prompt)


def _shortened(words: str) -> str:
    return words if len(words) <= MAX_TITLE_LEN else words[: MAX_TITLE_LEN - 1] + "…"


def _object(loaded: Any, where: str, known: Sequence[str]) -> Fields:
    if not isinstance(loaded, dict):
        raise _Fault(f"has {where}, which is no JSON object" if where else "is not one JSON object")
    unknown = next((name for name in loaded if name not in known), None)
    if unknown is not None:
        place = f" in {where}" if where else ""
        raise _Fault(f"has an unknown field {unknown[:80]!a}{place}; known are {', '.join(known)}")
    return loaded


def _text(fields: Fields, name: str, where: str, max_len: int) -> str:
    value, shown = fields.get(name, ""), f"{where}.{name}".lstrip(".")
    if not isinstance(value, str) or len(value) > max_len:
        raise _Fault(f"has a {shown} that is no text of at most {max_len} characters")
    # Lone surrogates cannot be sent to anybody, and control characters are nobody's words.
    if any(letter not in "\n\t" and (letter < " " or "\x7f" <= letter <= "\x9f" or "\ud800" <= letter <= "\udfff")
           for letter in value):  # fmt: skip
        raise _Fault(f"has a {shown} with control characters")
    return value


def _number(fields: Fields, name: str, is_allowed: Callable[[float], bool]) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    ranges = {"temperature": "from 0 to 2", "top_p": "over 0, up to 1", "max_tokens": f"whole, 1 to {MAX_MAX_TOKENS}"}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (isinstance(value, int) or math.isfinite(value)) or not is_allowed(value):
        raise _Fault(f"has a sampling.{name} that is no number {ranges[name]}")
    return float(value)
