"""Takes the pictures of the documentation: `python -m tests.ui.screenshots [FOLDER]`, by default into docs/images.

The page is the real one, on the real engine with the embedded model; what the pictures show is what it answered.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, ViewportSize, expect, sync_playwright

from api.settings import ServerSettings
from engine.config import EMBEDDED_ASSETS
from tests.ui.live import ChatPage, embedded_engine, launch, serving
from ui.examples import PROMPTS

CLIP = EMBEDDED_ASSETS / "audio" / "weather-report.wav"
SETTLE_MS = 1500
PATIENCE_MS = 120_000


def take_all(folder: Path) -> list[Path]:
    """Every screen in light, in dark and on a phone; returns the pictures' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        engine = embedded_engine(Path(scratch) / "adapters")
        try:
            with serving(engine, ServerSettings().resolve()) as server:
                browser = launch(playwright)
                expect.set_options(timeout=PATIENCE_MS)
                upload = write_upload(Path(scratch) / "table-queries.zip")
                paths = [
                    take(open_chat(browser, server.url, look), look.path(folder, name), prepare, upload)
                    for name, prepare in SCREENS.items()
                    for look in LOOKS
                ]
                browser.close()
        finally:
            engine.close(drain_s=1.0)
    return paths


@dataclass(frozen=True)
class Look:
    """How a page is looked at; `suffix` ends the names of its pictures."""

    suffix: str
    viewport: ViewportSize
    scheme: Literal["light", "dark"]

    def path(self, folder: Path, name: str) -> Path:
        """Where the picture of a screen goes."""
        return folder / f"{name}{self.suffix}.png"


LOOKS = (
    Look("", {"width": 1280, "height": 860}, "light"),
    Look("-dark", {"width": 1280, "height": 860}, "dark"),
    Look("-phone", {"width": 390, "height": 844}, "light"),
)


def open_chat(browser: Browser, url: str, look: Look) -> ChatPage:
    return ChatPage(browser.new_page(viewport=look.viewport, color_scheme=look.scheme)).open(url)


def write_upload(path: Path) -> Path:
    """An adapter as a visitor would upload it."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            archive.write(EMBEDDED_ASSETS / "adapters" / "sql" / name, name)
    return path


def take(chat: ChatPage, path: Path, prepare: Callable[[ChatPage, Path], None], upload: Path) -> Path:
    """Bring the page there, move the mouse out of the way, let everything settle, and take the picture."""
    prepare(chat, upload)
    chat.page.mouse.move(2, 2)
    chat.page.wait_for_timeout(SETTLE_MS)
    chat.page.screenshot(path=path)
    chat.page.close()
    return path


def show_start(chat: ChatPage, _: Path) -> None:
    """The page as it opens."""


def show_chat(chat: ChatPage, _: Path) -> None:
    """A question for the sql adapter, then a clip that goes to the speech adapter by itself."""
    chat.choose_adapter("sql")
    chat.ask(PROMPTS["sql"])
    chat.choose_adapter("Auto")
    chat.attach(CLIP)
    chat.ask("Write down what you hear.")


def show_card(chat: ChatPage, _: Path) -> None:
    """An adapter's card, with what it fills into the settings."""
    chat.choose_adapter("sql")
    card = chat.page.locator("#adapter-card")
    card.get_by_role("button", name="Capital of a country").click()
    chat.ask(chat.box.input_value())


def show_transcribe(chat: ChatPage, _: Path) -> None:
    """A recording, with and without the adapter, and what was really said."""
    page = chat.page
    page.get_by_role("tab", name="Transcribe").click()
    page.locator("#transcribe-audio input[type=file]").set_input_files(str(CLIP))
    expect(page.locator("#transcribe-audio").get_by_role("button", name="Play", exact=True)).to_be_visible()
    page.locator("#transcribe-reference textarea").fill("The weather in Madrid is sunny today.")
    page.locator("#transcribe-run").click()
    expect(page.locator("#transcribe-results").get_by_role("link", name="Download SRT")).to_have_count(2)


def show_compare(chat: ChatPage, _: Path) -> None:
    """A question for the sql adapter, asked of all."""
    page = chat.page
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-prompt textarea").fill(PROMPTS["sql"])
    page.locator("#compare-run").click()
    expect(page.locator("#compare-results .ending")).to_be_visible()
    page.get_by_role("button", name="Best answer: sql").click()
    page.locator("#compare-results").scroll_into_view_if_needed()


def show_adapters(chat: ChatPage, upload: Path) -> None:
    """The table, and an upload that waits to be installed."""
    page = chat.page
    page.get_by_role("tab", name="Adapters").click()
    page.locator("#adapter-upload input[type=file]").set_input_files(upload)
    expect(page.locator("#adapters-report")).to_contain_text("Ready to install")


def show_status(chat: ChatPage, _: Path) -> None:
    """The plots while several adapters answer."""
    page = chat.page
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-prompt textarea").fill("Tell me a long story about a fox")
    for _repeat in range(3):
        page.locator("#compare-run").click()
        expect(page.locator("#compare-results .ending")).to_be_visible()
        page.get_by_role("tab", name="Status").click()
        page.wait_for_timeout(2 * SETTLE_MS)
        page.get_by_role("tab", name="Compare").click()
    page.get_by_role("tab", name="Status").click()


SCREENS: dict[str, Callable[[ChatPage, Path], None]] = {
    "start": show_start,
    "chat": show_chat,
    "card": show_card,
    "transcribe": show_transcribe,
    "compare": show_compare,
    "adapters": show_adapters,
    "status": show_status,
}


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    for taken in take_all(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "docs" / "images"):
        sys.stdout.write(f"{taken}\n")
