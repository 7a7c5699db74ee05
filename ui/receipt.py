"""A receipt in words: which adapter answered, why, and what it cost.

Owns `Reply`, the true record of one answer, and its renderings: the line above an answer, the details behind it and the
card beside the conversation. Everything a stranger may have named is escaped here. Knows nothing of Gradio components;
`ui/conversation` and the tabs call it.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from html import escape
from typing import Literal

from engine.request import FinishReason, Receipt
from ui.text import Texts

Phase = Literal["preparing", "loading", "queued", "reading", "answering", "done", "stopped", "failed"]
FINAL_PHASES = frozenset({"done", "stopped", "failed"})
DIGEST_LENGTH = 8
NUM_HUES = 16  # colours in the style sheet


@dataclass
class Reply:
    """One answer as it grows; the display is always derived from it and never read back.

    Times are in seconds: `first_token_s` from sending to the first token, `generation_s` from the first token to the last.
    """

    phase: Phase = "preparing"
    text: str = ""
    error: str | None = None
    receipt: Receipt | None = None
    request_id: str = ""
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0
    num_waiting: int = 0
    first_token_s: float | None = None
    generation_s: float = 0.0
    finish_reason: FinishReason | None = None
    # Modalities of the message, and of the whole prompt: `audio+image`.
    new_media: str = ""
    media: str = ""
    # The adapter that will probably answer, and how long the answer has been without a receipt (seconds).
    expected: str = ""
    waited_s: float = 0.0

    @property
    def is_final(self) -> bool:
        """Whether nothing more will come."""
        return self.phase in FINAL_PHASES

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed; None before there are two tokens to measure between."""
        if self.num_answer_tokens < 2 or self.generation_s <= 0:
            return None
        return (self.num_answer_tokens - 1) / self.generation_s


def short_digest(generation: str | None) -> str:
    """`sha256:3f2a91c0d1…` -> `3f2a91c0`; empty for the base model."""
    return (generation or "").removeprefix("sha256:")[:DIGEST_LENGTH]


def plain(name: str) -> str:
    """A name that shows as it is inside Markdown and HTML."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~$])", r"\\\1", escape(name, quote=False))


def reason_in_words(text: Texts, reply: Reply) -> str:
    """Why this adapter answered."""
    receipt = reply.receipt
    assert receipt is not None
    kind, _, rest = receipt.reason.partition(":")
    if kind == "default":
        decisive = rest.split("+")
        return text(
            f"receipt.reason.default_{_age(reply, decisive)}", media=text.media(decisive), name=receipt.name or ""
        )
    if kind == "conflict":
        claims = [(media, name) for media, _, name in (claim.partition("=") for claim in rest.split(","))]
        phrases = [text("receipt.reason.claim", media=text.media([media]), name=name) for media, name in claims]
        return text("receipt.reason.conflict", claims=text("receipt.and").join(phrases))
    if kind == "base":
        return (
            text("receipt.reason.base_media", media=text.media(reply.media.split("+")))
            if reply.media
            else text("receipt.reason.base")
        )
    return text(f"receipt.reason.{kind}") if kind in ("explicit", "opt-out") else receipt.reason


def _age(reply: Reply, modalities: list[str]) -> str:
    """Whether the media that decided came with the message, stand in earlier ones, or both."""
    new = set(reply.new_media.split("+")) & set(modalities)
    return "old" if not new else "new" if new == set(modalities) else "both"


def status_in_words(text: Texts, reply: Reply) -> str:
    """What an unfinished answer is waiting for."""
    if reply.phase == "queued" and reply.num_waiting > 1:
        return text("phase.queued_behind", waiting=reply.num_waiting - 1)
    return text(f"phase.{reply.phase}", name=reply.expected)


def figures(text: Texts, reply: Reply) -> list[str]:
    """The short figures of a receipt, in reading order; what is not known yet is left out."""
    receipt = reply.receipt
    assert receipt is not None
    shown = []
    if receipt.name and receipt.load_ms > 0:
        shown.append(text("receipt.load", ms=text.duration(receipt.load_ms / 1000)))
    elif receipt.name:
        shown.append(text("receipt.loaded"))
    if reply.phase not in ("preparing", "loading", "queued"):
        shown.append(text("receipt.queue", ms=text.duration(receipt.queue_ms / 1000)))
    if reply.tokens_per_s is not None:
        shown.append(text("receipt.speed", speed=f"{reply.tokens_per_s:.0f}"))
    if reply.num_answer_tokens:
        shown.append(text("receipt.cached", cached=receipt.cached_tokens, prompt=reply.num_prompt_tokens))
    return shown


def receipt_title(text: Texts, reply: Reply) -> str:
    """The name in bold above an answer (Markdown)."""
    if reply.receipt is None:
        key = "preparing_media" if reply.phase == "preparing" and reply.new_media else reply.phase
        waiting = text(f"phase.{key}", name=plain(reply.expected), media=text.media(reply.new_media.split("+")))
        return f"{waiting} {text.duration(reply.waited_s)}" if reply.waited_s else waiting
    return f"{mark_html(reply.receipt.name)}{plain(reply.receipt.name or text('receipt.base'))}"


def mark_html(name: str | None) -> str:
    """The coloured square of an adapter, the same wherever and whenever its name is shown; grey for the base model."""
    return f"<span class='mark {hue_of(name)}'></span>"


def hue_of(name: str | None) -> str:
    """The class that gives an adapter's colour; None is the base model."""
    return "base" if name is None else f"hue-{zlib.crc32(name.encode()) % NUM_HUES}"


