"""What goes to the model and what the chat shows are two views of one record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.request import AudioPart, Message, Receipt, TextPart
from ui.conversation import Conversation
from ui.receipt import Phase
from ui.text import Texts

CLIP = Path("clip.wav")
RECEIPT = Receipt("speech", "sha256:0123456789abcdef", "default:audio")


def answered(*turns: tuple[str, tuple[Path, ...], Phase, str]) -> Conversation:
    """A conversation of (question, audio, how the answer ended, its text)."""
    conversation = Conversation()
    for text, audio, phase, words in turns:
        conversation.begin(text, audio)
        reply = conversation.open_reply()
        reply.phase, reply.text, reply.receipt = phase, words, RECEIPT
        reply.error = "The clip is broken." if phase == "failed" else None
    return conversation


def test_earlier_turns_and_their_audio_are_sent_again() -> None:
    conversation = answered(("Listen", (CLIP,), "done", "a song"))
    conversation.begin("Thank you", ())
    assert conversation.messages("Be brief.") == [
        Message("system", "Be brief."),
        Message("user", [AudioPart(CLIP, param="clip.wav"), TextPart("Listen")]),
        Message("assistant", "a song"),
        Message("user", "Thank you"),
    ]


def test_a_failed_turn_is_shown_but_not_sent() -> None:
    conversation = answered(
        ("One", (), "done", "1"), ("Two", (CLIP,), "failed", "half an ans"), ("Three", (), "done", "3")
    )
    conversation.begin("Four", ())
    assert [message.content for message in conversation.messages()] == ["One", "1", "Three", "3", "Four"]
    shown = str(conversation.display(Texts()))
    assert "half an ans" in shown and "The clip is broken." in shown
    assert conversation.open_reply().media == ""


def test_a_stopped_or_silent_answer_keeps_its_place_so_that_roles_alternate() -> None:
    conversation = answered(("One", (CLIP,), "stopped", ""), ("Two", (), "done", ""))
    conversation.begin("Three", ())
    assert [message.role for message in conversation.messages()] == ["user", "assistant"] * 2 + ["user"]
    assert [message.content for message in conversation.messages()][1::2] == ["", ""]


def test_a_retried_failure_is_sent() -> None:
    conversation = answered(("One", (), "failed", ""))
    turn = conversation.cut(0)
    conversation.begin(turn.text, [attached.path for attached in turn.media])
    assert conversation.messages() == [Message("user", "One")]


@pytest.mark.parametrize("phase", ["preparing", "queued", "answering", "done", "stopped", "failed"])
def test_each_row_of_the_display_leads_back_to_its_turn(phase: Phase) -> None:
    conversation = answered(("One", (), "done", "1"), ("Two", (CLIP,), phase, ""), ("Three", (), "done", "3"))
    rows: list[dict[str, Any]] = conversation.display(Texts())
    starts = [index for index, row in enumerate(rows) if row["role"] == "user"]
    assert len(starts) == 3
    for turn_index, start in enumerate(starts):
        end = starts[turn_index + 1] if turn_index < 2 else len(rows)
        assert {conversation.turn_at(index) for index in range(start, end)} == {turn_index}


def test_the_cause_of_a_failure_is_told_whole_and_as_it_is() -> None:
    conversation = answered(("One", (), "failed", ""))
    conversation.turns[0].reply.error = "'my_*lora*' is <b>gone</b>."  # type: ignore[union-attr]
    said = conversation.display(Texts())[-1]["content"]
    assert r"'my\_\*lora\*' is &lt;b&gt;gone&lt;/b&gt;." in said


def test_only_a_failed_answer_offers_ways_out() -> None:
    done, failed = (answered(("One", (), phase, "x")).display(Texts())[-1] for phase in ("done", "failed"))
    assert "options" not in done
    assert [option["value"] for option in failed["options"]] == ["retry", "retry_base"]
