"""Receipts say in words what the engine's receipt says in codes, and let no name become markup."""

from __future__ import annotations

import pytest

from engine.request import Receipt
from ui.receipt import NUM_HUES, Reply, last_answer_card, mark_html, reason_in_words, receipt_line, receipt_title
from ui.text import Texts
from ui.theme import STYLE_SHEET

TEXT = Texts()
DIGEST = "sha256:3f2a91c0d1e2f3"


def reply(receipt: Receipt, **fields: object) -> Reply:
    made = Reply(phase="done", receipt=receipt, num_prompt_tokens=48, num_answer_tokens=11, generation_s=0.5)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("name", "reason", "fields", "words"),
    [
        ("sql", "explicit", {}, "chosen by you"),
        (None, "opt-out", {}, "you asked for the base model"),
        (None, "base", {}, "base model, no adapter applies to this message by itself"),
        (None, "base", {"media": "audio"}, "base model, no adapter is the default for audio"),
        (None, "base", {"media": "audio+image"}, "base model, no adapter is the default for audio and images"),
        ("speech", "default:audio", {"new_media": "audio", "media": "audio"},
         "the message holds audio, and speech is the default for audio"),
        ("speech", "default:audio", {"media": "audio"},
         "an earlier message holds audio, and speech is the default for audio"),
        ("vision", "default:image", {"new_media": "audio+image", "media": "audio+image"},
         "the message holds images, and vision is the default for images"),
        ("both", "default:audio+image", {"new_media": "audio+image"},
         "the message holds audio and images, and both is the default for audio and images"),
        ("both", "default:audio+image", {"new_media": "image", "media": "audio+image"},
         "the conversation holds audio and images, and both is the default for audio and images"),
        (None, "conflict:audio=speech,image=vision", {},
         "conflict: the defaults are speech for audio and vision for images; one prompt takes one adapter, so the base "
         "model answered"),
    ],
)  # fmt: skip
def test_every_reason_has_words(name: str | None, reason: str, fields: dict[str, object], words: str) -> None:
    assert reason_in_words(TEXT, reply(Receipt(name, DIGEST if name else None, reason), **fields)) == words


def test_the_line_holds_digest_reason_times_speed_and_cache() -> None:
    line = receipt_line(TEXT, reply(Receipt("sql", DIGEST, "explicit", load_ms=1234, queue_ms=3.25, cached_tokens=16)))
    assert line == (
        "3f2a91c0 · chosen by you\nloaded in 1.2 s · queued 3.2 ms · 20 tokens/s · 16 of 48 prompt tokens cached"
    )


def test_an_unfinished_answer_says_what_it_waits_for() -> None:
    receipt = Receipt(None, None, "base")
    assert "queued with 3 others" in receipt_line(TEXT, reply(receipt, phase="queued", num_waiting=4))
    assert "reading the prompt" in receipt_line(TEXT, reply(receipt, phase="reading"))


def test_colours_follow_from_names_and_the_base_model_has_none() -> None:
    marks = [mark_html(name) for name in (None, "speech", "sql", "pirate")]
    assert len(set(marks)) == 4 and "hue" not in marks[0]
    assert [mark_html(name) for name in (None, "speech", "sql", "pirate")] == marks
    for mark, name in zip(marks, (None, "speech"), strict=False):
        answer = reply(Receipt(name, DIGEST if name else None, "explicit"))
        assert mark in receipt_title(TEXT, answer) and mark in last_answer_card(TEXT, answer)
    sheet = STYLE_SHEET.read_text(encoding="utf-8")
    assert all(f".hue-{hue} {{" in sheet for hue in range(NUM_HUES))


def test_the_card_tells_a_failure_and_a_wait() -> None:
    failed = Reply(phase="failed", error="The <b>adapter</b> is gone.")
    for answer in (failed, reply(Receipt(None, None, "base"), phase="failed", error=failed.error)):
        card = last_answer_card(TEXT, answer)
        assert "The &lt;b&gt;adapter&lt;/b&gt; is gone." in card and "failed" in card
        assert TEXT("chat.last_empty") not in card
    assert "Preparing" in last_answer_card(TEXT, Reply())
    assert "Stopped by you" in last_answer_card(TEXT, Reply(phase="stopped"))


def test_a_name_never_becomes_markup() -> None:
    nasty = reply(Receipt("<img src=x>**b**[l](u)", DIGEST, "default:<b>"))
    assert "<img" not in receipt_title(TEXT, nasty) and "**b**" not in receipt_title(TEXT, nasty)
    assert "<img" not in last_answer_card(TEXT, nasty) and "<b>" not in last_answer_card(TEXT, nasty)
