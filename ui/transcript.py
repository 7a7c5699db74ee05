"""What is said in a recording, by an adapter and by the base model: the record and how it is drawn.

Owns `Transcription`. Knows nothing of Gradio or of the engine; `ui/transcribe` calls it. Words of strangers are escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote

from api.subtitles import write_srt, write_vtt
from api.transcript import TranscriptSegment
from engine.routing import NONE
from ui.comparison import download_link
from ui.differences import Kind, compare_parts, stretches_html, word_errors
from ui.receipt import Reply, mark_html, reason_in_words, short_digest, status_in_words
from ui.text import Texts

# What a mark means: its kind, and the key of its words.
AGAINST_REFERENCE: tuple[tuple[Kind, str], ...] = (
    ("added", "transcribe.not_in_reference"),
    ("removed", "transcribe.only_in_reference"),
)
AGAINST_OTHER: tuple[Kind, str] = ("added", "transcribe.not_in_other")


@dataclass
class Transcript:
    """One transcript as it grows; `partial` is the text of the segment that is being written, times are in seconds."""

    lora: str
    reply: Reply = field(default_factory=lambda: Reply(new_media="audio", media="audio"))
    segments: list[TranscriptSegment] = field(default_factory=list)
    partial: str = ""
    duration_s: float = 0.0
    num_segments: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every segment is there."""
        return self.reply.receipt is not None and len(self.segments) == self.num_segments


@dataclass
class Transcription:
    """A recording with its transcripts, the adapter's first; `reference` is what was really said, if it is known."""

    audio: Path | None = None
    reference: str = ""
    columns: list[Transcript] = field(default_factory=list)

    def other(self, column: Transcript) -> Transcript | None:
        """The transcript beside this one, if there is one."""
        return next((each for each in self.columns if each is not column), None)


def player_html(audio: Path) -> str:
    """What plays segments; the page's script drives it. The address is relative, so that it holds behind a prefix."""
    return f"<audio preload='auto' src='gradio_api/file={escape(quote(str(audio)))}'></audio>"


def transcription_html(text: Texts, transcription: Transcription) -> str:
    """The transcripts side by side; a hint before there are any."""
    if not transcription.columns:
        title, body = escape(text("transcribe.empty_title")), escape(text("transcribe.empty_body"))
        return f"<p class='empty dashed'><strong>{title}</strong>{body}</p>"
    columns = "".join(_column(text, transcription, column) for column in transcription.columns)
    return f"<div class='side-by-side'>{columns}</div>"


def _column(text: Texts, transcription: Transcription, column: Transcript) -> str:
    reply = column.reply
    receipt = reply.receipt
    name = None if column.lora == NONE or receipt is None else receipt.name
    title = _title(text, column, name)
    reason = reason_in_words(text, reply) if receipt and column.lora != NONE else ""
    digest = short_digest(receipt.generation) if receipt else ""
    words, note, legend = _words(text, transcription, column)
    return (
        f"<article data-lora='{escape(column.lora)}' aria-label='{escape(title)}'>"
        f"<h3>{mark_html(name)}{escape(title)} <code>{digest}</code></h3>"
        f"<p class='quiet' data-figures>{escape(_progress_line(text, reply))}</p>{_progress(text, column)}"
        f"<p class='quiet'>{escape(reason)}</p><div class='words'>{words}</div>"
        f"<p class='quiet' data-note>{escape(note)}</p>{_legend_html(text, legend)}"
        f"{_downloads(text, transcription, column, title)}</article>"
    )


def _progress_line(text: Texts, reply: Reply) -> str:
    """What an answer waits for, or its figures."""
    shown = [] if reply.phase == "done" else [status_in_words(text, reply)]
    if reply.first_token_s is not None:
        shown.append(text("compare.first", time=text.duration(reply.first_token_s)))
    if reply.tokens_per_s is not None:
        shown.append(text("receipt.speed", speed=f"{reply.tokens_per_s:.1f}"))
    if reply.is_final and reply.num_answer_tokens:
        shown.append(text("receipt.detail.tokens_value", tokens=reply.num_answer_tokens))
    return " · ".join(shown)


def _title(text: Texts, column: Transcript, name: str | None) -> str:
    if column.lora == NONE:
        return text("transcribe.without")
    return name or text("transcribe.with" if column.reply.receipt is None else "receipt.base")


