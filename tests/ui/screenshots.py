"""Takes the pictures of the documentation: `python -m tests.ui.screenshots [FOLDER]`, by default into docs/images.

The page is the real one, on the real engine with the embedded model; what the pictures show is what it answered.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from api.settings import ServerSettings
from engine.config import EMBEDDED_ASSETS
from tests.ui.live import ChatPage, embedded_engine, launch, serving
from ui.examples import PROMPTS

DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
CLIP = EMBEDDED_ASSETS / "audio" / "weather-report.wav"
SETTLE_MS = 1500
PATIENCE_MS = 120_000


def take_all(folder: Path) -> list[Path]:
    """Every picture; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        engine = embedded_engine(Path(scratch) / "adapters")
        try:
            with serving(engine, ServerSettings().resolve()) as server:
                browser = launch(playwright)
                expect.set_options(timeout=PATIENCE_MS)
                paths = [
                    take_chat(browser, server.url, folder / "chat.png", "light"),
                    take_chat(browser, server.url, folder / "chat-dark.png", "dark"),
                    take_card(browser, server.url, folder / "card.png"),
                    take_empty(browser, server.url, folder / "start.png"),
                    take_transcribe(browser, server.url, folder / "transcribe.png"),
                    take_compare(browser, server.url, folder / "compare.png"),
                    take_adapters(browser, server.url, folder / "adapters.png", Path(scratch)),
                    take_status(browser, server.url, folder / "status.png"),
                    take_phone(browser, server.url, folder / "phone.png"),
                ]
                browser.close()
        finally:
            engine.close(drain_s=1.0)
    return paths


def open_page(browser: Browser, url: str, viewport: dict[str, int], scheme: str = "light") -> ChatPage:
    page = browser.new_page(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
    return ChatPage(page).open(url)


def take(page: Page, path: Path) -> Path:
    """Move the mouse out of the way, let everything settle, and take the picture."""
    page.mouse.move(2, 2)
    page.wait_for_timeout(SETTLE_MS)
    page.screenshot(path=path)
    page.close()
    return path


def take_chat(browser: Browser, url: str, path: Path, scheme: str) -> Path:
    """A question for the sql adapter, then a clip that goes to the speech adapter by itself."""
    chat = open_page(browser, url, DESKTOP, scheme)
    chat.choose_adapter("sql")
    chat.ask(PROMPTS["sql"])
    chat.choose_adapter("Auto")
    chat.attach(CLIP)
    chat.ask("Write down what you hear.")
    return take(chat.page, path)


def take_card(browser: Browser, url: str, path: Path) -> Path:
    """An adapter's card, with what it fills into the settings."""
    chat = open_page(browser, url, DESKTOP)
    chat.choose_adapter("sql")
    card = chat.page.locator("#adapter-card")
    card.get_by_role("button", name="Capital of a country").click()
    chat.ask(chat.box.input_value())
    return take(chat.page, path)


def take_empty(browser: Browser, url: str, path: Path) -> Path:
    """The page as it opens."""
    return take(open_page(browser, url, DESKTOP).page, path)


def take_transcribe(browser: Browser, url: str, path: Path) -> Path:
    """The sample recording, with and without the adapter, and what was really said."""
    page = open_page(browser, url, DESKTOP).page
    page.get_by_role("tab", name="Transcribe").click()
    page.locator("#transcribe-audio input[type=file]").set_input_files(str(CLIP))
    expect(page.locator("#transcribe-audio").get_by_role("button", name="Play", exact=True)).to_be_visible()
    page.locator("#transcribe-reference textarea").fill("The weather in Madrid is rainy today.")
    page.locator("#transcribe-run").click()
    expect(page.locator("#transcribe-results").get_by_role("link", name="Download SRT")).to_have_count(2)
    return take(page, path)


def take_status(browser: Browser, url: str, path: Path) -> Path:
    """The plots while several adapters answer."""
    page = open_page(browser, url, DESKTOP).page
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-prompt textarea").fill("Tell me a long story about a fox")
    for _ in range(3):
        page.locator("#compare-run").click()
        expect(page.locator("#compare-results .ending")).to_be_visible()
        page.get_by_role("tab", name="Status").click()
        page.wait_for_timeout(2 * SETTLE_MS)
        page.get_by_role("tab", name="Compare").click()
    page.get_by_role("tab", name="Status").click()
    return take(page, path)


def take_compare(browser: Browser, url: str, path: Path) -> Path:
    """A question for the sql adapter, asked of all."""
    page = open_page(browser, url, DESKTOP).page
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-prompt textarea").fill(PROMPTS["sql"])
    page.locator("#compare-run").click()
    expect(page.locator("#compare-results .ending")).to_be_visible()
    page.get_by_role("button", name="Best answer: sql").click()
    return take(page, path)


def take_adapters(browser: Browser, url: str, path: Path, scratch: Path) -> Path:
    """The table, and an upload that waits to be installed."""
    page = open_page(browser, url, DESKTOP).page
    page.get_by_role("tab", name="Adapters").click()
    upload = scratch / "table-queries.zip"
    with zipfile.ZipFile(upload, "w") as archive:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            archive.write(EMBEDDED_ASSETS / "adapters" / "sql" / name, name)
    page.locator("#adapter-upload input[type=file]").set_input_files(upload)
    expect(page.locator("#adapters-report")).to_contain_text("Ready to install")
    return take(page, path)


def take_phone(browser: Browser, url: str, path: Path) -> Path:
    """A clip and its answer on a phone."""
    chat = open_page(browser, url, PHONE)
    chat.attach(CLIP)
    chat.ask()
    return take(chat.page, path)


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    for taken in take_all(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "docs" / "images"):
        sys.stdout.write(f"{taken}\n")
