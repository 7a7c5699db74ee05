"""The Chat tab: conversation on the left, the adapter's choice and the generation settings on the right.

Puts its rooms together and streams the answers: `ui/composer`, `ui/adapter_panel`, `ui/kept_chats` own their components,
`ui/openings` the ways into an answer. The conversation itself is `ui/conversation`, an answer's progress `ui/answer`; the
browser's copy of the chat is only ever drawn, never read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import gradio as gr
from gradio.components.chatbot import ExampleMessage

from api.service import Service
from engine.answer import Answer
from engine.routing import AUTO, NONE
from ui.adapter_panel import AdapterPanel, adapter_choices
from ui.answer import run_reply
from ui.composer import Composer, default_for
from ui.conversation import Conversation
from ui.examples import Example, find_examples
from ui.history import Record
from ui.kept_chats import KeptChats
from ui.openings import Opening, Openings, Update, Values, row_of
from ui.page import DIRECT, Page, session_of
from ui.receipt import Reply, last_answer_card
from ui.text import Texts

__all__ = ["ChatTab", "Opening", "adapter_choices"]

# Buttons that the page's script puts beside messages reach the server through this.
TURN_SCRIPT = """
Object.assign(window.switchboard, {
  removeTurn: (turn) => trigger('turn', { act: 'remove', turn }),
  restoreTurn: () => trigger('turn', { act: 'restore', turn: -1 }),
});
"""


class ChatTab:
    """Builds the tab's components and answers their events."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._stops = page.new_stops()
        self._examples = self._find_examples(page.text)
        self.composer = Composer(page)
        self.panel = AdapterPanel(page)
        self.kept = KeptChats(page)

    def build(self) -> None:
        """Create the components inside the current tab, then connect them."""
        self.conversation = gr.State(Conversation())
        with gr.Row(elem_id="chat-row", equal_height=False):
            with gr.Column(scale=7, min_width=320, elem_id="chat-main"):
                self._build_conversation()
                self.composer.build()
            with gr.Column(scale=3, min_width=300, elem_id="chat-side"):
                self.panel.build_choice()
                self.last_answer = gr.HTML(
                    last_answer_card(self._page.text, None),
                    elem_id="last-answer",
                    padding=False,
                    apply_default_css=False,
                )
                self.panel.build_settings()
                self.new = gr.Button(self._page.label("chat.new"), size="md", elem_id="new-conversation")
                self.kept.build()
        self._openings = Openings(self._page, self.conversation, self.composer, self.panel, self._examples)
        self._connect()

    def watch(self, selected: gr.Tab, others: Sequence[gr.Tab]) -> None:
        """Connect what happens when the tab is opened."""
        outputs = [self.panel.adapter, self.composer.hint]
        selected.select(self.panel.refresh, self.panel.adapter, outputs, **DIRECT)

    def load(self, blocks: gr.Blocks) -> None:
        """Put what the server writes into the visitor's language, and list what their browser keeps."""
        outputs = [
            self.chatbot, self.composer.box, self.last_answer, self.panel.adapter, self.panel.card, self.kept.list,
        ]  # fmt: skip
        blocks.load(self.greet, [self.conversation, self.kept.records], outputs, **DIRECT)

    async def greet(self, conversation: Conversation, kept: list[Record], request: gr.Request) -> Update:
        """The page opened."""
        text = self._page.words(request)
        adapters = await self._page.service_for(request).list_adapters()
        examples = self._find_examples(text)
        shown = len(examples) == len(self._examples)  # another number would mean other cards than those that are sent
        return {
            self.chatbot: gr.update(
                placeholder=self.composer.greeting(text),
                examples=[_example_card(example) for example in (examples if shown else self._examples)] or None,
            ),
            self.composer.box: gr.update(placeholder=self.composer.placeholder(text)),
            self.last_answer: last_answer_card(text, None),
            **self.panel.choices(text, adapters),
            **self.panel.rules(text, request),
            **self.kept.drawn(text, kept, conversation),
        }

    def _find_examples(self, text: Texts) -> list[Example]:
        names = [adapter.name for adapter in self._page.shared_adapters]
        return find_examples(text, takes_audio=self._page.takes_audio, adapters=names)

    def _build_conversation(self) -> None:
        self.chatbot = gr.Chatbot(
            elem_id="chatbot",
            label=self._page.label("chat.label"),
            show_label=False,
            buttons=["copy"],
            editable="user",
            feedback_options=None,
            autoscroll=False,
            height="100%",
            layout="bubble",
            group_consecutive_messages=False,
            placeholder=self.composer.greeting(self._page.text),
            examples=[_example_card(example) for example in self._examples] or None,
            allow_tags=False,
        )
        self.turns = gr.HTML("", elem_id="turn-actions", padding=False, js_on_load=TURN_SCRIPT)

    def _connect(self) -> None:
        """Every event that leads to an answer shares inputs, outputs and what follows it."""
        outputs = [
            self.chatbot, self.composer.box, self.composer.hint, self.last_answer, self.new, self.kept.export,
            *self.panel.outputs,
        ]  # fmt: skip
        kept = [*outputs, *self.kept.outputs]
        records = [self.conversation, self.kept.records]
        streaming: dict[str, Any] = {
            "inputs": {self.composer.box, self.conversation, *self.panel.inputs},
            "outputs": outputs, "concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private",
        }  # fmt: skip
        for listen, prepare in (
            (self.composer.box.submit, self._openings.send),
            (self.chatbot.example_select, self._openings.send_example),
            (self.chatbot.retry, self._openings.retry),
            (self.chatbot.edit, self._openings.edit),
            (self.chatbot.option_select, self._openings.retry_option),
        ):
            listen(self._streamed(prepare), **streaming).then(self.settle, records, kept, **DIRECT)
        self.composer.box.stop(self.stop, None, None, **DIRECT)
        attached = [self.composer.box, self.panel.adapter]
        self.composer.box.change(self.composer.prefetch, attached, None, trigger_mode="once", **DIRECT)
        self.chatbot.undo(self.undo, self.conversation, outputs, **DIRECT)
        self.new.click(self.clear, self.conversation, outputs, **DIRECT)
        self.chatbot.clear(self.clear, self.conversation, outputs, **DIRECT)
        self.panel.connect(self.composer.hint)
        listed: Any = self.kept.list
        listed.action(self.look_back, records, kept, **DIRECT)
        turns: Any = self.turns
        turns.turn(self.change_turn, records, kept, **DIRECT)

    def _streamed(
        self, prepare: Callable[[Texts, Values, gr.EventData], Opening]
    ) -> Callable[..., AsyncGenerator[Update, None]]:
        """A Gradio callback: `prepare` the conversation, then stream the answer to its last turn."""

        async def stream(values: Values, event: gr.EventData, request: gr.Request) -> AsyncGenerator[Update, None]:
            session, text = session_of(request), self._page.words(request)
            stop = self._stops.begin(session)
            if stop is None:
                yield self.composer.say(text("chat.busy"))
                return
            try:
                opening = prepare(text, values, event)
                if not opening.is_ready:
                    yield self._drawn(text, values[self.conversation]) | opening.update
                    return
                lora = opening.lora or values[self.panel.adapter]
                yield opening.update | await self.panel.settle(lora, values, request)
                async with aclosing(self._answer(self._page.service_for(request), text, values, lora, stop)) as updates:
                    async for update in updates:
                        yield update
            finally:
                self._stops.end(session)

        return stream

    async def _answer(
        self, service: Service, text: Texts, values: Values, lora: str, stop: asyncio.Event
    ) -> AsyncGenerator[Update, None]:
        conversation: Conversation = values[self.conversation]
        messages = conversation.messages(values[self.panel.settings.system] or "")
        reply = conversation.open_reply()
        reply.expected = self._expected(service, lora, reply)
        buttons = {
            self.composer.box: gr.update(submit_btn=False, stop_btn=True),
            self.new: gr.update(interactive=False),
        }
        yield self._drawn(text, conversation) | buttons | self.composer.say("")

        async def start() -> Sequence[Answer]:
            return await service.start_chat(messages, self.panel.settings.sampling(values), lora=lora)

        progress = run_reply(service, reply, start, stop=stop, samples=self._page.samples)
        async with aclosing(progress) as changes:
            async for has_changed in changes:
                yield self._drawn(text, conversation) if has_changed else {self.composer.hint: gr.skip()}

    def _expected(self, service: Service, lora: str, reply: Reply) -> str:
        """The adapter whose loading an answer may wait for; empty for the base model."""
        if lora == AUTO:
            return default_for(service.default_mm_loras, set(reply.media.split("+")))
        return "" if lora == NONE else lora

    def settle(self, conversation: Conversation, kept: list[Record], request: gr.Request) -> Update:
        """After an answer, however it ended: the Send button comes back, and an answer cut off by a fault says so."""
        if self._stops.is_busy(session_of(request)):
            return {self.composer.hint: gr.skip()}
        text, reply = self._page.words(request), conversation.last_reply()
        if reply is not None and not reply.is_final:
            reply.phase, reply.error = "failed", text("chat.fault")
        ready = {self.composer.box: gr.update(submit_btn=True, stop_btn=False), self.new: gr.update(interactive=True)}
        return self._drawn(text, conversation) | ready | self.kept.keep(text, kept, conversation)

    def look_back(
        self, conversation: Conversation, kept: list[Record], event: gr.EventData, request: gr.Request
    ) -> Update:
        """A button of the list of earlier conversations pressed."""
        text = self._page.words(request)
        if self._stops.is_busy(session_of(request)):
            return self.composer.say(text("chat.busy"))
        update = self.kept.act(text, kept, conversation, event)
        return self._drawn(text, conversation) | update | self.composer.say("")

    def change_turn(
        self, conversation: Conversation, kept: list[Record], event: gr.EventData, request: gr.Request
    ) -> Update:
        """Delete pressed beside a message, or the button that puts back what was deleted."""
        text = self._page.words(request)
        if self._stops.is_busy(session_of(request)):
            return self.composer.say(text("chat.busy"))
        if event.act == "remove" and isinstance(event.turn, int):
            conversation.remove(event.turn)
        elif event.act == "restore":
            conversation.restore()
        is_removed = conversation.removed is not None
        hint = (
            self.composer.say(text("chat.deleted"), undo=text("chat.restore")) if is_removed else self.composer.say("")
        )
        return self._drawn(text, conversation) | hint | self.kept.keep(text, kept, conversation)

    def stop(self, request: gr.Request) -> None:
        """Stop pressed: the answer's own generator ends it, so that nothing races."""
        self._stops.request(session_of(request))

    def undo(self, conversation: Conversation, place: gr.UndoData, request: gr.Request) -> Update:
        """Take a message back into the composer, with what came after it removed."""
        if not conversation.turns or self._stops.is_busy(session_of(request)):
            return {self.composer.hint: gr.skip()}
        turn = conversation.cut(conversation.turn_at(row_of(place.index)))
        value = {"text": turn.text, "files": [str(attached.path) for attached in turn.media]}
        return self._drawn(self._page.words(request), conversation) | {self.composer.box: gr.update(value=value)}

    def clear(self, conversation: Conversation, request: gr.Request) -> Update:
        """A new conversation, with the adapter menu at its beginning; an answer that is running ends."""
        self._stops.request(session_of(request))
        conversation.clear()
        return (
            self._drawn(self._page.words(request), conversation)
            | self.composer.say("")
            | {self.panel.adapter: gr.update(value=AUTO)}
        )

    def _drawn(self, text: Texts, conversation: Conversation) -> Update:
        reply = conversation.last_reply()
        drawn: Update = {
            self.chatbot: conversation.display(text),
            self.last_answer: last_answer_card(text, reply),
        }
        if reply is None or reply.is_final:
            drawn |= self.kept.links(text, conversation)
        return drawn


def _example_card(example: Example) -> ExampleMessage:
    card: ExampleMessage = {"text": example.text, "display_text": example.label}
    if example.audio is not None:
        card["files"] = [str(example.audio)]
    return card
