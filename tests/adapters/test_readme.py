"""What a README's header says of an adapter is taken as far as it is understood, and never refuses the adapter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from adapters.card import CARD_NAME, MAX_EXAMPLES, AdapterCard, CardExample
from adapters.manager import AdapterManager
from adapters.plan import check_adapter
from adapters.readme import (
    MAX_HEADER_LEN,
    MAX_OPEN_BRACKETS,
    README_NAME,
    find_card,
    parse_header,
    readme_base,
    readme_card,
)
from adapters.surface import ModelSurface
from tests.adapters.world import edit

HEADER = """---
base_model: meta-llama/Llama-3.1-8B
library_name: peft
license: apache-2.0
tags: [lora, sql]
pipeline_tag: text-generation
inference:
  parameters: {temperature: 0.2, top_p: 7, max_new_tokens: 96}
widget:
  - text: How many notes are there?
    example_title: Count
  - messages:
      - {role: system, content: One query.}
      - {role: user, content: "List  all\\nnames"}
  - {src: "https://example.com/a.wav", text: heard}
---

# Model card
text: not this
"""


def header(*lines: str) -> bytes:
    return "\n".join(["---", *lines, "---", ""]).encode()


def test_a_header_becomes_a_card() -> None:
    card = readme_card(HEADER.encode())
    examples = (CardExample("Count", "How many notes are there?"), CardExample("List all names", "List  all\nnames"))
    assert card == AdapterCard(license="apache-2.0", temperature=0.2, max_tokens=96, examples=examples)
    assert AdapterCard.from_dict(card.to_dict()) == card
    assert readme_base(HEADER.encode()) == "meta-llama/Llama-3.1-8B"
    assert readme_card(b"\xef\xbb\xbf" + HEADER.replace("\n", "\r\n").encode()) == card


@pytest.mark.parametrize(
    ("lines", "license_name", "base"),
    [
        (["license: other", "license_name: llama3.1"], "llama3.1", None),
        (["license: [mit, apache-2.0]", "base_model: [a/b]"], "mit, apache-2.0", "a/b"),
        (["license: no", "base_model: 7"], "no", "7"),
        (["license: ~", "base_model: [a/b, c/d]"], "", None),
        (["license: " + "x" * 81, "base_model: " + "x" * 201], "", None),
        (['license: "a\\x1b[31m"', 'base_model: "a\\x00"'], "", None),
        (["license: !!python/object/apply:os.system [echo]"], "echo", None),  # A tag makes nothing.
        (["license: {a: b}", "base_model: {a: b}"], "", None),
    ],
)
def test_licence_and_base_are_short_texts_or_nothing(lines: list[str], license_name: str, base: str | None) -> None:
    content = header(*lines)
    card = readme_card(content)
    assert (card.license if card else "") == license_name and readme_base(content) == base


@pytest.mark.parametrize(
    "content",
    [
        b"", b"# Only text", b"---\n", b"---\nlicense: mit\n", b"---\n- a\n- b\n---\n", b"---\nlicense: [mit\n---\n",
        b"---\nlicense: \xff\xfe\x00\n---\n", b"---\n" + b"[" * 5000 + b"\n---\n",
        b"---\na: &a [x, x]\nb: &b [*a, *a]\nwidget: [*b, *b]\n---\n",
        b"---\n? [a, b]\n: c\nlicense: mit\n---\n",
        b"---\nwidget: 5\ninference: false\n---\n",
        b"---\nwidget: [5, {text: [a]}, {text: ''}, {messages: [1]}, {messages: [{role: user, content: [a]}]}]\n---\n",
        b"---\ninference: {parameters: {temperature: hot, top_p: [1], max_new_tokens: 1e400}}\n---\n",
        header(f"license: mit # {'x' * MAX_HEADER_LEN}")[:MAX_HEADER_LEN],
    ],
)  # fmt: skip
def test_what_is_not_understood_says_nothing(content: bytes) -> None:
    assert readme_card(content) is None and readme_base(content) is None


def test_examples_are_bounded_and_a_bad_title_costs_the_title_alone() -> None:
    many = header("widget:", *[f"  - text: question {number}" for number in range(MAX_EXAMPLES + 5)])
    card = readme_card(many)
    assert card is not None and len(card.examples) == MAX_EXAMPLES
    odd = readme_card(header("widget:", f"  - {{text: Why, example_title: {'x' * 81}}}", f"  - text: {'x' * 4001}"))
    assert odd is not None and odd.examples == (CardExample("Why", "Why"),)


def test_an_own_card_comes_first(tmp_path: Path) -> None:
    (tmp_path / README_NAME).write_text(HEADER)
    found = find_card(tmp_path)
    assert found is not None and found.license == "apache-2.0"
    (tmp_path / CARD_NAME).write_text('{"description": "Own."}')
    assert find_card(tmp_path) == AdapterCard("Own.")


def test_only_a_regular_file_under_the_allowed_roots_is_opened(tmp_path: Path) -> None:
    folder, outside = tmp_path / "adapter", tmp_path / "secret.md"
    folder.mkdir()
    outside.write_text(HEADER)
    readme = folder / README_NAME
    readme.symlink_to(outside)
    assert find_card(folder, allowed_roots=[tmp_path]) is not None
    assert find_card(folder, allowed_roots=[folder]) is None
    readme.unlink()
    os.mkfifo(readme)
    assert find_card(folder) is None


def test_a_base_that_the_readme_alone_names_is_compared(reference: Path, surface: ModelSurface, tmp_path: Path) -> None:
    folder = edit(reference, tmp_path / "x", config={"base_model_name_or_path": None})
    (folder / README_NAME).write_bytes(header("base_model: someone/else-7b"))
    assert any("trained on 'someone/else-7b'" in warning for warning in check_adapter(folder, surface).warnings)
    named = edit(reference, tmp_path / "y", config={"base_model_name_or_path": surface.model_name})
    (named / README_NAME).write_bytes(header("base_model: someone/else-7b"))
    assert not any("someone" in warning for warning in check_adapter(named, surface).warnings)


def test_a_readme_comes_along_with_an_upload_and_its_card_is_listed(
    surface: ModelSurface, reference: Path, tmp_path: Path
) -> None:
    folder = edit(reference, tmp_path / "x")
    (folder / README_NAME).write_text(HEADER)
    manager = AdapterManager(surface, adapter_dir=tmp_path / "own", max_cpu_loras=4)
    files = {path.name: path for path in folder.iterdir()}
    report = manager.inspect_upload(files)
    assert report.is_ok and README_NAME in report.files and report.report is not None
    assert report.report["card"]["license"] == "apache-2.0"
    manager.install_upload("sql", files)
    assert manager.get("sql").report["card"]["examples"][0]["title"] == "Count"
    manager.close()
    again = AdapterManager(surface, adapter_dir=tmp_path / "own", max_cpu_loras=4)
    again.restore()
    assert again.get("sql").report["card"]["license"] == "apache-2.0"
    again.close()


def test_brackets_are_opened_to_a_bound_alone() -> None:
    def nested(depth: int) -> bytes:
        return header("license: mit", "tags: " + "[{a: " * (depth // 2) + "b" + "}]" * (depth // 2))

    assert readme_card(nested(MAX_OPEN_BRACKETS)) == AdapterCard(license="mit")
    assert readme_card(nested(MAX_OPEN_BRACKETS + 2)) is None
    assert readme_card(header("license: mit", f"tags: [{'[], ' * 100}]")) == AdapterCard(license="mit")


def test_the_parser_makes_text_alone() -> None:
    assert parse_header(header("a: 2020-99-99", "b: yes", "c: 0x10")) == {"a": "2020-99-99", "b": "yes", "c": "0x10"}
