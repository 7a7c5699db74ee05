"""An adapter's card is read whole or refuses the adapter, and stays with the name that it came with."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.card import CARD_NAME, MAX_BYTES, MAX_EXAMPLES, AdapterCard, CardExample, parse_card, read_card
from adapters.errors import AdapterRefused
from adapters.manager import AdapterManager
from adapters.surface import ModelSurface
from engine.config import EMBEDDED_ASSETS
from tests.adapters.world import edit

CARD = {
    "description": "Writes SQL.",
    "system_prompt": "Answer with one query.\nNothing else.",
    "sampling": {"temperature": 0.25, "top_p": 1, "max_tokens": 64.0},
    "examples": ["How many notes are there?", {"title": "Names", "prompt": "List  all\nnames"}],
}


def coded(**changes: Any) -> bytes:
    return json.dumps({**CARD, **changes}).encode()


def test_a_card_is_read_whole_and_survives_its_dictionary() -> None:
    card = parse_card(coded())
    question = "How many notes are there?"
    assert card == AdapterCard(
        "Writes SQL.", "Answer with one query.\nNothing else.", 0.25, 1, 64,
        (CardExample(question, question), CardExample("Names", "List  all\nnames")),
    )  # fmt: skip
    assert AdapterCard.from_dict(json.loads(json.dumps(card.to_dict()))) == card
    assert parse_card(b"{}") == AdapterCard()
    assert len(parse_card(coded(examples=["word " * 100])).examples[0].title) == 80


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "is not JSON: it cannot be decoded"),
        (b"[" * 5000, "is not JSON"),
        (b"{", "is not JSON: Expecting property name"),
        (b"[]", "is not one JSON object"),
        (b'{"examples": [], "examples": ["x"]}', "has a field twice in one object"),
        (coded(prompt="x"), "has an unknown field 'prompt'; known are description, system_prompt, sampling, examples"),
        (coded(sampling={"seed": 1}), "has an unknown field 'seed' in sampling"),
        (coded(sampling=[]), "has sampling, which is no JSON object"),
        (coded(sampling={"temperature": 2.5}), "has a sampling.temperature that is no number from 0 to 2"),
        (coded(sampling={"temperature": True}), "has a sampling.temperature that is no number"),
        (coded(sampling={"temperature": float("nan")}), "has a sampling.temperature that is no number"),
        (coded(sampling={"temperature": "0"}), "has a sampling.temperature that is no number"),
        (coded(sampling={"top_p": 0}), "has a sampling.top_p that is no number over 0, up to 1"),
        (coded(sampling={"max_tokens": 1.5}), "has a sampling.max_tokens that is no number whole"),
        (coded(sampling={"max_tokens": 10**400}), "has a sampling.max_tokens that is no number whole"),
        (coded(system_prompt=7), "has a system_prompt that is no text of at most 8000 characters"),
        (coded(system_prompt="x" * 8001), "has a system_prompt that is no text"),
        (coded(system_prompt="a\x1b[31m"), "has a system_prompt with control characters"),
        (coded(description="\ud800"), "has a description with control characters"),
        (coded(examples="x"), f"has examples that are not a list of at most {MAX_EXAMPLES}"),
        (coded(examples=["x"] * 9), "has examples that are not a list of at most"),
        (coded(examples=["x", " \n"]), "has an empty examples[1].prompt"),
        (coded(examples=[{"prompt": "x", "audio": "/etc/passwd"}]), "has an unknown field 'audio' in examples[0]"),
        (b" " * (MAX_BYTES + 1), "is over 64 KiB"),
    ],
)  # fmt: skip
def test_what_is_no_card_refuses_the_adapter_and_says_why(content: bytes, said: str) -> None:
    with pytest.raises(AdapterRefused) as raised:
        parse_card(content)
    assert raised.value.message.startswith(f"{CARD_NAME} {said}")
    assert raised.value.message.endswith("; mend it, or leave the file out")


def test_only_a_regular_file_under_the_allowed_roots_is_opened(tmp_path: Path) -> None:
    folder, outside = tmp_path / "adapter", tmp_path / "secret.json"
    folder.mkdir()
    outside.write_bytes(coded())
    card = folder / CARD_NAME
    assert read_card(folder) is None
    card.symlink_to(outside)
    assert read_card(folder, allowed_roots=[tmp_path]) == parse_card(coded())
    with pytest.raises(AdapterRefused, match="a link that leads out"):
        read_card(folder, allowed_roots=[folder])
    card.unlink()
    os.mkfifo(card)
    with pytest.raises(AdapterRefused, match="not a regular file"):
        read_card(folder)
    card.unlink()
    card.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(AdapterRefused, match="of at most 64 KiB"):
        read_card(folder)


@pytest.fixture
def with_card(reference: Path, tmp_path: Path) -> Callable[..., Path]:
    """The reference adapter with a card beside it."""

    def make(name: str, **changes: Any) -> Path:
        folder = edit(reference, tmp_path / name)
        (folder / CARD_NAME).write_bytes(coded(**changes))
        return folder

    return make


def described(manager: AdapterManager, name: str) -> str | None:
    card = manager.get(name).report["card"]
    return None if card is None else str(card["description"])


def test_an_uploads_card_is_stored_exported_and_there_after_a_restart(
    with_card: Callable[..., Path], surface: ModelSurface, reference: Path, tmp_path: Path
) -> None:
    manager = AdapterManager(surface, adapter_dir=tmp_path / "own", max_cpu_loras=4)
    files = {path.name: path for path in with_card("sql").iterdir()}
    report = manager.inspect_upload(files).report
    assert report is not None and report["card"]["description"] == "Writes SQL."
    manager.install_upload("sql", files)
    with (tmp_path / "sql.zip").open("wb") as target:
        manager.export("sql", target)
    assert zipfile.ZipFile(tmp_path / "sql.zip").read(CARD_NAME) == coded()
    manager.close()
    again = AdapterManager(surface, adapter_dir=tmp_path / "own", max_cpu_loras=4)
    again.restore()
    assert described(again, "sql") == "Writes SQL."
    # Equal tensors, which are in memory once, under a name with another card and one without.
    again.load("other", with_card("other", description="Other words."))
    again.load("plain", reference)
    assert [described(again, name) for name in ("sql", "other", "plain")] == ["Writes SQL.", "Other words.", None]
    assert len({info.generation for info in again.list()}) == 1
    again.close()


def test_a_bad_card_refuses_the_upload_the_load_and_the_dry_run(
    with_card: Callable[..., Path], surface: ModelSurface, tmp_path: Path
) -> None:
    manager = AdapterManager(surface, adapter_dir=tmp_path / "own", max_cpu_loras=4)
    folder = with_card("bad", extra=1)
    files = {path.name: path for path in folder.iterdir()}
    assert "unknown field 'extra'" in manager.inspect_upload(files).errors[0]
    for refused in (lambda: manager.load("bad", folder), lambda: manager.install_upload("bad", files)):
        with pytest.raises(AdapterRefused, match=r"adapter 'bad' is refused: adapter_card\.json has an unknown field"):
            refused()
    assert manager.list() == []
    manager.check_integrity()
    manager.close()


def test_the_embedded_adapters_have_cards() -> None:
    for name in ("speech", "sql", "pirate"):
        card = read_card(EMBEDDED_ASSETS / "adapters" / name)
        assert card is not None and card.description and card.examples
