"""The documents say what the program does: flags, commands and links are those that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from api.settings import ServerSettings
from engine.config import EngineConfig, flag_rows

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def project_files() -> list[Path]:
    """All files that belong to the project: tracked, or new and not ignored."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def documents() -> list[Path]:
    return [path for path in project_files() if path.suffix == ".md"]


def table_row(flag: str, default: str, meaning: str) -> str:
    """One line of the README's table of flags."""
    cells = (f"`{flag}`", default, meaning)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def test_the_readme_lists_every_flag_with_its_default_and_meaning() -> None:
    expected = [table_row(*row) for table in (EngineConfig, ServerSettings) for row in flag_rows(table)]
    actual = [line.strip() for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    assert len(expected) > 30
    if sorted(actual) != sorted(expected):
        pytest.fail("The table of flags in README.md must hold these lines:\n" + "\n".join(expected))


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"setup", "run", "test", "check", "bench"} <= targets
    for path in documents():
        text = path.read_text(encoding="utf-8")
        code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
        named = set(re.findall(r"\bmake ([a-z][\w-]*)", code))
        assert named <= targets, (path.name, named - targets)


def test_the_readme_shows_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    assert "make run" in text
    assert "make test" in text


def anchors_of(path: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ +(.+?) *#*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", text)) for text in headings]
    return {text.strip().lower().replace(" ", "-") for text in words}


def broken_links(path: Path) -> list[str]:
    """Links of a document to files or headings that do not exist; web addresses are not looked at."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    broken = []
    for link in links:
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        is_inside = not name or target == ROOT or ROOT in target.parents
        if not (is_inside and target.exists()) or (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target)
        ):
            broken.append(link)
    return broken


def test_links_between_documents_lead_somewhere() -> None:
    assert README in documents()
    assert {path.name: links for path in documents() if (links := broken_links(path))} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# A heading\n[a](#a-heading) [b](#other) [c](missing.md) [d](https://example.com)\n")
    assert broken_links(document) == ["#other", "missing.md"]


def test_no_file_names_a_place_on_the_authors_machine() -> None:
    places = re.compile(r"(?<![\w.:/-])/(?:wo" + r"rk|ro" + r"ot)(?:/|\b)(?![-\w])")
    assert places.search("see /wo" + "rk/main")
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # weights, pictures, sound
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in places.finditer(text)]
    assert found == []
