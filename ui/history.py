"""Earlier conversations, kept in the visitor's browser and nowhere else: what is stored, restored, listed and exported.

Pure functions between `Conversation`s and records of JSON. A record comes back from a browser, so nothing in it is
trusted: no path of it is ever opened, and media are gone when a conversation is restored. Called by `ui/chat`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from html import escape
from typing import Any

from engine.request import Receipt
from ui.comparison import download_link
from ui.conversation import Conversation, Turn
from ui.receipt import FINAL_PHASES, Reply, detail_rows
from ui.text import Texts

MAX_CONVERSATIONS = 20
MAX_CHARACTERS = 1_000_000  # of all records together; browsers give a site about 5 MB
TITLE_LENGTH = 60
Record = dict[str, Any]
_REPLY_FIELDS = {
    field.name: type(field.default) for field in fields(Reply) if isinstance(field.default, str | int | float)
}


def to_record(conversation: Conversation) -> Record:
    """A conversation as the browser keeps it; of media only the names."""
    return {
        "key": conversation.key,
        "saved": time.time(),
        "turns": [
            {
                "text": turn.text,
                "media": turn.media_names,
                "reply": asdict(turn.reply) if turn.reply is not None else None,
            }
            for turn in conversation.turns
        ],
    }


def from_record(record: Record) -> Conversation | None:
    """The conversation of a record; None where it is none."""
    try:
        turns = [_turn(turn) for turn in record["turns"]]
        return Conversation(turns, str(record["key"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _turn(record: Record) -> Turn:
    return Turn(str(record["text"]), (), _reply(record["reply"]), tuple(str(name) for name in record["media"]))


def _reply(record: Record | None) -> Reply | None:
    if record is None:
        return None
    values: dict[str, Any] = {name: kind(record[name]) for name, kind in _REPLY_FIELDS.items() if name in record}
    reply = Reply(**values)
    if reply.phase not in FINAL_PHASES:
        reply.phase = "stopped"
    if record["receipt"] is not None:
        receipt = record["receipt"]
        name, generation = (None if receipt[key] is None else str(receipt[key]) for key in ("name", "generation"))
        times = float(receipt["load_ms"]), float(receipt["queue_ms"]), int(receipt["cached_tokens"])
        reply.receipt = Receipt(name, generation, str(receipt["reason"]), *times)
    reply.error = None if record["error"] is None else str(record["error"])
    reply.first_token_s = None if record["first_token_s"] is None else float(record["first_token_s"])
    reply.finish_reason = record["finish_reason"] if record["finish_reason"] in ("stop", "length", "abort") else None
    return reply


def keep(records: Sequence[Record], conversation: Conversation) -> list[Record]:
    """The records with this conversation first; the oldest go where they become too many or too long."""
    others = [record for record in records if record.get("key") != conversation.key]
    if not conversation.turns:
        return others
    kept: list[Record] = []
    length = 0
    for record in [to_record(conversation), *others][:MAX_CONVERSATIONS]:
        length += len(json.dumps(record))
        if kept and length > MAX_CHARACTERS:
            break
        kept.append(record)
    return kept


def history_html(text: Texts, records: Sequence[Record], current: str) -> str:
    """The list with its buttons, or what stands in its place."""
    rows = []
    for record in records:
        conversation = from_record(record)
        if conversation is None or not conversation.turns:
            continue
        title, key = escape(_title(text, conversation)), escape(conversation.key)
        here = " aria-current='true'" if conversation.key == current else ""
        delete = escape(text("history.delete_label", title=_title(text, conversation)))
        rows.append(
            f"<li{here}><button type='button' class='open' data-act='open' data-name='{key}'>{title}"
            f"<small>{escape(text.age(float(record.get('saved') or 0)))}</small></button>"
            f"<button type='button' data-act='delete' data-name='{key}' aria-label='{delete}'>×</button></li>"
        )
    if not rows:
        return f"<p class='quiet'>{escape(text('history.empty'))}</p>"
    asking = " ".join(
        f"data-{part}='{escape(text(f'history.{key}'))}'"
        for part, key in (("title", "delete_all_title"), ("body", "delete_all_body"), ("yes", "delete_all"))
    )
    every = escape(text("history.delete_all"))
    return (
        f"<ul class='history'>{''.join(rows)}</ul><p class='quiet'>{escape(text('history.where'))}</p>"
        f"<button type='button' class='plain' data-act='delete_all' data-name='' {asking}>{every}</button>"
    )


def _title(text: Texts, conversation: Conversation) -> str:
    first = conversation.turns[0]
    words = " ".join(first.text.split()) or ", ".join(first.media_names)
    return words[:TITLE_LENGTH] + ("…" if len(words) > TITLE_LENGTH else "") or text("history.untitled")


def export_html(text: Texts, conversation: Conversation) -> str:
    """Links that hold the conversation as a file; empty where there is none."""
    if not any(turn.reply is not None for turn in conversation.turns):
        return ""
    record = json.dumps(to_record(conversation), ensure_ascii=False, indent=2)
    links = "".join(
        download_link(text(f"history.{kind}"), f"conversation.{kind}", media_type, content)
        for kind, media_type, content in (
            ("md", "text/markdown", to_markdown(text, conversation)),
            ("json", "application/json", record),
        )
    )
    return f"<div class='ending'>{links}</div>"


def to_markdown(text: Texts, conversation: Conversation) -> str:
    """The conversation for people: questions, answers, and below each answer what its receipt says."""
    blocks = []
    for turn in conversation.turns:
        media = [f"[{name}]" for name in turn.media_names]
        blocks.append(f"## {text('history.you')}\n\n" + "\n\n".join([*media, turn.text]))
        if turn.reply is not None:
            receipt = "\n".join(f"- {label}: {value}" for label, value in detail_rows(text, turn.reply))
            name = turn.reply.receipt.name if turn.reply.receipt else None
            words = turn.reply.text or turn.reply.error or ""
            blocks.append(f"## {name or text('receipt.base')}\n\n{words}\n\n{receipt}")
    return "\n\n".join(block.rstrip() for block in blocks) + "\n"
