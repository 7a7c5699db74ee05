"""What holds on every tab: accessibility by axe-core, two languages, and the keyboard."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, ViewportSize, expect

from engine.config import EMBEDDED_ASSETS
from engine.request import Message, SamplingParams
from tests.pace import held_after
from tests.ui.live import ANSWER_MS, ChatPage, Live
from ui.examples import PROMPTS

TABS = ("Chat", "Transcribe", "Compare", "Adapters", "Status")
FOLDER = EMBEDDED_ASSETS / "adapters" / "sql"
DESKTOP: ViewportSize = {"width": 1280, "height": 860}
PHONE: ViewportSize = {"width": 390, "height": 844}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    return resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()


# Colours that are still on their way are nobody's fault.
ANIMATIONS_END = """() => Promise.allSettled(
  document.getAnimations()
    .filter((each) => each.playState === "running" && each.effect.getComputedTiming().endTime !== Infinity)
    .map((each) => each.finished)
).then(() => null)"""


def violations(page: Page, axe: str) -> dict[str, list[str]]:
    """Rule -> the places that break it."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe)
    found: list[dict[str, Any]] = page.evaluate(
        "rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']}).then(result => result.violations)",
        RULES,
    )
    return {rule["id"]: [node["html"][:160] for node in rule["nodes"]] for rule in found}


def press(button: Locator, *, until: Locator) -> None:
    """Press a button; once more where nothing comes of it, as a person would on a page that was still moving."""
    button.click()
    try:
        expect(until).to_be_visible()
    except AssertionError:
        if button.is_visible():
            button.click()
        expect(until).to_be_visible(timeout=ANSWER_MS)


def fill(page: Page) -> None:
    """Bring every tab but Chat to where it has something to show."""
    page.get_by_role("tab", name="Transcribe").click()
    page.locator("#transcribe-sample").click()
    expect(page.locator("#transcribe-audio").get_by_role("button", name="Play", exact=True)).to_be_visible()
    press(page.locator("#transcribe-run"), until=page.locator("#transcribe-results .side-by-side"))
    expect(page.locator("#transcribe-results").get_by_role("link", name="SRT")).to_have_count(2, timeout=ANSWER_MS)
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-prompt textarea").fill(PROMPTS["sql"])
    press(page.locator("#compare-run"), until=page.locator("#compare-results article").first)
    expect(page.locator("#compare-results .ending")).to_be_visible(timeout=ANSWER_MS)
    page.get_by_role("button", name="Best answer: sql").click()
    page.get_by_role("tab", name="Adapters").click()
    page.locator("#adapter-upload input[type=file]").set_input_files(FOLDER / "adapter_config.json")
    expect(page.locator("#adapters-report article")).to_contain_text("Refused")
    page.get_by_role("button", name="Versions of sql").click()
    expect(page.locator("#adapters-versions table")).to_be_visible()


def faults_of_all_tabs(page: Page, axe: str, tabs: Sequence[str] = TABS) -> dict[str, dict[str, list[str]]]:
    """Tab -> what axe-core finds there, in the theme that is on."""
    found = {}
    for tab in tabs:
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(300)
        page.evaluate(ANIMATIONS_END)
        if faults := violations(page, axe):
            found[tab] = faults
    return found


@pytest.mark.timeout(600)
def test_axe_finds_nothing_on_any_tab_in_light_or_dark_on_a_desktop_or_a_phone(
    open_page: Callable[..., Page], live: Live, axe: str
) -> None:
    page = open_page()
    chat = ChatPage(page).open(live.url)
    found = {"empty": faults_of_all_tabs(page, axe, TABS[:3])}
    page.get_by_role("tab", name="Chat").click()
    chat.ask("List all notes")
    page.get_by_role("button", name="Earlier conversations").click()
    fill(page)
    for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
        page.set_viewport_size(size)
        for scheme in ("light", "dark"):
            assert page.evaluate("document.body.classList.contains('dark')") is (scheme == "dark")
            found[f"{name}, {scheme}"] = faults_of_all_tabs(page, axe)
            page.locator("[data-theme-toggle]").click()
    assert len(found) == 5 and not any(found.values()), json.dumps(found, indent=1)
    page.evaluate("document.querySelector('#tabs [role=tab]').insertAdjacentHTML('afterend', '<img src=x>')")
    assert "image-alt" in violations(page, axe)


# What moves on its own, as browsers score it (Layout Instability, WICG); what a person does is not left out.
WATCH_SHIFTS = """() => {
  window.shifts = [];
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) {
      window.shifts.push([entry.value, entry.sources.map((source) => source.node && (source.node.id || source.node.className))]);
    }
  }).observe({ type: 'layout-shift' });
}"""
MAX_SHIFT = 0.02


def test_nothing_moves_while_answers_grow(
    open_page: Callable[..., Page], live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = live.service.start_chat

    async def start_long(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        return await start(messages, dataclasses.replace(sampling, ignore_eos=True, max_tokens=120), **keywords)

    monkeypatch.setattr(live.service, "start_chat", start_long)
    for size in (DESKTOP, PHONE):
        page = open_page(viewport=size)
        chat = ChatPage(page).open(live.url)
        with held_after(live.engine):
            chat.submit("Tell me a long story about a fox")
            expect(chat.receipts).to_contain_text("answering", timeout=ANSWER_MS)
            page.evaluate(WATCH_SHIFTS)
        chat.wait_for_receipt(1)
        page.wait_for_timeout(300)
        shifts = page.evaluate("window.shifts")
        assert sum(value for value, _ in shifts) <= MAX_SHIFT, shifts

        page.get_by_role("tab", name="Compare").click()
        page.locator("#compare-prompt textarea").fill("Tell me a long story about a fox")
        with held_after(live.engine):
            page.locator("#compare-run").click()
            expect(page.locator("#compare-results .growing")).to_have_count(4)
            page.evaluate(WATCH_SHIFTS)
        expect(page.locator("#compare-results .ending")).to_be_visible(timeout=ANSWER_MS)
        page.wait_for_timeout(300)
        shifts = page.evaluate("window.shifts")
        assert sum(value for value, _ in shifts) <= MAX_SHIFT, shifts
        page.evaluate("document.querySelector('#compare-results').style.marginTop = '300px'")
        page.wait_for_function("window.shifts.some(([value]) => value > 0.02)")


def test_a_button_keeps_the_focus_when_its_list_is_drawn_anew(open_page: Callable[..., Page], live: Live) -> None:
    page = open_page()
    ChatPage(page).open(live.url)
    page.get_by_role("tab", name="Adapters").click()
    pin = page.get_by_role("button", name="Pin pirate")
    pin.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    page.evaluate("document.querySelector('#adapters-table tr[data-adapter=pirate]').dataset.old = 'yes'")
    live.engine.adapters.load("newcomer", FOLDER)
    try:
        expect(page.locator("#adapters-table tr[data-adapter=newcomer]")).to_be_visible()
        expect(page.locator("#adapters-table tr[data-old]")).to_have_count(0)
        expect(page.get_by_role("button", name="Pin pirate")).to_be_focused()
    finally:
        live.engine.adapters.unload("newcomer")


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
