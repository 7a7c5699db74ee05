"""What holds on every tab: accessibility by axe-core, two languages, and the keyboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.ui.live import ChatPage, Live

TABS = ("Chat", "Transcribe", "Compare", "Adapters", "Status")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    return resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()


def violations(page: Page, axe: str) -> dict[str, list[str]]:
    """Rule -> the places that break it."""
    page.evaluate(axe)
    found: list[dict[str, Any]] = page.evaluate(
        "rules => axe.run(document, {runOnly: rules}).then(result => result.violations)", RULES
    )
    return {rule["id"]: [node["html"][:160] for node in rule["nodes"]] for rule in found}


def test_axe_finds_nothing_on_any_tab_in_light_or_dark(fresh_chat: ChatPage, axe: str) -> None:
    chat, page = fresh_chat, fresh_chat.page
    chat.choose_adapter("sql")
    chat.ask("List all notes")
    page.get_by_role("button", name="Earlier conversations").click()
    found = {}
    for tab in TABS:
        page.get_by_role("tab", name=tab).click()
        for scheme in ("light", "dark"):
            page.wait_for_timeout(400)
            if faults := violations(page, axe):
                found[f"{tab}, {scheme}"] = faults
            page.locator("[data-theme-toggle]").click()
    assert found == {}, json.dumps(found, indent=1)
    page.evaluate("document.querySelector('#tabs [role=tab]').insertAdjacentHTML('afterend', '<img src=x>')")
    assert "image-alt" in violations(page, axe)


def test_a_chinese_browser_sees_chinese_everywhere(open_page: Callable[..., Page], live: Live) -> None:
    page = open_page(locale="zh-CN")
    page.goto(live.url)
    expect(page.get_by_text("想做点什么？")).to_be_visible()
    expect(page.locator("#composer textarea")).to_have_attribute("placeholder", "输入文字、拖入音频，或录音")
    page.locator("#composer textarea").fill("Hello!")
    page.get_by_test_id("submit-button").click()
    expect(page.locator("#chatbot .thought-group .title")).to_contain_text("没有适配器会自动用于这条消息")
    expect(page.locator("#last-answer")).to_contain_text("词元/秒")
    for tab, sentence in (
        ("转写", "拖入录音或直接说话"),
        ("比较", "输入提示词，选择适配器"),
        ("适配器", "每个文件都先检查"),
        ("状态", "批次中的请求"),
    ):
        page.get_by_role("tab", name=tab, exact=True).click()
        expect(page.get_by_text(sentence).first).to_be_visible()


def test_everything_of_a_first_visit_can_be_reached_by_keyboard(fresh_chat: ChatPage) -> None:
    page = fresh_chat.page
    fresh_chat.box.fill("Hello!")
    fresh_chat.box.press("Enter")
    fresh_chat.wait_for_receipt(1)
    page.locator("[data-theme-toggle]").focus()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(() => { const e = document.activeElement; return e.getAttribute('aria-label') || "
                "(e.labels && e.labels[0] && e.labels[0].innerText) || e.innerText || e.id; })()"
            )
        )
    said = " | ".join(str(name).strip() for name in reached)
    for name in (*TABS, "Message", "Adapter", "Generation settings", "New conversation", "Export as Markdown"):
        assert name in said, said
