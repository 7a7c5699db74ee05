"""The box that messages are written in, and the lines of help below it.

Owns what may be attached: the media that the model takes. The page's script tells of files that it does not take; what reaches
the server all the same is refused by `ui/message_check`. Called by `ui/chat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import gradio as gr

from engine.routing import AUTO
from ui.media import attachments, media_kind
from ui.page import Page
from ui.text import Texts

Update = dict[Any, Any]


class Composer:
    """Text, files and microphone, with a hint below."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def build(self) -> None:
        """Create the components inside the current column."""
        takes = sorted(self._page.modalities)
        hears = self._page.takes_audio
        self.box = gr.MultimodalTextbox(
            elem_id="composer",
            label=self._page.label("chat.composer"),
            show_label=False,
            placeholder=self.placeholder(self._page.text),
            sources=["upload", "microphone"] if hears else ["upload"] if takes else [],
            file_types=takes or None,
            file_count="multiple",
            max_plain_text_length=1_000_000,
            max_lines=8,
            autofocus=True,
            html_attributes=gr.InputHTMLAttributes(autocomplete="off"),
        )
        self.hint = gr.HTML("", elem_id="composer-hint", padding=False, apply_default_css=False)
        # Filled by the page's script, which reads there what the model takes.
        gr.HTML(
            f"<div id='attach-hint' role='status' data-takes='{' '.join(takes)}'></div>", padding=False,
            apply_default_css=False,
        )  # fmt: skip

    def placeholder(self, text: Texts) -> str:
        """What the empty box says."""
        return text(f"chat.placeholder_{media_kind(self._page.modalities)}")

    def greeting(self, text: Texts) -> str:
        """What the empty conversation says (HTML)."""
        words = text(f"chat.empty_{media_kind(self._page.modalities)}")
        return f"<div class='greeting'><h2>{escape(text('chat.empty_title'))}</h2><p>{escape(words)}</p></div>"

    def say(self, words: str, *, undo: str = "") -> Update:
        """A sentence below the box, or none; `undo` names a button that puts a deleted message back."""
        button = f" <button type='button' class='plain' data-restore-turn>{escape(undo)}</button>" if undo else ""
        kind = " class='told'" if undo else ""
        return {self.hint: f"<p role='status'{kind}>{escape(words)}{button}</p>" if words else ""}

    async def prefetch(self, message: dict[str, Any], lora: str, request: gr.Request) -> None:
        """A file attached: the adapter that answers it by itself is brought into memory before the message is sent."""
        if lora != AUTO or not message["files"]:
            return
        modalities = {attached.modality for attached in attachments(message["files"])}
        name = default_for(self._page.service_for(request).default_mm_loras, modalities)
        if name:
            await self._page.service_for(request).prefetch_adapter(name)


def default_for(defaults: Mapping[str, str], modalities: set[Any]) -> str:
    """The one adapter that answers these media by itself; empty where none or several would."""
    names = {defaults[modality] for modality in modalities if modality in defaults}
    return names.pop() if len(names) == 1 else ""
