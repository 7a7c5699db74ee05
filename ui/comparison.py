"""One prompt and its answers by several adapters: the record, how it is drawn, and its export.

Owns `Comparison`. Everything that a stranger may have written is escaped here. Knows nothing of Gradio or of the engine;
`ui/compare` calls it.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from engine.request import AudioPart, ImagePart, Message, Part, TextPart
from engine.routing import NONE
from ui.differences import marked_html
from ui.receipt import Reply, mark_html, reason_in_words, short_digest, status_in_words
from ui.text import Texts

MAX_IN_A_ROW = 4
VOTE_SCRIPT = """
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-vote]');
  if (button) trigger('vote', { lora: button.dataset.vote });
});
"""


@dataclass
class Column:
    """The answer of one adapter, or of the base model where `lora` is `none`."""

    lora: str
    reply: Reply = field(default_factory=Reply)

    def title(self, text: Texts) -> str:
        """The name to show."""
        return text("receipt.base") if self.lora == NONE else self.lora


@dataclass
class Comparison:
    """A prompt with its columns, the base model's first; and the votes of this browser tab, which outlive a prompt."""

    prompt: str = ""
    system: str = ""
    audio: tuple[Path, ...] = ()
    images: tuple[Path, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    columns: list[Column] = field(default_factory=list)
    best: str | None = None
    votes: Counter[str] = field(default_factory=Counter)

    @property
    def is_final(self) -> bool:
        """Whether there are answers and all have ended."""
        return bool(self.columns) and all(column.reply.is_final for column in self.columns)

    def messages(self) -> list[Message]:
        """What each of the models gets."""
        parts: list[Part] = [ImagePart(path, param=path.name) for path in self.images]
        parts += [AudioPart(path, param=path.name) for path in self.audio]
        content = [*parts, TextPart(self.prompt)] if self.prompt else parts
        system = [Message("system", self.system)] if self.system.strip() else []
        return [*system, Message("user", content if parts else self.prompt)]

    def vote(self, lora: str) -> None:
        """Call one answer the best; a second press takes it back. Names that are not in the comparison change nothing."""
        if not self.is_final or all(column.lora != lora for column in self.columns):
            return
        if self.best is not None:
            self.votes[self.best] -= 1
        self.best = None if self.best == lora else lora
        if self.best is not None:
            self.votes[self.best] += 1

    def rows(self) -> list[dict[str, Any]]:
        """The export: one record for each answer; times in seconds."""
        return [_row(column, self.best) for column in self.columns]

    def to_json(self) -> str:
        """The whole comparison."""
        record = {
            "prompt": self.prompt,
            "system": self.system,
            "audio": [path.name for path in self.audio],
            "images": [path.name for path in self.images],
            "sampling": self.sampling,
            "answers": self.rows(),
        }
        return json.dumps(record, ensure_ascii=False, indent=2)

    def to_csv(self) -> str:
        """The answers as a table; cells that a spreadsheet would take for a formula are quoted with an apostrophe."""
        sheet = io.StringIO()
        media = "; ".join(path.name for path in (*self.images, *self.audio))
        rows = [{"prompt": self.prompt, "media": media, **row} for row in self.rows()]
        writer = csv.DictWriter(sheet, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _cell(value) for key, value in row.items()})
        return sheet.getvalue()


def _row(column: Column, best: str | None) -> dict[str, Any]:
    reply, receipt = column.reply, column.reply.receipt
    return {
        "adapter": None if column.lora == NONE else column.lora,
        "generation": receipt.generation if receipt else None,
        "reason": receipt.reason if receipt else None,
        "answer": reply.text,
        "ended": reply.finish_reason or reply.phase,
        "error": reply.error,
        "first_token_s": None if reply.first_token_s is None else round(reply.first_token_s, 4),
        "tokens_per_s": None if reply.tokens_per_s is None else round(reply.tokens_per_s, 2),
        "prompt_tokens": reply.num_prompt_tokens,
        "answer_tokens": reply.num_answer_tokens,
        "is_best": column.lora == best,
    }


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def comparison_html(text: Texts, comparison: Comparison) -> str:
    """The columns, then votes and downloads once all have ended; a hint before there are any."""
    if not comparison.columns:
        title, body = escape(text("compare.empty_title")), escape(text("compare.empty_body"))
        return f"<p class='empty dashed'><strong>{title}</strong>{body}</p>"
    base = comparison.columns[0].reply
    columns = "".join(_column(text, comparison, column, base) for column in comparison.columns)
    many = " many" if len(comparison.columns) > MAX_IN_A_ROW else ""
    return f"<div class='side-by-side{many}'>{columns}</div>{_ending(text, comparison)}"


