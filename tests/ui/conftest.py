"""One engine, one server and one browser for all tests of the web app."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, expect, sync_playwright

from api.settings import ServerSettings
from engine import Engine
from tests.ui.live import PATIENCE_MS, ChatPage, Live, browser_path, embedded_engine, launch, serving, write_tone

TEXT_MS = 2_000
MAX_TEXT = 4_000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the pages showed when a test failed, printed before they are closed."""
    report = yield
    browser = getattr(item, "funcargs", {}).get("browser")
    printer = item.config.pluginmanager.get_plugin("terminalreporter")
    if call.when == "call" and report.failed and browser is not None and printer is not None:
        printer.write_line(f"\n{item.nodeid} failed")
        for page in [page for context in browser.contexts for page in context.pages]:
            try:
                text = page.locator("body").inner_text(timeout=TEXT_MS)
            except Error as error:
                text = f"not readable: {error}"
            printer.write_line(f"--- {page.url} showed:\n{text[:MAX_TEXT]}")
    return report


@pytest.fixture(scope="session")
def tone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second of sound."""
    return write_tone(tmp_path_factory.mktemp("audio") / "tone.wav")


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine that `make run` starts."""
    engine = embedded_engine(tmp_path_factory.mktemp("catalogue"))
    yield engine
    engine.close(drain_s=1.0)


@pytest.fixture(scope="session")
def live(embedded: Engine) -> Iterator[Live]:
    """A server without credentials on a loopback address."""
    with serving(embedded, ServerSettings().resolve()) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tone: Path) -> Iterator[Browser]:
    """A real Chromium whose microphone hears the tone.

    One for each file: while Playwright runs, no other test can have an event loop in this thread.
    """
    if browser_path() is None:
        pytest.skip("no Chromium is installed; tests/install_browser.sh says how to get one")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        started = launch(playwright, recording=tone)
        yield started
        started.close()


def new_context(browser: Browser, **options: Any) -> BrowserContext:
    """A fresh visitor."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
    context.set_default_timeout(PATIENCE_MS)
    return context


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages of fresh visitors; keywords are those of Playwright's contexts."""
    contexts = []

    def open_one(**options: Any) -> Page:
        context = new_context(browser, **options)
        contexts.append(context)
        return context.new_page()

    yield open_one
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def shared_tab(browser: Browser, live: Live) -> ChatPage:
    """A tab that stays open, because loading the page takes longer than most tests."""
    return ChatPage(new_context(browser).new_page()).open(live.url)


@pytest.fixture
def chat(shared_tab: ChatPage) -> ChatPage:
    """The Chat tab with an empty conversation, ready to use."""
    return shared_tab.start_over()


@pytest.fixture
def fresh_chat(open_page: Callable[..., Page], live: Live) -> ChatPage:
    """The Chat tab of a new visitor."""
    return ChatPage(open_page()).open(live.url)