def _progress(text: Texts, column: Transcript) -> str:
    """A bar while a long recording is being heard; its line stays afterwards, so that nothing moves up."""
    if column.num_segments < 2:
        return ""
    if column.is_whole:
        words = text("transcribe.segments", total=column.num_segments, duration=clock(column.duration_s))
        return f"<p class='quiet'>{escape(words)}</p>"
    done, total = len(column.segments), column.num_segments
    at = column.segments[-1].end if column.segments else 0.0
    words = text("transcribe.progress", done=done, total=total, at=clock(at), duration=clock(column.duration_s))
    return f"<p class='quiet'><progress value='{done}' max='{total}' aria-label='{escape(words)}'></progress> {escape(words)}</p>"


def clock(seconds: float) -> str:
    """`1:05` or `1:02:07`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _legend_html(text: Texts, legend: Sequence[tuple[Kind, str]]) -> str:
    """What each colour means, on that colour."""
    marks = "".join(f"<span class='{kind}'>{escape(text(key))}</span> " for kind, key in legend)
    return f"<p class='quiet' data-legend>{marks}</p>" if marks else ""


def _words(text: Texts, transcription: Transcription, column: Transcript) -> tuple[str, str, list[tuple[Kind, str]]]:
    """The segments, marked against the reference or else against the other transcript; a note; the marks that occur."""
    reply, other = column.reply, transcription.other(column)
    said = [segment.text for segment in column.segments]
    trouble = f"<p class='trouble'>{escape(reply.error or '')}</p>" if reply.phase == "failed" else ""
    if not column.is_whole or trouble:
        plain = [escape(segment) for segment in said]
        return trouble + _segments(text, column, plain) + escape(column.partial), "", []
    if not said:
        return "", text("transcribe.silent"), []
    if transcription.reference.strip():
        errors = word_errors(transcription.reference, "\n".join(said))
        note = text(
            "transcribe.wer", rate=f"{errors.rate:.1%}", errors=errors.num_edits, words=errors.num_words,
            wrong=errors.num_substitutions, missing=errors.num_deletions, added=errors.num_insertions,
        )  # fmt: skip
        marked = compare_parts(transcription.reference.strip(), said, folds=True)
        drawn = [stretches_html(stretches, shows_removed=True) for stretches in marked]
        kinds = _kinds(marked)
        return _segments(text, column, drawn), note, [(kind, key) for kind, key in AGAINST_REFERENCE if kind in kinds]
    if other is None or not other.is_whole:
        return _segments(text, column, [escape(segment) for segment in said]), "", []
    marked = compare_parts("\n".join(segment.text for segment in other.segments), said)
    drawn = [stretches_html(stretches, shows_removed=False) for stretches in marked]
    kinds = _kinds(marked)
    if "added" in kinds:
        return _segments(text, column, drawn), "", [AGAINST_OTHER]
    note = text("transcribe.shorter" if "removed" in kinds else "transcribe.same")
    return _segments(text, column, drawn), note, []


def _kinds(marked: Sequence[Sequence[tuple[Kind, str]]]) -> set[Kind]:
    return {kind for stretches in marked for kind, _ in stretches}


def _segments(text: Texts, column: Transcript, shown: Sequence[str]) -> str:
    """Each segment with a button that plays it."""
    rows = []
    for segment, words in zip(column.segments, shown, strict=True):
        start, end = clock(segment.start), clock(segment.end)
        label = escape(text("transcribe.play", start=start, end=end))
        button = (
            f"<button type='button' class='time' data-play-from='{segment.start:.3f}' data-play-to='{segment.end:.3f}' "
            f"aria-label='{label}'>{start}</button>"
        )
        rows.append(f"<p class='segment'>{button}<span>{words.strip()}</span></p>")
    return "".join(rows)


def _downloads(text: Texts, transcription: Transcription, column: Transcript, title: str) -> str:
    if not column.reply.is_final or not column.reply.text.strip():
        return ""
    stem = transcription.audio.stem if transcription.audio else "transcript"
    files = {
        "txt": ("text/plain", column.reply.text.strip() + "\n"),
        "srt": ("application/x-subrip", write_srt(column.segments)),
        "vtt": ("text/vtt", write_vtt(column.segments)),
    }
    links = [
        download_link(
            text(f"transcribe.{kind}"), f"{stem}.{kind}", media_type, content,
            hint=text("transcribe.download", kind=text(f"transcribe.{kind}"), name=title),
        )
        for kind, (media_type, content) in files.items()
    ]  # fmt: skip
    return f"<div class='ending'>{''.join(links)}</div>"
