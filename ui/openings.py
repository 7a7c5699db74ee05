"""The ways into an answer: Send, an example, Retry, Edit, a button under a failure. Each prepares the conversation.

Owns what happens before the answer, and whether there is one. Draws nothing and streams nothing. Called by `ui/chat`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from engine.routing import NONE
from ui.adapter_panel import AdapterPanel
from ui.composer import Composer
from ui.conversation import Conversation
from ui.examples import Example
from ui.message_check import message_problem
from ui.page import Page
from ui.text import Texts

# Component -> its value, as Gradio hands both to a callback that asks for a set of inputs.
Values = dict[Any, Any]
Update = dict[Any, Any]


@dataclass(frozen=True)
class Opening:
    """What a callback does before the answer: an update, whether an answer follows, and by which adapter if not the menu's."""

    update: Update
    is_ready: bool = True
    lora: str | None = None


class Openings:
    """Prepares conversations; `state` is the component that holds a visitor's."""

    def __init__(
        self, page: Page, state: gr.State, composer: Composer, panel: AdapterPanel, examples: list[Example]
    ) -> None:
        self._page = page
        self._state = state
        self._composer = composer
        self._panel = panel
        self._examples = examples

    def send(self, text: Texts, values: Values, _: gr.EventData) -> Opening:
        """Submit pressed."""
        message = values[self._composer.box]
        words = (message.get("text") or "").strip()
        files = tuple(Path(file) for file in message.get("files") or [])
        if problem := message_problem(text, words, files, self._page.modalities):
            return Opening(self._composer.say(problem), is_ready=False)
        values[self._state].begin(words, files)
        return Opening({self._composer.box: gr.update(value={"text": "", "files": []})})

    def send_example(self, text: Texts, values: Values, event: gr.EventData) -> Opening:
        """A card of the empty conversation pressed: it sends itself, and sets the adapter menu to what answers it."""
        example = self._examples[row_of(event.index)]
        values[self._state].begin(example.text, (example.audio,) if example.audio else ())
        return Opening({self._panel.adapter: gr.update(value=example.lora)}, lora=example.lora)

    def retry(self, text: Texts, values: Values, event: gr.EventData) -> Opening:
        """Answer a message again; what came after it goes."""
        return self._again(text, values, row_of(event.index))

    def edit(self, text: Texts, values: Values, event: gr.EventData) -> Opening:
        """Answer a changed message; its media stay, and what came after it goes."""
        return self._again(text, values, row_of(event.index), str(event.value).strip())

    def retry_option(self, text: Texts, values: Values, event: gr.EventData) -> Opening:
        """A button under a failed answer pressed."""
        opening = self._again(text, values, len(values[self._state].display(text)) - 1)
        if event.value == "retry_base":
            return Opening({self._panel.adapter: gr.update(value=NONE)}, opening.is_ready, NONE)
        return opening

    def _again(self, text: Texts, values: Values, row: int, words: str | None = None) -> Opening:
        conversation: Conversation = values[self._state]
        if not conversation.turns:
            return Opening({self._composer.hint: ""}, is_ready=False)
        turn_index = conversation.turn_at(row)
        turn = conversation.turns[turn_index]
        if words == "" and not turn.media:
            nothing = message_problem(text, "", (), self._page.modalities) or ""
            return Opening(self._composer.say(nothing), is_ready=False)
        conversation.cut(turn_index)
        conversation.begin(turn.text if words is None else words, [attached.path for attached in turn.media])
        return Opening({self._composer.hint: ""})


def row_of(index: int | tuple[int, int]) -> int:
    """The message that an event of the chat display is about."""
    return index if isinstance(index, int) else index[0]
