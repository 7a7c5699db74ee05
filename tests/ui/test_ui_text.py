"""Every phrase that the app asks for exists, every phrase is asked for, and languages have the same ones."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

import ui
from ui.text import ENGLISH, LANGUAGES, Texts, language_of

SOURCES = {path.name: path.read_text(encoding="utf-8") for path in Path(ui.__path__[0]).glob("*.py")}
KEY = re.compile(r"[\"']([a-z]+(?:\.[a-z_-]+)+)[\"']")
GROUPS = {key.split(".")[0] for key in ENGLISH}


def asked_for() -> set[str]:
    """Keys that stand whole in the source."""
    found = {key for name, source in SOURCES.items() if not name.startswith("text") for key in KEY.findall(source)}
    return {key for key in found if key.split(".")[0] in GROUPS and not key.endswith((".py", ".css", ".js"))}


def made_up() -> set[str]:
    """Patterns of keys that are put together, such as `adapters.column.{key}`."""
    pattern = re.compile(r"f[\"']([a-z]+\.[a-z._{}-]*\{[^\"']*?)[\"']")
    return {key for source in SOURCES.values() for key in pattern.findall(source) if key.split(".")[0] in GROUPS}


def test_every_key_in_the_source_exists() -> None:
    assert len(asked_for()) > 50
    assert asked_for() - set(ENGLISH) == set()


def test_every_phrase_is_used() -> None:
    patterns = [re.compile(re.sub(r"\\\{.*?\\\}", "[a-z_-]+", re.escape(key)) + "$") for key in made_up()]
    prefixes = ("receipt.tag.", "age.", "unit.")
    unused = {
        key
        for key in set(ENGLISH) - asked_for()
        if not key.startswith(prefixes) and not any(pattern.match(key) for pattern in patterns)
    }
    assert unused == set()


@pytest.mark.parametrize("language", LANGUAGES)
def test_languages_have_the_same_keys_and_placeholders(language: str) -> None:
    def placeholders(phrase: str) -> set[str | None]:
        return {name for _, name, _, _ in string.Formatter().parse(phrase) if name}

    table = LANGUAGES[language]
    assert set(table) == set(ENGLISH)
    assert {key for key in table if placeholders(table[key]) != placeholders(ENGLISH[key])} == set()


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (786_432, "786 kB"),
        (3_145_728, "3.1 MB"),
        (2_500_000_000, "2.5 GB"),
    ],
)
def test_sizes_are_short(num_bytes: int, shown: str) -> None:
    assert Texts().size(num_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0 ms"), (0.0032, "3.2 ms"), (0.0415, "42 ms"), (0.9994, "999 ms"), (1.26, "1.3 s")]
)
def test_durations_are_short(seconds: float, shown: str) -> None:
    assert Texts().duration(seconds) == shown


@pytest.mark.parametrize(
    ("header", "language"),
    [
        ("", "en"), ("zh-CN,zh;q=0.9,en;q=0.8", "zh-CN"), ("zh-TW", "zh-CN"), ("fr, zh;q=0.5, en;q=0.6", "en"),
        ("en-GB,zh", "en"), ("de", "en"), ("zh;q=nonsense, *", "en"),
    ],
)  # fmt: skip
def test_the_browsers_languages_decide(header: str, language: str) -> None:
    assert language_of(header) == language
