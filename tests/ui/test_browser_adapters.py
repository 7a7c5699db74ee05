"""The Adapters tab in a real browser, on the real engine with the embedded model."""

from __future__ import annotations

import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from api.settings import ServerSettings
from engine import Engine
from engine.config import EMBEDDED_ASSETS
from tests.ui.live import ChatPage, Live, drop_files, serving

SQL = EMBEDDED_ASSETS / "adapters" / "sql"


def zip_of(folder: Path, *, config: dict[str, object] | None = None) -> bytes:
    """The adapter of a folder as a zip, with fields of its config replaced."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        fields = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        archive.writestr("adapter_config.json", json.dumps(fields | (config or {})))
        archive.write(folder / "adapter_model.safetensors", "adapter_model.safetensors")
    return buffer.getvalue()


class AdaptersPage:
    """The Adapters tab as a person works with it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.table = page.locator("#adapters-table")
        self.cards = page.locator("#adapters-report article")
        self.toasts = page.get_by_test_id("toast-text")

    def open(self) -> AdaptersPage:
        self.page.get_by_role("tab", name="Adapters").click()
        expect(self.table).to_contain_text("speech")
        return self

    def row(self, name: str) -> Locator:
        return self.table.locator(f"tr[data-adapter='{name}']")

    def drop(self, **files: bytes) -> None:
        """Drag files from a folder onto the drop box and let go."""
        drop_files(self.page.locator("#adapter-upload button").first, files)


@pytest.fixture
def tab(chat: ChatPage, live: Live) -> Iterator[AdaptersPage]:
    """The Adapters tab without cards of earlier tests; what a test installs is unloaded afterwards."""
    adapters = AdaptersPage(chat.page).open()
    while count := adapters.cards.count():
        adapters.cards.first.get_by_role("button", name="Dismiss").click()
        expect(adapters.cards).to_have_count(count - 1)
    before = set(live.engine.adapters.names())
    yield adapters
    for name in set(live.engine.adapters.names()) - before:
        live.engine.adapters.unload(name)


def test_the_table_says_what_each_adapter_is(tab: AdaptersPage, live: Live) -> None:
    info = live.engine.adapters.get("speech")
    row = tab.row("speech")
    expect(row).to_contain_text((info.generation or "").removeprefix("sha256:")[:8])
    expect(row).to_contain_text("default for audio")
    expect(row).to_contain_text("q_proj, v_proj")
    expect(row).to_contain_text(str(info.rank))
    expect(tab.page.locator("#adapters-figures")).to_contain_text("Adapters3")


def test_memory_is_shown_by_tier_and_an_adapter_goes_out_as_a_zip(tab: AdaptersPage, live: Live) -> None:
    page, name = tab.page, "sql"
    in_memory = [info for info in live.engine.adapters.list() if info.state in ("cpu", "gpu")]
    bar = page.locator("#adapters-memory [data-tier=cpu] .bar")
    expect(bar.locator("i")).to_have_count(len(in_memory))
    expect(bar).to_have_attribute("aria-label", re.compile(", ".join(sorted(i.name for i in in_memory)[:1])))
    with page.expect_download() as waiting:
        page.get_by_role("link", name=f"Download {name} as a zip").click()
    assert waiting.value.suggested_filename == "sql.zip"
    with zipfile.ZipFile(waiting.value.path()) as archive:
        for path in ("adapter_config.json", "adapter_model.safetensors"):
            assert archive.read(path) == (SQL / path).read_bytes()
    page.set_viewport_size({"width": 390, "height": 844})
    for label in ("Unload sql", "Download sql as a zip"):
        tab.row(name).get_by_label(label).scroll_into_view_if_needed()
        expect(tab.row(name).get_by_label(label)).to_be_in_viewport(ratio=1)
    page.set_viewport_size({"width": 1280, "height": 860})


def test_a_dropped_zip_is_checked_named_installed_used_and_deleted(tab: AdaptersPage, live: Live) -> None:
    page, name = tab.page, "my-queries-1"
    tab.drop(**{"my queries (1).zip": zip_of(SQL)})
    card = tab.cards.first
    expect(card).to_contain_text("Ready to install")
    expect(card).to_contain_text("42 of 42 tensor pairs matched")
    expect(card).to_contain_text("Tried out: it changes")
    expect(card.get_by_role("textbox", name="Name")).to_have_value(name)
    assert not live.engine.adapters.contains(name)

    card.get_by_role("button", name="Install").click()
    expect(tab.toasts.last).to_contain_text(f"{name} is installed")
    # The same content as a listed adapter's, which trying it out has put into a row of the batch.
    expect(tab.row(name)).to_contain_text("in batch slot")
    assert live.engine.adapters.get(name).is_stored

    page.get_by_role("tab", name="Chat").click()
    chat = ChatPage(page)
    chat.choose_adapter(name)
    assert chat.ask("List all notes").startswith(name)

    tab.open()
    tab.row(name).get_by_role("button", name=f"Delete {name}").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Cancel").click()
    assert live.engine.adapters.contains(name)
    tab.row(name).get_by_role("button", name=f"Delete {name}").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(tab.row(name)).to_have_count(0)
    assert not live.engine.adapters.contains(name)

    page.get_by_role("tab", name="Chat").click()
    expect(page.get_by_label("Adapter", exact=True)).to_have_value("Auto: decided by what the message holds")
    expect(chat.hint).to_contain_text(f"{name} was unloaded")


