"""An adapter's own card, `adapter_card.json`: how its author would have it asked. Nothing of it reaches the model by itself.

Owns the file's format and its bounds. Whoever wrote it is a stranger: everything is checked, and a card that is not understood
whole refuses the adapter. Called by `readme`, whose `find_card` everybody asks; the web app fills its panel from it.
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
MAX_LICENSE_LEN = 80

Fields = Mapping[str, Any]

_SAMPLING: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("from 0 to 2", lambda value: 0 <= value <= 2),
    "top_p": ("over 0, up to 1", lambda value: 0 < value <= 1),
    "max_tokens": (f"whole, 1 to {MAX_MAX_TOKENS}", lambda value: 1 <= value <= MAX_MAX_TOKENS and value == int(value)),
}
"""What each number must be, in words and as a test."""


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
        license: under what terms it may be used; only a README says that.
    """

    description: str = ""
    system_prompt: str = ""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    examples: tuple[CardExample, ...] = ()
    license: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"examples": [asdict(example) for example in self.examples]}

    @classmethod
    def from_dict(cls, values: Fields) -> AdapterCard:
        """The inverse of `to_dict`."""
        return cls(**{**values, "examples": tuple(CardExample(**example) for example in values["examples"])})


class CardFault(Exception):
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
            raise CardFault(f"is over {MAX_BYTES >> 10} KiB")
        return _card(_loaded(content))
    except CardFault as fault:
        raise AdapterRefused([f"{CARD_NAME} {fault}; mend it, or leave the file out"]) from None


def _loaded(content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_fields_once)
    except (ValueError, RecursionError) as error:
        detail = str(error) if isinstance(error, json.JSONDecodeError) else "it cannot be decoded"
        raise CardFault(f"is not JSON: {detail}") from None


def _fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise CardFault("has a field twice in one object")
    return fields


def _card(loaded: Any) -> AdapterCard:
    card = _object(loaded, "", ("description", "system_prompt", "sampling", "examples"))
    sampling = _object(card.get("sampling", {}), "sampling", ("temperature", "top_p", "max_tokens"))
    examples = card.get("examples", [])
    if not isinstance(examples, list) or len(examples) > MAX_EXAMPLES:
        raise CardFault(f"has examples that are not a list of at most {MAX_EXAMPLES}")
    max_tokens = number_field(sampling, "max_tokens")
    return AdapterCard(
        description=text_field(card, "description", "", MAX_DESCRIPTION_LEN),
        system_prompt=text_field(card, "system_prompt", "", MAX_SYSTEM_LEN),
        temperature=number_field(sampling, "temperature"),
        top_p=number_field(sampling, "top_p"),
        max_tokens=None if max_tokens is None else int(max_tokens),
        examples=tuple(example_of(example, f"examples[{place}]") for place, example in enumerate(examples)),
    )


def example_of(loaded: Any, where: str) -> CardExample:
    """One of `examples`; raises `CardFault`."""
    fields = _object({"prompt": loaded} if isinstance(loaded, str) else loaded, where, ("title", "prompt"))
    prompt = text_field(fields, "prompt", where, MAX_PROMPT_LEN)
    if not prompt.strip():
        raise CardFault(f"has an empty {where}.prompt")
    title = " ".join(text_field(fields, "title", where, MAX_TITLE_LEN).split())
    return CardExample(title or _shortened(" ".join(prompt.split())), prompt)


def _shortened(words: str) -> str:
    return words if len(words) <= MAX_TITLE_LEN else words[: MAX_TITLE_LEN - 1] + "…"


def _object(loaded: Any, where: str, known: Sequence[str]) -> Fields:
    if not isinstance(loaded, dict):
        raise CardFault(f"has {where}, which is no JSON object" if where else "is not one JSON object")
    unknown = next((name for name in loaded if name not in known), None)
    if unknown is not None:
        place = f" in {where}" if where else ""
        raise CardFault(f"has an unknown field {unknown[:80]!a}{place}; known are {', '.join(known)}")
    return loaded


def text_field(fields: Fields, name: str, where: str, max_len: int) -> str:
    """A field of text, empty where it is left out; raises `CardFault`."""
    value, shown = fields.get(name, ""), f"{where}.{name}".lstrip(".")
    if not isinstance(value, str) or len(value) > max_len:
        raise CardFault(f"has a {shown} that is no text of at most {max_len} characters")
    # Lone surrogates cannot be sent to anybody, and control characters are nobody's words.
    if any(letter not in "\n\t" and (letter < " " or "\x7f" <= letter <= "\x9f" or "\ud800" <= letter <= "\udfff")
           for letter in value):  # fmt: skip
        raise CardFault(f"has a {shown} with control characters")
    return value


def number_field(fields: Fields, name: str) -> float | None:
    """A field of `sampling`, None where it is left out; raises `CardFault`."""
    value = fields.get(name)
    if value is None:
        return None
    rule, is_allowed = _SAMPLING[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (isinstance(value, int) or math.isfinite(value)) or not is_allowed(value):
        raise CardFault(f"has a sampling.{name} that is no number {rule}")
    return float(value)
