"""A conversation as the server keeps it: turns with their media and the true record of each answer.

Owns what goes to the model (`messages`) and what the chat shows (`display`), both derived from the same turns, so that
receipts and error rows can never reach the model. Knows nothing of the engine or of Gradio's components, only of the
message dictionaries that a chat display takes. Called by `ui/chat`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.request import Message, TextPart
from ui.media import Attachment, attachments, joined
from ui.receipt import Reply, plain, receipt_details, receipt_line, receipt_title
from ui.text import Texts


@dataclass
class Turn:
    """What the user sent, and the answer to it once there is one."""

    text: str
    media: tuple[Attachment, ...] = ()
    reply: Reply | None = None
    # Names of media that a conversation from the browser's history no longer has.
    lost_media: tuple[str, ...] = ()

    @property
    def is_in_prompt(self) -> bool:
        """Whether the model sees this turn: a failed one is left out, or its fault would come back with each request."""
        if self.lost_media and not self.text:
            return False
        return self.reply is None or self.reply.phase != "failed"

    def user_message(self) -> Message:
        """The user's half, media first."""
        if not self.media:
            return Message("user", self.text)
        parts = [attached.part() for attached in self.media]
        return Message("user", [*parts, TextPart(self.text)] if self.text else parts)

    @property
    def media_names(self) -> list[str]:
        """File names of what was attached, also of what is no longer there."""
        return [*(attached.path.name for attached in self.media), *self.lost_media]


@dataclass
class Conversation:
    """The turns of one browser tab."""

    turns: list[Turn] = field(default_factory=list)
    key: str = ""
    # What `remove` took out last, and from where; gone as soon as the conversation goes on.
    removed: tuple[int, Turn] | None = None

    def begin(self, text: str, files: Sequence[Path]) -> None:
        """Add a turn; its answer is made by `open_reply`. The first one gives the conversation a new key."""
        if not self.turns and not self.key:
            self.key = uuid.uuid4().hex
        self.turns.append(Turn(text, attachments(files)))
        self.removed = None

    def messages(self, system: str = "") -> list[Message]:
        """What the model gets: each turn with its answer, failed ones left out, and the last one, which waits for its answer."""
        messages = [Message("system", system)] if system.strip() else []
        for turn in self.turns:
            if not turn.is_in_prompt:
                continue
            messages.append(turn.user_message())
            if turn.reply is not None:
                messages.append(Message("assistant", turn.reply.text))
        return messages

    def open_reply(self) -> Reply:
        """Give the last turn an empty answer; call after `messages`."""
        turn = self.turns[-1]
        in_prompt = [earlier for earlier in self.turns if earlier is turn or earlier.is_in_prompt]
        turn.reply = Reply(
            new_media=joined([attached.modality for attached in turn.media]),
            media=joined([attached.modality for earlier in in_prompt for attached in earlier.media]),
        )
        return turn.reply

    def last_reply(self) -> Reply | None:
        """The newest answer."""
        return next((turn.reply for turn in reversed(self.turns) if turn.reply is not None), None)

    def clear(self) -> None:
        """Begin anew."""
        self.turns.clear()
        self.key, self.removed = "", None

    def cut(self, turn_index: int) -> Turn:
        """Remove a turn and all that follow it; returns the removed turn."""
        turn = self.turns[turn_index]
        del self.turns[turn_index:]
        self.removed = None
        return turn

    def remove(self, turn_index: int) -> None:
        """Take out one turn, question and answer, until `restore`; nothing for a place where there is none."""
        if 0 <= turn_index < len(self.turns):
            self.removed = turn_index, self.turns.pop(turn_index)

    def restore(self) -> None:
        """Put back what `remove` took out last."""
        if self.removed is not None:
            turn_index, turn = self.removed
            self.turns.insert(turn_index, turn)
            self.removed = None

    def turn_at(self, message_index: int) -> int:
        """The turn that owns the message at a place in `display`."""
        seen = 0
        for turn_index, turn in enumerate(self.turns):
            seen += _num_messages(turn)
            if message_index < seen:
                return turn_index
        return len(self.turns) - 1

    def display(self, text: Texts) -> list[dict[str, Any]]:
        """The messages of the chat display; `turn_at` must agree with how many each turn gives."""
        shown: list[dict[str, Any]] = []
        for turn in self.turns:
            shown.append(_user_row(text, turn))
            if turn.reply is not None:
                shown.extend(_reply_rows(text, turn.reply))
        return shown


def _num_messages(turn: Turn) -> int:
    return 1 if turn.reply is None else 1 + len(_reply_rows(Texts(), turn.reply))


def _user_row(text: Texts, turn: Turn) -> dict[str, Any]:
    files: list[Any] = [{"path": str(each.path), "alt_text": each.path.name} for each in turn.media]
    files += [text("history.lost_media", name=name) for name in turn.lost_media]
    return {"role": "user", "content": [*files, turn.text] if turn.text else files}


def _reply_rows(text: Texts, reply: Reply) -> list[dict[str, Any]]:
    """The receipt, then the words or what stands in their place."""
    rows = []
    if reply.receipt is not None or not reply.is_final:
        metadata: dict[str, Any] = {
            "title": receipt_title(text, reply),
            "log": receipt_line(text, reply),
            "status": "done" if reply.is_final or reply.phase == "answering" else "pending",
        }
        # A row that is pending shows its content unasked; the details can wait for the end.
        details = receipt_details(text, reply) if reply.is_final else ""
        rows.append({"role": "assistant", "content": details, "metadata": metadata})
    words = _words(text, reply)
    if words:
        row: dict[str, Any] = {"role": "assistant", "content": words}
        if reply.phase == "failed":
            row["options"] = [
                {"label": text("chat.retry"), "value": "retry"},
                {"label": text("chat.retry_base"), "value": "retry_base"},
            ]
        rows.append(row)
    return rows


def _words(text: Texts, reply: Reply) -> str:
    """The answer's text with, below it, how it ended where that was not by itself."""
    notes = {
        "failed": _failure(text, reply),
        "stopped": text("chat.stopped" if reply.text else "chat.stopped_early"),
        "done": "" if reply.text.strip() else text("chat.no_words"),
    }
    note = notes.get(reply.phase, "")
    if reply.finish_reason == "length" and reply.phase == "done":
        note = text("chat.cut", tokens=reply.num_answer_tokens)
    return "\n\n".join(part for part in (reply.text, note) if part)


def _failure(text: Texts, reply: Reply) -> str:
    key = "chat.failed_midway" if reply.text else "chat.failed"
    return text(key, reason=plain(reply.error or ""), next=text("chat.failed_next"))