def test_a_dropped_folder_is_one_adapter_without_what_a_training_run_left_in_it(
    tab: AdaptersPage, tmp_path: Path
) -> None:
    run = tmp_path / "run" / "checkpoint-100"
    shutil.copytree(SQL, run)
    (run / "optimizer.pt").write_bytes(bytes(1000))
    devtools = tab.page.context.new_cdp_session(tab.page)
    tab.page.locator("#adapter-upload").scroll_into_view_if_needed()
    box = tab.page.locator("#adapter-upload").bounding_box()
    assert box is not None
    dragged = {"items": [], "files": [str(run.parent)], "dragOperationsMask": 1}
    for event in ("dragEnter", "dragOver", "drop"):
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        devtools.send("Input.dispatchDragEvent", {"type": event, **place, "data": dragged})
    expect(tab.cards).to_have_count(1)
    expect(tab.cards.first).to_contain_text("Ready to install")
    expect(tab.cards.first).to_contain_text("Found adapter_card.json, adapter_config.json, adapter_model")
    expect(tab.cards.first).not_to_contain_text("optimizer")


def test_several_files_are_judged_one_by_one_and_bad_ones_say_why(tab: AdaptersPage) -> None:
    tab.drop(
        **{
            "good.zip": zip_of(SQL),
            "too-large.zip": zip_of(SQL, config={"r": 512}),
            "broken.zip": b"PK\x03\x04 no more",
            "adapter_config.json": (SQL / "adapter_config.json").read_bytes(),
            "adapter_model.safetensors": (SQL / "adapter_model.safetensors").read_bytes(),
        }
    )
    expect(tab.cards).to_have_count(4)
    by_title = {title: tab.cards.filter(has=tab.page.get_by_role("heading", name=title)) for title in TITLES}
    expect(by_title["good.zip"]).to_contain_text("Ready to install")
    expect(by_title["2 files"]).to_contain_text("Ready to install")
    for title in ("too-large.zip", "broken.zip"):
        expect(by_title[title]).to_contain_text("Refused")
        expect(by_title[title]).to_contain_text("Failed")
        expect(by_title[title].get_by_role("button", name="Install")).to_have_count(0)


TITLES = ("good.zip", "too-large.zip", "broken.zip", "2 files")


def test_a_taken_name_is_only_replaced_when_asked_for(tab: AdaptersPage, live: Live) -> None:
    tab.drop(**{"first.zip": zip_of(SQL)})
    tab.cards.first.get_by_role("button", name="Install").click()
    expect(tab.row("first")).to_be_visible()
    old = live.engine.adapters.get("first").generation
    tab.drop(**{"first.zip": zip_of(SQL, config={"lora_alpha": 8})})
    card = tab.cards.first
    badge, warning = card.locator(".chip"), card.locator("li.taken")
    name, replace = (
        card.get_by_role("textbox", name="Name"),
        card.get_by_label("Replace the adapter that has this name"),
    )

    # Said before anything is pressed, and as it is typed.
    expect(badge).to_have_text("Name taken")
    expect(warning).to_contain_text("The name first is taken. Give it another name, or tick")
    for fix, undo in ((replace.check, replace.uncheck), (lambda: name.fill("third"), lambda: name.fill("sql"))):
        fix()
        expect(badge).to_have_text("Ready to install")
        expect(warning).to_be_hidden()
        undo()
        expect(badge).to_have_text("Name taken")
    expect(warning).to_contain_text("The name sql is taken.")

    name.fill("first")
    card.get_by_role("button", name="Install").click()
    expect(tab.toasts.last).to_contain_text("The name first is taken.")
    assert live.engine.adapters.get("first").generation == old
    expect(name).to_have_value("first")
    expect(badge).to_have_text("Name taken")
    replace.check()
    card.get_by_role("button", name="Install").click()
    expect(badge).to_have_text("Installed")
    assert live.engine.adapters.get("first").generation != old


