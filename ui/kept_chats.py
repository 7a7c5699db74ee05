"""Export and earlier conversations beside the chat: the components, and what their buttons do. Called by `ui/chat`.

The records are `ui/history`'s; they live in the visitor's browser and pass through here.
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from ui.adapter_table import TABLE_SCRIPT
from ui.conversation import Conversation
from ui.history import Record, export_html, from_record, history_html, keep
from ui.page import Page
from ui.text import Texts

Update = dict[Any, Any]


class KeptChats:
    """What becomes of conversations."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def build(self) -> None:
        """Create the components inside the current column."""
        self.export = gr.HTML("", elem_id="chat-export", padding=False, apply_default_css=False)
        self.records = gr.BrowserState([], storage_key="switchboard-conversations", secret="switchboard")
        with gr.Accordion(self._page.label("history.title"), open=False, elem_id="chat-history"):
            self.list = gr.HTML("", padding=False, apply_default_css=False, js_on_load=TABLE_SCRIPT)

    @property
    def outputs(self) -> list[Any]:
        """The components that change when records do."""
        return [self.records, self.list]

    def drawn(self, text: Texts, records: list[Record] | None, conversation: Conversation) -> Update:
        """The list, without touching what the browser keeps."""
        return {self.list: history_html(text, records or [], conversation.key)}

    def keep(self, text: Texts, records: list[Record] | None, conversation: Conversation) -> Update:
        """The conversation as it is now goes into the browser."""
        return self._stored(text, keep(records or [], conversation), conversation)

    def links(self, text: Texts, conversation: Conversation) -> Update:
        """The links that export the conversation."""
        return {self.export: export_html(text, conversation)}

    def act(self, text: Texts, records: list[Record] | None, conversation: Conversation, event: gr.EventData) -> Update:
        """A button of the list pressed: `conversation` becomes the one that is opened."""
        kept = records or []
        if event.act == "open":
            found = next((record for record in kept if record.get("key") == event.name), None)
            restored = from_record(found) if found is not None else None
            if restored is not None:
                conversation.clear()
                conversation.turns[:], conversation.key = restored.turns, restored.key
        elif event.act == "delete":
            kept = [record for record in kept if record.get("key") != event.name]
        elif event.act == "delete_all":
            kept = []
        return self._stored(text, kept, conversation)

    def _stored(self, text: Texts, records: list[Record], conversation: Conversation) -> Update:
        return {self.records: records} | self.drawn(text, records, conversation)
