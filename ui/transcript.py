"""What is said in a recording, by an adapter and by the base model: the record and how it is drawn.

Owns `Transcription`. Knows nothing of Gradio or of the engine; `ui/transcribe` calls it. Words of strangers are escaped here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from engine.routing import NONE
from ui.comparison import Column, download_link, progress_line
from ui.differences import marked_html, word_errors
from ui.receipt import Reply, mark_html, reason_in_words, short_digest
from ui.text import Texts


@dataclass
class Transcription:
    """A recording with its transcripts, the adapter's first; `reference` is what was really said, if it is known."""

    audio: Path | None = None
    reference: str = ""
    columns: list[Column] = field(default_factory=list)

    @property
    def base(self) -> Reply | None:
        """The transcript without an adapter, if it was asked for."""
        return next((column.reply for column in self.columns if column.lora == NONE), None)


def transcription_html(text: Texts, transcription: Transcription) -> str:
    """The transcripts side by side; a hint before there are any."""
    if not transcription.columns:
        title, body = escape(text("transcribe.empty_title")), escape(text("transcribe.empty_body"))
        return f"<p class='empty dashed'><strong>{title}</strong>{body}</p>"
    columns = "".join(_column(text, transcription, column) for column in transcription.columns)
    return f"<div class='side-by-side'>{columns}</div>"


def _column(text: Texts, transcription: Transcription, column: Column) -> str:
    reply = column.reply
    receipt = reply.receipt
    name = None if column.lora == NONE or receipt is None else receipt.name
    title = text("transcribe.without") if column.lora == NONE else name or text("transcribe.with")
    if column.lora != NONE and receipt is not None and name is None:
        title = text("receipt.base")
    reason = reason_in_words(text, reply) if receipt and column.lora != NONE else ""
    digest = short_digest(receipt.generation) if receipt else ""
    words, note = _words(text, transcription, column)
    link = ""
    if reply.is_final and reply.text.strip():
        stem = transcription.audio.stem if transcription.audio else "transcript"
        link = download_link(
            text("transcribe.txt"), f"{stem}.txt", "text/plain;charset=utf-8", reply.text.strip() + "\n"
        )
    return (
        f"<article data-lora='{escape(column.lora)}' aria-label='{escape(title)}'>"
        f"<h3>{mark_html(name)}{escape(title)} <code>{digest}</code></h3>"
        f"<p class='quiet' data-figures>{escape(progress_line(text, reply))}</p>"
        f"<p class='quiet'>{escape(reason)}</p><div class='words'>{words}</div>"
        f"<p class='quiet' data-note>{escape(note)}</p><div class='ending'>{link}</div></article>"
    )


def _words(text: Texts, transcription: Transcription, column: Column) -> tuple[str, str]:
    """The transcript, marked against the reference or else against the base model's; and what the marks mean."""
    reply, base = column.reply, transcription.base
    if reply.phase == "failed":
        return f"<p class='trouble'>{escape(reply.error or '')}</p>{escape(reply.text)}", ""
    if not reply.is_final:
        return escape(reply.text), ""
    if transcription.reference.strip():
        errors = word_errors(transcription.reference, reply.text)
        note = text("transcribe.wer", rate=f"{errors.rate:.1%}", edits=errors.num_edits, words=errors.num_words)
        return marked_html(transcription.reference.strip(), reply.text, shows_removed=True, folds=True), note
    if base is None or base is reply or not base.is_final or base.phase == "failed":
        return escape(reply.text), ""
    if base.text.strip() == reply.text.strip():
        return escape(reply.text), text("compare.same")
    return marked_html(base.text, reply.text, shows_removed=True), text("transcribe.marked")
