"""Every sentence and label of the web app, by key; a further language is one more table like `ui/text_en`.

Owns the languages and the formatting of figures for people. Knows nothing of Gradio, of components or of the engine. Each tab is
given one `Texts`; a key that is missing is a `KeyError` at once, and a test looks every key up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ui.text_en import ENGLISH
from ui.text_zh import CHINESE

# By the code that browsers name a language with.
LANGUAGES: Mapping[str, Mapping[str, str]] = {"en": ENGLISH, "zh-CN": CHINESE}


@dataclass(frozen=True)
class Texts:
    """The words of one language; called with a key and the values of its placeholders."""

    phrases: Mapping[str, str] = field(default_factory=lambda: ENGLISH)

    def __call__(self, key: str, **values: object) -> str:
        """The phrase of `key` with its placeholders filled in; raises `KeyError` for a key that does not exist."""
        return self.phrases[key].format(**values)

    def media(self, modalities: Iterable[str]) -> str:
        """`audio and images`: modalities in words; one that has none keeps its name."""
        return self("receipt.and").join(self.phrases.get(f"media.{each}", each) for each in modalities)

    def size(self, num_bytes: int) -> str:
        """`1.5 MB`: bytes for people, in powers of 1000 as disks count."""
        value = float(num_bytes)
        for unit in ("B", "kB", "MB"):
            if value < 1000:
                return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
            value /= 1000
        return f"{value:.1f} GB"

    def duration(self, seconds: float) -> str:
        """`12 ms` or `1.3 s`."""
        if seconds >= 1:
            return self("unit.s", value=f"{seconds:.1f}")
        return self("unit.ms", value=f"{seconds * 1000:.1f}" if 0 < seconds < 0.01 else f"{seconds * 1000:.0f}")

    def span(self, seconds: float) -> str:
        """A long time: `5 min`, `3 h` or `2 d`."""
        for limit, unit, key in ((7200, 60, "minutes"), (172800, 3600, "hours")):
            if seconds < limit:
                return self(f"span.{key}", value=int(seconds // unit))
        return self("span.days", value=int(seconds // 86400))

    def age(self, then: float | None) -> str:
        """How long ago a Unix time was."""
        if then is None:
            return self("age.never")
        seconds = max(0.0, time.time() - then)
        if seconds < 60:
            return self("age.now")
        for limit, unit, key in ((3600, 60, "minutes"), (86400, 3600, "hours")):
            if seconds < limit:
                return self(f"age.{key}", value=int(seconds // unit))
        return self("age.days", value=int(seconds // 86400))


def language_of(accept_language: str) -> str:
    """The first language of an `Accept-Language` header (RFC 9110, 12.5.4) that there is a table for, else English."""
    ranked = []
    for place, part in enumerate(accept_language.split(",")):
        tag, _, quality = part.strip().partition(";q=")
        try:
            ranked.append((-float(quality or 1), place, tag.lower()))
        except ValueError:
            continue
    for _, _, tag in sorted(ranked):
        for language in LANGUAGES:
            if tag.split("-")[0] == language.split("-")[0]:
                return language
    return "en"


def texts(language: str = "en") -> Texts:
    """The words of a language code; English where there is no such table yet."""
    return Texts(LANGUAGES.get(language, ENGLISH))
