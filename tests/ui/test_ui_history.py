"""What a browser keeps of a conversation comes back whole, and what it sends back is never trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.request import Message, Receipt
from ui.conversation import Conversation
from ui.history import MAX_CONVERSATIONS, export_html, from_record, history_html, keep, to_markdown, to_record
from ui.text import Texts


def talk(question: str = "Hello", *, clip: str = "") -> Conversation:
    conversation = Conversation()
    conversation.begin(question, (Path(clip),) if clip else ())
    reply = conversation.open_reply()
    reply.phase, reply.text, reply.receipt = "done", "Good day", Receipt("speech", "sha256:0123", "default:audio", 2.0)
    reply.first_token_s = 0.5
    return conversation


def test_a_conversation_comes_back_through_json_but_for_its_media() -> None:
    before = talk(clip="/secret/place/clip.wav")
    record = json.loads(json.dumps(to_record(before)))
    assert "/secret/place" not in json.dumps(record)
    after = from_record(record)
    assert after is not None and after.key == before.key
    assert after.turns[0].reply == before.turns[0].reply
    assert after.turns[0].media == () and after.turns[0].lost_media == ("clip.wav",)
    assert after.messages() == [Message("user", "Hello"), Message("assistant", "Good day")]
    assert "clip.wav" in str(after.display(Texts()))


def test_a_turn_of_lost_media_alone_is_not_sent() -> None:
    after = from_record(to_record(talk("", clip="clip.wav")))
    assert after is not None and after.messages() == []


@pytest.mark.parametrize(
    "record", [{}, {"turns": 3, "key": "x"}, {"turns": [{"text": "x"}], "key": "x"}, {"turns": [None], "key": "x"}]
)
def test_what_is_no_record_is_left_out(record: dict[str, Any]) -> None:
    assert from_record(record) is None
    assert "data-act" not in history_html(Texts(), [record], "")


def test_the_newest_stands_first_once_and_the_oldest_go() -> None:
    records: list[dict[str, Any]] = []
    talks = [talk(f"number {index}") for index in range(MAX_CONVERSATIONS + 3)]
    for conversation in [*talks, talks[-2]]:
        records = keep(records, conversation)
    assert len(records) == MAX_CONVERSATIONS
    assert [record["key"] for record in records[:2]] == [talks[-2].key, talks[-1].key]
    assert "number 0" not in history_html(Texts(), records, "")


def test_names_are_escaped_and_exports_hold_the_words() -> None:
    conversation = talk("<img src=x onerror=alert(1)>")
    assert "<img" not in history_html(Texts(), [to_record(conversation)], "")
    assert "<img" not in export_html(Texts(), conversation)
    markdown = to_markdown(Texts(), conversation)
    assert (
        "## You\n\n<img" in markdown and "## speech\n\nGood day" in markdown and "- Reason: default:audio" in markdown
    )
    assert export_html(Texts(), Conversation()) == ""
