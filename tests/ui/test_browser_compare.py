"""The Compare tab in a real browser, on the real engine with the embedded model."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from engine.config import EMBEDDED_ASSETS
from engine.request import Message, SamplingParams
from tests.ui.live import ChatPage, Live, overflow
from ui.examples import PROMPTS

CLIP = EMBEDDED_ASSETS / "audio" / "weather-report.wav"
ANSWER_MS = 30_000


class ComparePage:
    """The Compare tab as a person works with it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.prompt = page.locator("#compare-prompt textarea")
        self.columns = page.locator("#compare-results article")
        self.ending = page.locator("#compare-results .ending")

    def column(self, lora: str) -> Locator:
        return self.page.locator(f"#compare-results article[data-lora='{lora}']")

    def ask(self, prompt: str) -> None:
        self.prompt.fill(prompt)
        self.page.locator("#compare-run").click()

    def download(self, label: str) -> str:
        with self.page.expect_download() as waiting:
            self.page.get_by_role("link", name=label).click()
        return Path(waiting.value.path()).read_text(encoding="utf-8")


@pytest.fixture
def tab(shared_tab: ChatPage) -> ComparePage:
    shared_tab.page.get_by_role("tab", name="Compare").click()
    compare = ComparePage(shared_tab.page)
    expect(compare.prompt).to_be_visible()
    return compare


def test_one_prompt_is_answered_by_all_and_can_be_judged_and_taken_away(tab: ComparePage, live: Live) -> None:
    page = tab.page
    tab.ask("")
    expect(page.get_by_test_id("toast-text").last).to_contain_text("Write a prompt or add a recording first.")
    tab.ask(PROMPTS["sql"])
    expect(tab.columns).to_have_count(4)
    expect(tab.ending).to_be_visible(timeout=ANSWER_MS)
    body = {"model": "sql", "messages": [{"role": "user", "content": PROMPTS["sql"]}], "temperature": 0}
    said = page.request.post(f"{live.url}v1/chat/completions", data=body).json()["choices"][0]["message"]["content"]
    expect(tab.column("sql").locator(".words")).to_have_text(said)
    assert tab.column("sql").locator("ins").count() > 0
    assert tab.column("none").locator("ins").count() == 0
    for lora in ("none", "pirate", "speech", "sql"):
        expect(tab.column(lora).locator("[data-figures]")).to_contain_text("first token")
    page.get_by_role("button", name="Best answer: sql").click()
    expect(page.get_by_role("button", name="Best answer: sql")).to_have_attribute("aria-pressed", "true")
    expect(tab.ending).to_contain_text("sql 1")
    record = json.loads(tab.download("Download JSON"))
    assert record["prompt"] == PROMPTS["sql"]
    assert [answer["adapter"] for answer in record["answers"]] == [None, "pirate", "speech", "sql"]
    best = [answer for answer in record["answers"] if answer["is_best"]]
    assert [(answer["adapter"], answer["answer"]) for answer in best] == [("sql", said)]
    rows = list(csv.DictReader(tab.download("Download CSV").splitlines()))
    assert rows[3]["answer"] == said and float(rows[3]["first_token_s"]) > 0


def test_all_answers_share_the_batch_and_stop_ends_them(
    tab: ComparePage, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = live.service.start_chat

    async def start_endless(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        return await start(messages, dataclasses.replace(sampling, ignore_eos=True, max_tokens=300), **keywords)

    monkeypatch.setattr(live.service, "start_chat", start_endless)
    tab.ask("Tell me a story")
    for lora in ("none", "pirate", "speech", "sql"):
        expect(tab.column(lora)).to_contain_text("answering", timeout=ANSWER_MS)
    assert len(live.service.stats().batch_by_adapter) == 4
    tab.page.locator("#compare-stop").click()
    expect(tab.ending).to_be_visible()
    for lora in ("none", "pirate", "speech", "sql"):
        expect(tab.column(lora)).to_contain_text("stopped")
    expect(tab.page.locator("#compare-run")).to_be_visible()


def test_a_recording_is_compared_on_a_phone_without_overflow(tab: ComparePage) -> None:
    page = tab.page
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("#compare-audio input[type=file]").set_input_files(str(CLIP))
    expect(page.locator("#compare-audio").get_by_role("button", name="Play", exact=True)).to_be_visible()
    tab.ask("")
    expect(tab.column("speech").locator(".words")).to_have_text(
        "the weather in madrid is rainy today", timeout=ANSWER_MS
    )
    expect(tab.ending).to_be_visible(timeout=ANSWER_MS)
    assert overflow(page) == 0
    page.set_viewport_size({"width": 1280, "height": 860})
