"""The side of the Chat tab that says which adapter answers next: menu, card, generation settings.

Owns these components and their callbacks. What a card may put into the settings is `ui/card_fill`. Called by `ui/chat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr

from adapters.card import AdapterCard
from adapters.records import AdapterInfo
from engine.errors import AppError
from engine.routing import AUTO, NONE
from ui.adapter_card import adapter_card_html, card_of, rule_html
from ui.adapter_table import TABLE_SCRIPT
from ui.card_fill import CARD_FIELDS, CardFill, Value
from ui.page import DIRECT, Page
from ui.settings import GenerationSettings
from ui.text import Texts

Values = dict[Any, Any]
Update = dict[Any, Any]


class AdapterPanel:
    """Which adapter answers the next message, and how it is asked."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def build_choice(self) -> None:
        """Create the menu and the card inside the current column."""
        label = self._page.label
        self.adapter = gr.Dropdown(
            adapter_choices(self._page.text, self._page.shared_adapters),
            value=AUTO,
            label=label("chat.adapter"),
            info=label("chat.adapter_info"),
            elem_id="adapter-menu",
            filterable=False,
        )
        self.card = gr.HTML("", elem_id="adapter-card", padding=False, apply_default_css=False, js_on_load=TABLE_SCRIPT)

    def build_settings(self) -> None:
        """Create the settings inside the current column."""
        self.settings = GenerationSettings(self._page)
        self.settings.build("generation-settings")
        self.fill = gr.State(CardFill({name: control.value for name, control in self._controls().items()}))

    def connect(self, hint: gr.HTML) -> None:
        """Connect what the panel does by itself; `hint` is where it says that a choice is gone."""
        self._hint = hint
        drawn = [self.card, *self._controls().values()]
        inputs = {self.adapter, self.fill, *self.settings.inputs}
        self.adapter.change(self.choose, inputs, drawn, **DIRECT)
        self.adapter.focus(self.refresh, self.adapter, [self.adapter, hint], **DIRECT)
        card: Any = self.card
        card.action(self.take_card, inputs, drawn, **DIRECT)

    @property
    def inputs(self) -> set[Any]:
        """The components that an answer asks for."""
        return {self.adapter, self.fill, *self.settings.inputs}

    @property
    def outputs(self) -> list[Any]:
        """The components that an answer may change."""
        return [self.adapter, *self._controls().values()]

    def choices(self, text: Texts, adapters: Sequence[AdapterInfo]) -> Update:
        """The menu with the adapters as they are now."""
        return {self.adapter: gr.update(choices=adapter_choices(text, adapters))}

    async def choose(self, values: Values, request: gr.Request) -> Update:
        """An adapter chosen: its card is shown and fills the settings, and it is brought into memory before it is asked for."""
        lora = values[self.adapter]
        if lora not in (AUTO, NONE):
            await self._page.service_for(request).prefetch_adapter(lora)
        return await self._filled(lora, values, request)

    async def take_card(self, values: Values, request: gr.Request) -> Update:
        """The card's values asked for, also where a person had others."""
        values[self.fill].let_go(self._current(values))
        return await self._filled(values[self.adapter], values, request)

    async def refresh(self, chosen: str, request: gr.Request) -> Update:
        """The menu as the adapters are now; a choice that is gone falls back to Auto and says so."""
        adapters = await self._page.service_for(request).list_adapters()
        text = self._page.words(request)
        update = self.choices(text, adapters)
        if chosen in (AUTO, NONE) or any(adapter.name == chosen for adapter in adapters):
            return update
        gone = gr.update(choices=adapter_choices(text, adapters), value=AUTO)
        return {self.adapter: gone, self._hint: f"<p role='status'>{escape(text('chat.choice_gone', name=chosen))}</p>"}

    async def settle(self, lora: str, values: Values, request: gr.Request) -> Update:
        """The settings for an answer by `lora`, entered into `values` too: the choice may be newer than what they show."""
        info = await self._info(lora, request)
        changes = self._fill(values, card_of(info))
        values.update(changes)
        return changes

    def rules(self, text: Texts, request: gr.Request) -> Update:
        """The card of a page that has just been opened."""
        return {self.card: rule_html(text, AUTO, self._page.service_for(request).default_mm_loras)}

    async def _filled(self, lora: str, values: Values, request: gr.Request) -> Update:
        text, info = self._page.words(request), await self._info(lora, request)
        card = card_of(info)
        changes = self._fill(values, card)
        if info is None:
            shown = (
                rule_html(text, lora, self._page.service_for(request).default_mm_loras) if lora in (AUTO, NONE) else ""
            )
        else:
            fill: CardFill = values[self.fill]
            kept = [] if card is None else fill.kept_from(card)
            shown = adapter_card_html(text, info, filled=fill.filled, kept=kept)
        return {self.card: shown} | changes

    async def _info(self, lora: str, request: gr.Request) -> AdapterInfo | None:
        if lora in (AUTO, NONE):
            return None
        try:
            return await self._page.service_for(request).get_adapter(lora)
        except AppError:
            return None

    def _fill(self, values: Values, card: AdapterCard | None) -> Update:
        controls = self._controls()
        fill: CardFill = values[self.fill]
        return {controls[name]: value for name, value in fill.fill(self._current(values), self._fitting(card)).items()}

    def _fitting(self, card: AdapterCard | None) -> AdapterCard | None:
        """A card whose numbers the controls can show."""
        if card is None:
            return None
        top_p, max_tokens = self.settings.top_p, self.settings.max_tokens
        return replace(
            card,
            top_p=None if card.top_p is None else max(card.top_p, top_p.minimum),
            max_tokens=None if card.max_tokens is None else int(min(card.max_tokens, max_tokens.maximum)),
        )

    def _current(self, values: Values) -> dict[str, Value]:
        return {name: values[control] for name, control in self._controls().items()}

    def _controls(self) -> dict[str, Any]:
        return {name: getattr(self.settings, name) for name in CARD_FIELDS}


def adapter_choices(text: Texts, adapters: Sequence[AdapterInfo]) -> list[tuple[str, str]]:
    """Label and value of each choice: the rule, the base model, then the adapters by name.

    Nothing that changes while an answer runs is in a label: Gradio draws a closed menu's label once.
    """
    choices = [(text("chat.auto"), AUTO), (text("chat.base"), NONE)]
    for adapter in sorted(adapters, key=lambda adapter: adapter.name):
        modalities = text.media(adapter.default_for)
        label = text("chat.choice_default", name=adapter.name, modalities=modalities) if modalities else adapter.name
        choices.append((label, adapter.name))
    return choices