def _column(text: Texts, comparison: Comparison, column: Column, base: Reply) -> str:
    reply = column.reply
    digest = short_digest(reply.receipt.generation) if reply.receipt else ""
    is_best = comparison.best == column.lora
    body, note = _body(text, column, base)
    reason = escape(reason_in_words(text, reply)) if reply.receipt and column.lora != NONE else ""
    return (
        f"<article data-lora='{escape(column.lora)}' class='{'best' if is_best else ''}' "
        f"aria-label='{escape(column.title(text))}'>"
        f"<header><h3>{mark_html(None if column.lora == NONE else column.lora)}{escape(column.title(text))} "
        f"<code title='{reason}'>{digest}</code></h3>{_vote(text, comparison, column)}</header>{_figures(text, reply)}"
        f"<p class='quiet' data-note>{escape(note)}</p>"
        f"<div class='words{'' if reply.is_final else ' growing'}' role='group' tabindex='0' "
        f"aria-label='{escape(column.title(text))}'><div>{body}</div></div></article>"
    )


def _vote(text: Texts, comparison: Comparison, column: Column) -> str:
    """The button is there from the start, so that nothing moves when it can be pressed."""
    is_best = comparison.best == column.lora
    is_locked = not comparison.is_final or column.reply.phase == "failed"
    label = escape(text("compare.vote_label", name=column.title(text)))
    return (
        f"<button type='button' data-vote='{escape(column.lora)}' aria-pressed='{str(is_best).lower()}' "
        f"aria-label='{label}'{' disabled' if is_locked else ''}>"
        f"{escape(text('compare.voted' if is_best else 'compare.vote'))}</button>"
    )


def _figures(text: Texts, reply: Reply) -> str:
    """What an answer waits for, or how it went: three figures, which keep their places from the start."""
    speed = None if reply.tokens_per_s is None else text("receipt.speed", speed=f"{reply.tokens_per_s:.1f}")
    cells = (
        ("first", None if reply.first_token_s is None else text.duration(reply.first_token_s)),
        ("speed", speed),
        ("tokens", text("receipt.detail.tokens_value", tokens=reply.num_answer_tokens)),
    )
    shown = "".join(
        f"<div><dt>{escape(text(f'receipt.detail.{key}'))}</dt><dd>{escape(value or '–')}</dd></div>"
        for key, value in cells
    )
    status = text("phase.done") if reply.phase == "done" else status_in_words(text, reply)
    kinds = {"failed": "bad", "stopped": "warn", "done": "good"}
    return (
        f"<p class='state'><span class='chip {kinds.get(reply.phase, 'plain')}'>{escape(status)}</span></p>"
        f"<dl data-figures>{shown}</dl>"
    )


def _body(text: Texts, column: Column, base: Reply) -> tuple[str, str]:
    """The words with differences marked once both have ended, and a note below them."""
    reply = column.reply
    if reply.phase == "failed":
        return f"<p class='trouble'>{escape(reply.error or '')}</p>{escape(reply.text)}", ""
    if column.reply is base or not (base.is_final and reply.is_final) or base.phase == "failed":
        return escape(reply.text), ""
    if reply.text.strip() == base.text.strip():
        return escape(reply.text), text("compare.same")
    marked = marked_html(base.text, reply.text)
    return marked, text("compare.marked" if "<ins>" in marked else "compare.shorter")


def _ending(text: Texts, comparison: Comparison) -> str:
    if not comparison.is_final:
        return ""
    names = {NONE: text("receipt.base")}
    tally = [f"{names.get(lora, lora)} {count}" for lora, count in comparison.votes.most_common() if count > 0]
    votes = text("compare.votes", tally=", ".join(tally)) if tally else text("compare.no_votes")
    links = "".join(
        download_link(text(f"compare.{kind}"), f"comparison.{kind}", media_type, content)
        for kind, media_type, content in (
            ("json", "application/json", comparison.to_json()),
            ("csv", "text/csv", comparison.to_csv()),
        )
    )
    return f"<div class='ending'><p class='quiet' role='status'>{escape(votes)}</p>{links}</div>"


def download_link(label: str, name: str, media_type: str, content: str, *, hint: str = "") -> str:
    """A link that holds the file itself, so that nothing of it is kept on the server; `hint` is its longer name."""
    coded = base64.b64encode(content.encode()).decode()
    named = f" aria-label='{escape(hint)}'" if hint else ""
    target = f"data:{media_type};charset=utf-8;base64,{coded}"
    return f"<a class='button' download='{escape(name)}' href='{target}'{named}>{escape(label)}</a>"