def test_a_failed_installation_is_on_the_badge_until_something_changes(tab: AdaptersPage, live: Live) -> None:
    tab.drop(**{"good.zip": zip_of(SQL)})
    card = tab.cards.first
    expect(card).to_contain_text("Ready to install")
    card.get_by_role("textbox", name="Name").fill(live.engine.model_names[0])
    card.get_by_role("button", name="Install").click()
    expect(card.locator(".chip.bad")).to_have_text("Not installed")
    expect(card.locator("li.problem")).to_contain_text("Failed")
    card.get_by_role("textbox", name="Name").fill("allowed")
    expect(card.locator(".chip.good")).to_have_text("Ready to install")
    expect(card.locator("li.problem")).to_be_hidden()


def test_pin_and_unpin(tab: AdaptersPage, live: Live) -> None:
    tab.row("pirate").get_by_role("button", name="Pin pirate").click()
    expect(tab.row("pirate")).to_contain_text("pinned")
    assert live.engine.adapters.get("pirate").pinned
    tab.row("pirate").get_by_role("button", name="Unpin pirate").click()
    expect(tab.row("pirate")).not_to_contain_text("pinned")
    assert not live.engine.adapters.get("pirate").pinned


def test_defaults_change_and_versions_go_back(tab: AdaptersPage, live: Live) -> None:
    adapters = live.engine.adapters
    adapters.load("mine", SQL)
    first = str(adapters.get("mine").generation)
    adapters.load("mine", EMBEDDED_ASSETS / "adapters" / "pirate", load_inplace=True)
    second = str(adapters.get("mine").generation)
    try:
        tab.row("mine").get_by_role("button", name="Default for audio: mine").click()
        expect(tab.row("mine")).to_contain_text("default for audio")
        expect(tab.row("mine").get_by_role("button", name="Unpin mine")).to_have_count(0)
        expect(tab.row("speech")).not_to_contain_text("default for audio")
        assert live.engine.default_mm_loras == {"audio": "mine"}
        tab.row("mine").get_by_role("button", name="No default for audio: mine").click()
        expect(tab.row("mine")).not_to_contain_text("default for audio")

        tab.row("mine").get_by_role("button", name="Versions of mine").click()
        versions = tab.page.locator("#adapters-versions tbody tr")
        expect(versions).to_have_count(2)
        expect(versions.first).to_contain_text("current")
        versions.last.get_by_role("button", name="Roll mine back to").click()
        expect(tab.toasts.last).to_contain_text("mine is rolled back to")
        expect(tab.page.locator(f"#adapters-versions tr[data-version='{first}']")).to_contain_text("current")
        assert adapters.get("mine").generation == first != second
        tab.page.locator("#adapters-versions").get_by_role("button", name="Close").click()
        expect(versions).to_have_count(0)
    finally:
        live.engine.set_default("audio", "speech")


def assert_locked(page: Page, reason: str, live: Live) -> None:
    """The page says why, and a button that was enabled by hand gets no further than the server."""
    tab = AdaptersPage(page).open()
    expect(page.locator("#adapters-notice")).to_contain_text(reason)
    unload = tab.row("pirate").get_by_role("button", name="Unload pirate")
    expect(unload).to_be_disabled()
    unload.evaluate("(button) => { button.disabled = false; button.dataset.title = ''; button.click(); }")
    expect(tab.toasts.first).to_contain_text(reason)
    assert live.engine.adapters.contains("pirate")


def test_where_updates_are_off_the_page_says_how_to_turn_them_on(
    embedded: Engine, open_page: Callable[..., Page]
) -> None:
    with serving(embedded, ServerSettings(allow_runtime_lora_updating=False).resolve()) as server:
        page = open_page()
        ChatPage(page).open(server.url)
        assert_locked(page, "--allow-runtime-lora-updating", server)


def test_only_the_administrators_login_may_change_adapters(embedded: Engine, open_page: Callable[..., Page]) -> None:
    with serving(embedded, ServerSettings(api_key="user-key", admin_key="admin-key").resolve()) as server:
        visitor, admin = (
            open_page(http_credentials={"username": "anyone", "password": key}) for key in ("user-key", "admin-key")
        )
        assert ChatPage(visitor).open(server.url).ask("Hello!").startswith("Base model")
        assert_locked(visitor, "need the admin key", server)
        ChatPage(admin).open(server.url)
        tab = AdaptersPage(admin).open()
        expect(tab.row("pirate").get_by_role("button", name="Unload pirate")).to_be_enabled()
        expect(admin.locator("#adapters-notice")).not_to_be_visible()
