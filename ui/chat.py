"""The Chat tab: conversation on the left, the adapter's choice and the generation settings on the right.

Owns the components and their thin callbacks. The conversation itself is `ui/conversation`, an answer's progress
`ui/answer`; the browser's copy of the chat is only ever drawn, never read.
"""

from __future__ import annotations

import asyncio
import wave
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
from engine.errors import InvalidRequest
from engine.request import SamplingParams
from engine.routing import AUTO, NONE
from ui.answer import run_reply
from ui.conversation import Conversation
from ui.examples import Example, find_examples
from ui.page import DIRECT, Page, session_of
from ui.receipt import last_answer_card
from ui.text import Texts

DEFAULT_MAX_TOKENS = 256
WAV_HEADER_BYTES = 44
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
        self._text = page.text
        adapters = page.shared_adapters
        names = [adapter.name for adapter in adapters]
        self._examples = find_examples(page.text, takes_audio=page.takes_audio, adapters=names)
        self._choices = adapter_choices(page.text, adapters)

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

    def _build_conversation(self) -> None:
        text, hears = self._text, self._page.takes_audio
        greeting = text("chat.empty_audio" if hears else "chat.empty_text")
        self.chatbot = gr.Chatbot(
            elem_id="chatbot",
            label=text("chat.label"),
            show_label=False,
            buttons=["copy"],
            editable="user",
            feedback_options=None,
            autoscroll=False,
            height="100%",
            layout="bubble",
            group_consecutive_messages=False,
            placeholder=f"<div class='greeting'><h2>{text('chat.empty_title')}</h2><p>{greeting}</p></div>",
            examples=[_example_card(example) for example in self._examples] or None,
            allow_tags=False,
        )
        self.composer = gr.MultimodalTextbox(
            elem_id="composer",
            label=text("chat.composer"),
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
        text = self._text
        self.adapter = gr.Dropdown(
            self._choices,
            value=AUTO,
            label=text("chat.adapter"),
            info=text("chat.adapter_info"),
            elem_id="adapter-menu",
            filterable=False,
        )
        self.last_answer = gr.HTML(
            last_answer_card(text, None), elem_id="last-answer", padding=False, apply_default_css=False
        )
        limit = self._page.service.engine.max_model_len
        with gr.Accordion(text("chat.settings"), open=False, elem_id="generation-settings"):
            self.temperature = gr.Slider(
                0, 2, 0, step=0.05, label=text("chat.temperature"), info=text("chat.temperature_info")
            )
            self.max_tokens = gr.Slider(
                1, limit, min(DEFAULT_MAX_TOKENS, max(1, limit // 4)), step=1, label=text("chat.max_tokens"),
                info=text("chat.max_tokens_info"),
            )  # fmt: skip
            self.top_p = gr.Slider(0.05, 1, 1, step=0.05, label=text("chat.top_p"), info=text("chat.top_p_info"))
            # Not a gr.Number: an empty one turns into 0 in the browser, with or without a placeholder.
            self.seed = gr.Textbox(
                "", max_lines=1, label=text("chat.seed"), info=text("chat.seed_info"),
                placeholder=text("chat.seed_placeholder"),
            )  # fmt: skip
            self.system = gr.Textbox(
                "", lines=3, label=text("chat.system"), placeholder=text("chat.system_placeholder")
            )
        self.new = gr.Button(text("chat.new"), size="md", elem_id="new-conversation")

    def _connect(self) -> None:
        """Every event that leads to an answer shares inputs, outputs and what follows it."""
        self._sampling = (self.temperature, self.max_tokens, self.top_p, self.seed)
        outputs = [self.chatbot, self.composer, self.hint, self.last_answer, self.new, self.adapter]
        streaming: dict[str, Any] = {
            "inputs": {self.composer, self.conversation, self.adapter, self.system, *self._sampling},
            "outputs": outputs, "concurrency_limit": None, "show_progress": "hidden", "api_visibility": "private",
        }  # fmt: skip
        for listen, prepare in (
            (self.composer.submit, self.send),
            (self.chatbot.example_select, self.send_example),
            (self.chatbot.retry, self.retry),
            (self.chatbot.edit, self.edit),
            (self.chatbot.option_select, self.retry_option),
        ):
            listen(self._streamed(prepare), **streaming).then(self.settle, self.conversation, outputs, **DIRECT)
        self.composer.stop(self.stop, None, None, **DIRECT)
        self.chatbot.undo(self.undo, self.conversation, outputs, **DIRECT)
        self.new.click(self.clear, self.conversation, outputs, **DIRECT)
        self.chatbot.clear(self.clear, self.conversation, outputs, **DIRECT)
        self.adapter.focus(self.refresh_choices, self.adapter, [self.adapter, self.hint], **DIRECT)

    def send(self, values: Values, _: gr.EventData) -> Opening:
        """Submit pressed."""
        message = values[self.composer]
        words = (message.get("text") or "").strip()
        audio = tuple(Path(file) for file in message.get("files") or [])
        if problem := message_problem(self._text, words, audio):
            return Opening(self._hint(problem), is_ready=False)
        values[self.conversation].begin(words, audio)
        return Opening({self.composer: gr.update(value={"text": "", "files": []})})

    def send_example(self, values: Values, event: gr.EventData) -> Opening:
        """A card of the empty conversation pressed: it sends itself, and sets the adapter menu to what answers it."""
        example = self._examples[_row(event.index)]
        values[self.conversation].begin(example.text, (example.audio,) if example.audio else ())
        return Opening({self.adapter: gr.update(value=example.lora)}, lora=example.lora)

    def retry(self, values: Values, event: gr.EventData) -> Opening:
        """Answer a message again; what came after it goes."""
        return self._again(values, _row(event.index))

    def edit(self, values: Values, event: gr.EventData) -> Opening:
        """Answer a changed message; its audio stays, and what came after it goes."""
        return self._again(values, _row(event.index), str(event.value).strip())

    def retry_option(self, values: Values, event: gr.EventData) -> Opening:
        """A button under a failed answer pressed."""
        opening = self._again(values, len(values[self.conversation].display(self._text)) - 1)
        if event.value == "retry_base":
            return Opening({self.adapter: gr.update(value=NONE)}, opening.is_ready, NONE)
        return opening

    def _again(self, values: Values, row: int, words: str | None = None) -> Opening:
        conversation = values[self.conversation]
        if not conversation.turns:
            return Opening({self.hint: ""}, is_ready=False)
        turn_index = conversation.turn_at(row)
        turn = conversation.turns[turn_index]
        if words == "" and not turn.audio:
            hint = self._hint(self._text("chat.empty_message"))
            return Opening(self._drawn(conversation) | hint, is_ready=False)
        conversation.cut(turn_index)
        conversation.begin(turn.text if words is None else words, turn.audio)
        return Opening({self.hint: ""})

    def _streamed(
        self, prepare: Callable[[Values, gr.EventData], Opening]
    ) -> Callable[..., AsyncGenerator[Update, None]]:
        """A Gradio callback: `prepare` the conversation, then stream the answer to its last turn."""

        async def stream(values: Values, event: gr.EventData, request: gr.Request) -> AsyncGenerator[Update, None]:
            session = session_of(request)
            stop = self._page.stops.begin(session)
            if stop is None:
                yield self._hint(self._text("chat.busy"))
                return
            try:
                opening = prepare(values, event)
                yield opening.update
                if not opening.is_ready:
                    return
                lora = opening.lora or values[self.adapter]
                async with aclosing(self._answer(self._page.service_for(request), values, lora, stop)) as updates:
                    async for update in updates:
                        yield update
            finally:
                self._page.stops.end(session)

        return stream

    async def _answer(
        self, service: Service, values: Values, lora: str, stop: asyncio.Event
    ) -> AsyncGenerator[Update, None]:
        conversation = values[self.conversation]
        messages = conversation.messages(values[self.system] or "")
        reply = conversation.open_reply()
        buttons = {self.composer: gr.update(submit_btn=False, stop_btn=True), self.new: gr.update(interactive=False)}
        yield self._drawn(conversation) | buttons | self._hint("")

        def sampling() -> SamplingParams:
            return make_sampling(*(values[component] for component in self._sampling))

        progress = run_reply(service, reply, messages, sampling, lora=lora, stop=stop)
        async with aclosing(progress) as changes:
            async for has_changed in changes:
                yield self._drawn(conversation) if has_changed else {self.hint: gr.skip()}

    async def settle(self, conversation: Conversation, request: gr.Request) -> Update:
        """After an answer, however it ended: the Send button comes back, and an answer cut off by a fault says so."""
        if self._page.stops.is_busy(session_of(request)):
            return {self.hint: gr.skip()}
        reply = conversation.last_reply()
        if reply is not None and not reply.is_final:
            reply.phase, reply.error = "failed", self._text("chat.fault")
        ready = {self.composer: gr.update(submit_btn=True, stop_btn=False), self.new: gr.update(interactive=True)}
        return self._drawn(conversation) | ready

    def stop(self, request: gr.Request) -> None:
        """Stop pressed: the answer's own generator ends it, so that nothing races."""
        self._page.stops.request(session_of(request))

    def undo(self, conversation: Conversation, place: gr.UndoData, request: gr.Request) -> Update:
        """Take a message back into the composer, with what came after it removed."""
        if not conversation.turns or self._page.stops.is_busy(session_of(request)):
            return {self.hint: gr.skip()}
        turn = conversation.cut(conversation.turn_at(_row(place.index)))
        value = {"text": turn.text, "files": [str(path) for path in turn.audio]}
        return self._drawn(conversation) | {self.composer: gr.update(value=value)}

    def clear(self, conversation: Conversation, request: gr.Request) -> Update:
        """A new conversation, with the adapter menu at its beginning; an answer that is running ends."""
        self._page.stops.request(session_of(request))
        conversation.turns.clear()
        return self._drawn(conversation) | self._hint("") | {self.adapter: gr.update(value=AUTO)}

    async def refresh_choices(self, chosen: str, request: gr.Request) -> Update:
        """The menu as the adapters are now; a choice that is gone falls back to Auto and says so."""
        adapters = await self._page.service_for(request).list_adapters()
        choices = adapter_choices(self._text, adapters)
        if any(value == chosen for _, value in choices):
            return {self.adapter: gr.update(choices=choices)}
        gone = self._hint(self._text("chat.choice_gone", name=chosen))
        return {self.adapter: gr.update(choices=choices, value=AUTO)} | gone

    def _drawn(self, conversation: Conversation) -> Update:
        reply = conversation.last_reply()
        return {
            self.chatbot: conversation.display(self._text),
            self.last_answer: last_answer_card(self._text, reply),
        }

    def _hint(self, words: str) -> Update:
        return {self.hint: f"<p role='status'>{escape(words)}</p>" if words else ""}


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


def make_sampling(temperature: float, max_tokens: float, top_p: float, seed: str) -> SamplingParams:
    """The settings' values as the engine takes them; raises `InvalidRequest`."""
    return SamplingParams(
        temperature=temperature, max_tokens=int(max_tokens), top_p=top_p, seed=_whole_number(seed.strip())
    )


def _whole_number(seed: str) -> int | None:
    try:
        return int(seed) if seed else None
    except ValueError:
        raise InvalidRequest(
            f"seed is a whole number, and '{seed[:40]}' is none; leave it empty for a new one each time", param="seed"
        ) from None


def message_problem(text: Texts, words: str, audio: Sequence[Path]) -> str | None:
    """Why a message cannot be sent; None if it can. Decoding itself is the engine's work."""
    if not words and not audio:
        return text("chat.empty_message")
    for path in audio:
        if is_silent_file(path):
            return text("chat.empty_recording")
    return None


def is_silent_file(path: Path) -> bool:
    """Whether a file is no more than a header: what a recorder delivers that was stopped at once."""
    if path.stat().st_size <= WAV_HEADER_BYTES:
        return True
    try:
        with wave.open(str(path)) as clip:
            return bool(clip.getnframes() == 0)
    except (wave.Error, EOFError):
        return False


def _example_card(example: Example) -> ExampleMessage:
    card: ExampleMessage = {"text": example.text, "display_text": example.label}
    if example.audio is not None:
        card["files"] = [str(example.audio)]
    return card


def _session(request: gr.Request) -> str:
    return request.session_hash or ""


def _row(index: int | tuple[int, int]) -> int:
    return index if isinstance(index, int) else index[0]
