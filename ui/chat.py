"""The Chat tab: conversation on the left, the adapter's choice and the generation settings on the right.

Owns the components and their thin callbacks. The conversation itself is `ui/conversation`, an answer's progress
`ui/answer`; the browser's copy of the chat is only ever drawn, never read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.components.chatbot import ExampleMessage

from adapters.manager import AdapterInfo
from api.service import Service
from engine.answer import Answer
from engine.errors import AppError
from engine.routing import AUTO, NONE
from ui.adapter_card import adapter_card_html, rule_html
from ui.adapter_table import TABLE_SCRIPT
from ui.answer import run_reply
from ui.conversation import Conversation
from ui.examples import Example, find_examples
from ui.history import Record, export_html, from_record, history_html, keep
from ui.message_check import message_problem
from ui.page import DIRECT, Page, session_of
from ui.receipt import Reply, last_answer_card
from ui.settings import GenerationSettings
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


class ChatTab:
    """Builds the tab's components and answers their events."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._stops = page.new_stops()
        names = [adapter.name for adapter in page.shared_adapters]
        self._examples = find_examples(page.text, takes_audio=page.takes_audio, adapters=names)

    def build(self) -> None:
        """Create the components inside the current tab, then connect them."""
        self.conversation = gr.State(Conversation())
        with gr.Row(elem_id="chat-row", equal_height=False):
            with gr.Column(scale=7, min_width=320, elem_id="chat-main"):
                self._build_conversation()
            with gr.Column(scale=3, min_width=300, elem_id="chat-side"):
                self._build_settings()
        self._connect()

    def watch(self, selected: gr.Tab, others: Sequence[gr.Tab]) -> None:
        """Connect what happens when the tab is opened."""
        selected.select(self.refresh_choices, self.adapter, [self.adapter, self.hint], **DIRECT)

    def load(self, blocks: gr.Blocks) -> None:
        """Put what the server writes into the visitor's language, and list what their browser keeps."""
        outputs = [self.chatbot, self.composer, self.last_answer, self.adapter, self.card, self.kept_list]
        blocks.load(self.greet, [self.conversation, self.kept], outputs, **DIRECT)

    async def greet(self, conversation: Conversation, kept: list[Record], request: gr.Request) -> Update:
        """The page opened."""
        text = self._page.words(request)
        adapters = await self._page.service_for(request).list_adapters()
        names = [adapter.name for adapter in self._page.shared_adapters]
        examples = find_examples(text, takes_audio=self._page.takes_audio, adapters=names)
        hears = self._page.takes_audio
        shown = len(examples) == len(self._examples)  # another number would mean other cards than those that are sent
        return {
            self.chatbot: gr.update(
                placeholder=_greeting(text, hears),
                examples=[_example_card(example) for example in (examples if shown else self._examples)] or None,
            ),
            self.composer: gr.update(placeholder=text("chat.placeholder_audio" if hears else "chat.placeholder_text")),
            self.last_answer: last_answer_card(text, None),
            self.adapter: gr.update(choices=adapter_choices(text, adapters)),
            self.card: await self._card(text, AUTO, request),
            self.kept_list: history_html(text, kept or [], conversation.key),
        }

    def _build_conversation(self) -> None:
        text, hears = self._page.text, self._page.takes_audio
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
            placeholder=_greeting(text, hears),
            examples=[_example_card(example) for example in self._examples] or None,
            allow_tags=False,
        )
        self.composer = gr.MultimodalTextbox(
            elem_id="composer",
            label=self._page.label("chat.composer"),
            show_label=False,
            placeholder=text("chat.placeholder_audio" if hears else "chat.placeholder_text"),
            sources=["upload", "microphone"] if hears else [],
            file_types=["audio"] if hears else None,
            file_count="multiple",
            max_plain_text_length=1_000_000,
            max_lines=8,
            autofocus=True,
            html_attributes=gr.InputHTMLAttributes(autocomplete="off"),
        )
        self.hint = gr.HTML("", elem_id="composer-hint", padding=False, apply_default_css=False)
        gr.HTML("<p id='microphone-hint' role='status'></p>", padding=False, apply_default_css=False)

    def _build_settings(self) -> None:
        text, label = self._page.text, self._page.label
        self.adapter = gr.Dropdown(
            adapter_choices(text, self._page.shared_adapters),
            value=AUTO,
            label=label("chat.adapter"),
            info=label("chat.adapter_info"),
            elem_id="adapter-menu",
            filterable=False,
        )
        self.card = gr.HTML("", elem_id="adapter-card", padding=False, apply_default_css=False)
        self.last_answer = gr.HTML(
            last_answer_card(text, None), elem_id="last-answer", padding=False, apply_default_css=False
        )
        self.settings = GenerationSettings(self._page)
        self.settings.build("generation-settings")
        self.new = gr.Button(label("chat.new"), size="md", elem_id="new-conversation")
        self.export = gr.HTML("", elem_id="chat-export", padding=False, apply_default_css=False)
        self.kept = gr.BrowserState([], storage_key="switchboard-conversations", secret="switchboard")
        with gr.Accordion(label("history.title"), open=False, elem_id="chat-history"):
            self.kept_list = gr.HTML("", padding=False, apply_default_css=False, js_on_load=TABLE_SCRIPT)

    def _connect(self) -> None:
        """Every event that leads to an answer shares inputs, outputs and what follows it."""
        outputs = [self.chatbot, self.composer, self.hint, self.last_answer, self.new, self.adapter, self.export]
        kept = [self.kept, self.kept_list]
        streaming: dict[str, Any] = {
            "inputs": {self.composer, self.conversation, self.adapter, *self.settings.inputs},
            "outputs": outputs, "concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private",
        }  # fmt: skip
        for listen, prepare in (
            (self.composer.submit, self.send),
            (self.chatbot.example_select, self.send_example),
            (self.chatbot.retry, self.retry),
            (self.chatbot.edit, self.edit),
            (self.chatbot.option_select, self.retry_option),
        ):
            answered = listen(self._streamed(prepare), **streaming)
            answered.then(self.settle, [self.conversation, self.kept], [*outputs, *kept], **DIRECT)
        self.composer.stop(self.stop, None, None, **DIRECT)
        self.composer.change(self.attach, [self.composer, self.adapter], None, trigger_mode="once", **DIRECT)
        self.chatbot.undo(self.undo, self.conversation, outputs, **DIRECT)
        self.new.click(self.clear, self.conversation, outputs, **DIRECT)
        self.chatbot.clear(self.clear, self.conversation, outputs, **DIRECT)
        self.adapter.focus(self.refresh_choices, self.adapter, [self.adapter, self.hint], **DIRECT)
        self.adapter.change(self.choose, self.adapter, self.card, **DIRECT)
        listed: Any = self.kept_list
        listed.action(self.look_back, [self.conversation, self.kept], [*outputs, *kept], **DIRECT)

    def send(self, text: Texts, values: Values, _: gr.EventData) -> Opening:
        """Submit pressed."""
        message = values[self.composer]
        words = (message.get("text") or "").strip()
        audio = tuple(Path(file) for file in message.get("files") or [])
        if problem := message_problem(text, words, audio):
            return Opening(self._hint(problem), is_ready=False)
        values[self.conversation].begin(words, audio)
        return Opening({self.composer: gr.update(value={"text": "", "files": []})})

    def send_example(self, text: Texts, values: Values, event: gr.EventData) -> Opening:
        """A card of the empty conversation pressed: it sends itself, and sets the adapter menu to what answers it."""
        example = self._examples[_row(event.index)]
        values[self.conversation].begin(example.text, (example.audio,) if example.audio else ())
        return Opening({self.adapter: gr.update(value=example.lora)}, lora=example.lora)

    def retry(self, text: Texts, values: Values, event: gr.EventData) -> Opening:
        """Answer a message again; what came after it goes."""
        return self._again(text, values, _row(event.index))

    def edit(self, text: Texts, values: Values, event: gr.EventData) -> Opening:
        """Answer a changed message; its audio stays, and what came after it goes."""
        return self._again(text, values, _row(event.index), str(event.value).strip())

    def retry_option(self, text: Texts, values: Values, event: gr.EventData) -> Opening:
        """A button under a failed answer pressed."""
        opening = self._again(text, values, len(values[self.conversation].display(text)) - 1)
        if event.value == "retry_base":
            return Opening({self.adapter: gr.update(value=NONE)}, opening.is_ready, NONE)
        return opening

    def _again(self, text: Texts, values: Values, row: int, words: str | None = None) -> Opening:
        conversation = values[self.conversation]
        if not conversation.turns:
            return Opening({self.hint: ""}, is_ready=False)
        turn_index = conversation.turn_at(row)
        turn = conversation.turns[turn_index]
        if words == "" and not turn.audio:
            hint = self._hint(text("chat.empty_message"))
            return Opening(self._drawn(text, conversation) | hint, is_ready=False)
        conversation.cut(turn_index)
        conversation.begin(turn.text if words is None else words, turn.audio)
        return Opening({self.hint: ""})

    def _streamed(
        self, prepare: Callable[[Texts, Values, gr.EventData], Opening]
    ) -> Callable[..., AsyncGenerator[Update, None]]:
        """A Gradio callback: `prepare` the conversation, then stream the answer to its last turn."""

        async def stream(values: Values, event: gr.EventData, request: gr.Request) -> AsyncGenerator[Update, None]:
            session, text = session_of(request), self._page.words(request)
            stop = self._stops.begin(session)
            if stop is None:
                yield self._hint(text("chat.busy"))
                return
            try:
                opening = prepare(text, values, event)
                yield opening.update
                if not opening.is_ready:
                    return
                lora = opening.lora or values[self.adapter]
                async with aclosing(self._answer(self._page.service_for(request), text, values, lora, stop)) as updates:
                    async for update in updates:
                        yield update
            finally:
                self._stops.end(session)

        return stream

    async def _answer(
        self, service: Service, text: Texts, values: Values, lora: str, stop: asyncio.Event
    ) -> AsyncGenerator[Update, None]:
        conversation = values[self.conversation]
        messages = conversation.messages(values[self.settings.system] or "")
        reply = conversation.open_reply()
        reply.expected = self._expected(lora, reply)
        buttons = {self.composer: gr.update(submit_btn=False, stop_btn=True), self.new: gr.update(interactive=False)}
        yield self._drawn(text, conversation) | buttons | self._hint("")

        async def start() -> Sequence[Answer]:
            return await service.start_chat(messages, self.settings.sampling(values), lora=lora)

        progress = run_reply(service, reply, start, stop=stop, samples=self._page.samples)
        async with aclosing(progress) as changes:
            async for has_changed in changes:
                yield self._drawn(text, conversation) if has_changed else {self.hint: gr.skip()}

    def _expected(self, lora: str, reply: Reply) -> str:
        """The adapter whose loading an answer may wait for; empty for the base model."""
        if lora == AUTO:
            return self._page.service.engine.default_mm_loras.get("audio", "") if reply.has_audio else ""
        return "" if lora == NONE else lora

    def settle(self, conversation: Conversation, kept: list[Record], request: gr.Request) -> Update:
        """After an answer, however it ended: the Send button comes back, and an answer cut off by a fault says so."""
        if self._stops.is_busy(session_of(request)):
            return {self.hint: gr.skip()}
        text, reply = self._page.words(request), conversation.last_reply()
        if reply is not None and not reply.is_final:
            reply.phase, reply.error = "failed", text("chat.fault")
        ready = {self.composer: gr.update(submit_btn=True, stop_btn=False), self.new: gr.update(interactive=True)}
        return self._drawn(text, conversation) | ready | self._kept(text, keep(kept or [], conversation), conversation)

    async def choose(self, lora: str, request: gr.Request) -> str:
        """An adapter chosen: its card is shown, and it is brought into memory before it is asked for."""
        text, service = self._page.words(request), self._page.service_for(request)
        if lora not in (AUTO, NONE):
            await service.prefetch_adapter(lora)
        return await self._card(text, lora, request)

    async def attach(self, message: dict[str, Any], lora: str, request: gr.Request) -> None:
        """A file attached: the adapter that answers audio by itself is brought into memory before the message is sent."""
        default = self._page.service.engine.default_mm_loras.get("audio")
        if lora == AUTO and message["files"] and default is not None:
            await self._page.service_for(request).prefetch_adapter(default)

    async def _card(self, text: Texts, lora: str, request: gr.Request) -> str:
        if lora in (AUTO, NONE):
            return rule_html(text, lora, self._page.service.engine.default_mm_loras)
        try:
            return adapter_card_html(text, await self._page.service_for(request).get_adapter(lora))
        except AppError:
            return ""

    def look_back(
        self, conversation: Conversation, kept: list[Record], event: gr.EventData, request: gr.Request
    ) -> Update:
        """A button of the list of earlier conversations pressed."""
        text, records = self._page.words(request), kept or []
        if self._stops.is_busy(session_of(request)):
            return self._hint(text("chat.busy"))
        if event.act == "open":
            found = next((record for record in records if record.get("key") == event.name), None)
            restored = from_record(found) if found is not None else None
            if restored is not None:
                conversation.turns[:], conversation.key = restored.turns, restored.key
        elif event.act == "delete":
            records = [record for record in records if record.get("key") != event.name]
        elif event.act == "delete_all":
            records = []
        return self._drawn(text, conversation) | self._kept(text, records, conversation) | self._hint("")

    def _kept(self, text: Texts, records: list[Record], conversation: Conversation) -> Update:
        return {self.kept: records, self.kept_list: history_html(text, records, conversation.key)}

    def stop(self, request: gr.Request) -> None:
        """Stop pressed: the answer's own generator ends it, so that nothing races."""
        self._stops.request(session_of(request))

    def undo(self, conversation: Conversation, place: gr.UndoData, request: gr.Request) -> Update:
        """Take a message back into the composer, with what came after it removed."""
        if not conversation.turns or self._stops.is_busy(session_of(request)):
            return {self.hint: gr.skip()}
        turn = conversation.cut(conversation.turn_at(_row(place.index)))
        value = {"text": turn.text, "files": [str(path) for path in turn.audio]}
        return self._drawn(self._page.words(request), conversation) | {self.composer: gr.update(value=value)}

    def clear(self, conversation: Conversation, request: gr.Request) -> Update:
        """A new conversation, with the adapter menu at its beginning; an answer that is running ends."""
        self._stops.request(session_of(request))
        conversation.clear()
        return (
            self._drawn(self._page.words(request), conversation)
            | self._hint("")
            | {self.adapter: gr.update(value=AUTO)}
        )

    async def refresh_choices(self, chosen: str, request: gr.Request) -> Update:
        """The menu as the adapters are now; a choice that is gone falls back to Auto and says so."""
        adapters = await self._page.service_for(request).list_adapters()
        text = self._page.words(request)
        choices = adapter_choices(text, adapters)
        if any(value == chosen for _, value in choices):
            return {self.adapter: gr.update(choices=choices)}
        gone = self._hint(text("chat.choice_gone", name=chosen))
        return {self.adapter: gr.update(choices=choices, value=AUTO)} | gone

    def _drawn(self, text: Texts, conversation: Conversation) -> Update:
        reply = conversation.last_reply()
        drawn: Update = {
            self.chatbot: conversation.display(text),
            self.last_answer: last_answer_card(text, reply),
        }
        if reply is None or reply.is_final:
            drawn[self.export] = export_html(text, conversation)
        return drawn

    def _hint(self, words: str) -> Update:
        return {self.hint: f"<p role='status'>{escape(words)}</p>" if words else ""}


def _greeting(text: Texts, hears: bool) -> str:
    words = text("chat.empty_audio" if hears else "chat.empty_text")
    return f"<div class='greeting'><h2>{escape(text('chat.empty_title'))}</h2><p>{escape(words)}</p></div>"


def adapter_choices(text: Texts, adapters: Sequence[AdapterInfo]) -> list[tuple[str, str]]:
    """Label and value of each choice: the rule, the base model, then the adapters by name.

    Nothing that changes while an answer runs is in a label: Gradio draws a closed menu's label once.
    """
    choices = [(text("chat.auto"), AUTO), (text("chat.base"), NONE)]
    for adapter in sorted(adapters, key=lambda adapter: adapter.name):
        modalities = text("receipt.and").join(adapter.default_for)
        label = text("chat.choice_default", name=adapter.name, modalities=modalities) if modalities else adapter.name
        choices.append((label, adapter.name))
    return choices


def _example_card(example: Example) -> ExampleMessage:
    card: ExampleMessage = {"text": example.text, "display_text": example.label}
    if example.audio is not None:
        card["files"] = [str(example.audio)]
    return card


def _row(index: int | tuple[int, int]) -> int:
    return index if isinstance(index, int) else index[0]