def receipt_line(text: Texts, reply: Reply) -> str:
    """The grey text beside the name: digest and reason, then the figures on a line of their own."""
    if reply.receipt is None:
        return ""
    first = [short_digest(reply.receipt.generation), reason_in_words(text, reply)]
    second = figures(text, reply)
    if not reply.is_final:
        second.insert(0, status_in_words(text, reply))
    return "\n".join(" · ".join(part for part in line if part) for line in (first, second))


def detail_rows(text: Texts, reply: Reply) -> list[tuple[str, str]]:
    """Label and value of everything that is known about an answer, as plain text."""
    receipt = reply.receipt
    if receipt is None:
        return []
    rows = [("adapter", receipt.name or text("receipt.base"))]
    if receipt.generation:
        rows.append(("generation", receipt.generation))
    rows.append(("reason", receipt.reason))
    rows.append(("load", text.duration(receipt.load_ms / 1000)))
    rows.append(("queue", text.duration(receipt.queue_ms / 1000)))
    if reply.first_token_s is not None:
        rows.append(("first", text.duration(reply.first_token_s)))
    if reply.tokens_per_s is not None:
        rows.append(("speed", text("receipt.speed", speed=f"{reply.tokens_per_s:.1f}")))
    rows.append(("tokens", text("receipt.detail.tokens_value", tokens=reply.num_answer_tokens)))
    cached = text("receipt.detail.cached_value", cached=receipt.cached_tokens, prompt=reply.num_prompt_tokens)
    rows.append(("cached", cached))
    rows.append(("request", reply.request_id))
    return [(text(f"receipt.detail.{key}"), value) for key, value in rows]


def receipt_details(text: Texts, reply: Reply) -> str:
    """What a click on the receipt opens (Markdown)."""
    return "\n".join(f"- {label}: {plain(value)}" for label, value in detail_rows(text, reply))


def last_answer_card(text: Texts, reply: Reply | None) -> str:
    """The card beside the conversation (HTML, escaped)."""
    heading = f"<h2>{escape(text('chat.last'))}</h2>"
    if reply is None or reply.receipt is None:
        return f"<section class='last-answer'>{heading}{_without_receipt(text, reply)}</section>"
    kind = reply.receipt.reason.partition(":")[0]
    tag = text("receipt.tag." + {"explicit": "chosen", "opt-out": "chosen", "conflict": "conflict"}.get(kind, "auto"))
    digest = short_digest(reply.receipt.generation)
    name = escape(reply.receipt.name or text("receipt.base"))
    wanted = ("first", "speed", "tokens", "load", "queue", "cached")
    labels = [text(f"receipt.detail.{key}") for key in wanted]
    values = dict(detail_rows(text, reply))
    cells = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(values[label])}</dd></div>" for label in labels if label in values
    )
    code = f"<code title='{escape(reply.receipt.generation or '')}'>{digest}</code>" if digest else ""
    return (
        f"<section class='last-answer'>{heading}"
        f"<p class='answered-by'>{mark_html(reply.receipt.name)}<strong>{name}</strong>"
        f"<span class='chip plain'>{escape(tag)}</span>{_failed_chip(text, reply)}</p>"
        f"<p class='quiet'>{code} {escape(reason_in_words(text, reply))}</p>{_trouble(reply)}<dl>{cells}</dl></section>"
    )


def _without_receipt(text: Texts, reply: Reply | None) -> str:
    """The card's body where no adapter has been decided on: nothing asked yet, still preparing, or a failure."""
    if reply is not None and reply.phase == "failed":
        title = escape(text("chat.last_failed"))
        return f"<p class='answered-by'><strong>{title}</strong>{_failed_chip(text, reply)}</p>{_trouble(reply)}"
    words = text("chat.last_empty")
    if reply is not None:
        words = text("chat.last_stopped") if reply.is_final else receipt_title(text, reply)
    return f"<p class='quiet'>{escape(words)}</p>"


def _failed_chip(text: Texts, reply: Reply) -> str:
    return f"<span class='chip bad'>{escape(text('receipt.tag.failed'))}</span>" if reply.phase == "failed" else ""


def _trouble(reply: Reply) -> str:
    return f"<p class='quiet'>{escape(reply.error)}</p>" if reply.phase == "failed" and reply.error else ""
