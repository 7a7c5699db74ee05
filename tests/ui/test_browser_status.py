"""The Status tab in a real browser, on the real engine with the embedded model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest
from playwright.sync_api import expect

from engine.config import EMBEDDED_ASSETS
from engine.request import Message, SamplingParams
from tests.pace import held_after
from tests.ui.live import ChatPage, Live, overflow


def test_plots_live_set_up_and_programs_for_the_current_choice(
    chat: ChatPage, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = chat.page
    start = live.service.start_chat

    async def start_endless(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        return await start(messages, dataclasses.replace(sampling, ignore_eos=True, max_tokens=300), **keywords)

    monkeypatch.setattr(live.service, "start_chat", start_endless)
    page.get_by_role("tab", name="Status").click()
    expect(page.locator("#status-plots figure")).to_have_count(5)
    page.get_by_role("tab", name="Chat").click()
    chat.choose_adapter("pirate")
    with held_after(live.engine):
        chat.submit("Tell me a story")
        expect(chat.receipts).to_contain_text("answering")
        page.get_by_role("tab", name="Status").click()
        batch = page.locator("#status-plots figure").filter(has_text="Requests in the batch")
        expect(batch.locator("li")).to_contain_text(["pirate"])
        expect(page.locator("#status-figures")).to_contain_text(re.compile(r"Running\s*1"))
        page.get_by_role("tab", name="Chat").click()
        chat.stop_button.click()
        chat.wait_until_ready()
    page.get_by_role("tab", name="Status").click()
    first = page.locator("#status-plots figure").filter(has_text="First token")
    expect(first.locator("circle")).not_to_have_count(0)
    expect(page.locator("#status-setup")).to_contain_text(f"{live.engine.max_model_len} tokens")
    for link in page.locator("#status-setup a").all():
        assert page.request.get(f"{live.url}{link.get_attribute('href')}").ok

    page.get_by_label("From a program").click()
    page.get_by_role("option", name="sql").click()
    code = page.locator("#status-snippets code")
    expect(code.first).to_contain_text(f"curl {live.url}v1/chat/completions")
    expect(code.first).to_contain_text('"model": "sql"')
    page.set_viewport_size({"width": 390, "height": 844})
    assert overflow(page) == 0
    expect(page.get_by_role("tab")).to_have_count(5)
    page.set_viewport_size({"width": 1280, "height": 860})
    program = code.nth(1).inner_text()
    said: dict[str, str] = {}
    exec(program.replace("print(", "said.update(text="), {"said": said})
    assert said["text"]

    page.get_by_label("From a program").click()
    page.get_by_role("option", name="speech").click()
    expect(code.first).to_contain_text(f"curl {live.url}v1/audio/transcriptions")
    clip = next((EMBEDDED_ASSETS / "audio").glob("*.wav"))
    program = code.nth(1).inner_text().replace('"recording.wav"', repr(str(clip)))
    exec(program.replace("print(", "said.update(heard="), {"said": said})
    assert said["heard"]
