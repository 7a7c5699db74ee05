"""In a real browser: what an adapter's card does to the Chat tab, and deleting single messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from playwright.sync_api import expect

from adapters.card import read_card
from engine.config import EMBEDDED_ASSETS
from engine.request import Message, SamplingParams
from tests.ui.live import ChatPage, Live

Sent = list[tuple[Sequence[Message], SamplingParams]]


@pytest.fixture
def sent(live: Live, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """What reaches the service."""
    asked: Sent = []
    start = live.service.start_chat

    async def start_noted(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        asked.append((messages, sampling))
        return await start(messages, sampling, **keywords)

    monkeypatch.setattr(live.service, "start_chat", start_noted)
    return asked


def test_a_card_fills_the_settings_which_go_back_and_leaves_what_was_typed(fresh_chat: ChatPage, sent: Sent) -> None:
    chat, page = fresh_chat, fresh_chat.page
    card = read_card(EMBEDDED_ASSETS / "adapters" / "pirate")
    assert card is not None and card.system_prompt and card.max_tokens
    shown, system = page.locator("#adapter-card"), page.get_by_label("System prompt")
    limit = page.get_by_label("number input for Max tokens")
    page.get_by_role("button", name="Generation settings").click()
    before = limit.input_value()
    chat.choose_adapter("pirate")
    expect(shown).to_contain_text(card.description)
    expect(shown).to_contain_text("Filled into the settings: system prompt, temperature, max tokens.")
    expect(system).to_have_value(card.system_prompt)
    expect(limit).to_have_value(str(card.max_tokens))
    shown.get_by_role("button", name=card.examples[0].title).click()
    expect(chat.box).to_have_value(card.examples[0].prompt)
    expect(chat.box).to_be_focused()
    assert chat.ask(card.examples[0].prompt).startswith("pirate ")
    messages, sampling = sent[0]
    assert messages[0] == Message("system", card.system_prompt) and sampling.max_tokens == card.max_tokens
    chat.choose_adapter("Base model")
    expect(system).to_have_value("")
    expect(limit).to_have_value(before)

    system.fill("Mine.")
    chat.choose_adapter("pirate")
    expect(shown).to_contain_text("Left as you set it: system prompt.")
    expect(limit).to_have_value(str(card.max_tokens))
    expect(system).to_have_value("Mine.")
    shown.get_by_role("button", name="Use the adapter’s own").click()
    expect(system).to_have_value(card.system_prompt)
    expect(shown).not_to_contain_text("Left as you set it")


def test_one_message_is_deleted_with_its_answer_and_can_be_put_back(chat: ChatPage, sent: Sent) -> None:
    page = chat.page
    delete = page.get_by_role("button", name="Delete this message and its answer")
    chat.ask("First question")
    chat.ask("Second question")
    expect(delete).to_have_count(2)
    delete.first.click()
    expect(chat.questions).to_have_text(["Second question"], use_inner_text=True)
    expect(chat.receipts).to_have_count(1)
    page.get_by_role("button", name="Put them back").click()
    expect(chat.questions).to_have_text(["First question", "Second question"], use_inner_text=True)
    delete.last.click()
    expect(chat.questions).to_have_text(["First question"], use_inner_text=True)
    chat.ask("Third question")
    expect(page.get_by_role("button", name="Put them back")).to_have_count(0)
    said = [message.content for message in sent[-1][0] if message.role == "user"]
    assert said == ["First question", "Third question"]
    page.get_by_role("button", name="Earlier conversations").click()
    expect(page.locator("#chat-history li").first).to_contain_text("First question")
