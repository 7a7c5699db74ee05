"""Images and recordings in the Chat tab: on a model that takes both, and on one that only hears."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from api.settings import ServerSettings
from engine import Engine, EngineConfig
from engine.config import LoRAModule
from tests.media_models import HAS_OMNI, OMNI
from tests.oracles import make_adapter, make_model
from tests.ui.live import ChatPage, Live, drop_files, overflow, paste_files, serving, write_image

SHORT_TOKENS = 8  # a random model has nothing to say


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose random model takes audio and images, each with a default adapter of its own."""
    if not HAS_OMNI:
        pytest.skip("this version of transformers has no small model for audio and images")
    root = tmp_path_factory.mktemp("seeing")
    folder = make_model(OMNI, root / "omni")
    targets = r".*language_model.*\.(q_proj|o_proj)"
    adapters = [
        LoRAModule(name, str(make_adapter(folder, OMNI, root / name, targets=targets, seed=seed)))
        for seed, name in enumerate(("ears", "eyes"))
    ]
    config = EngineConfig(
        model=str(folder), lora_modules=adapters, default_mm_loras={"audio": "ears", "image": "eyes"},
        adapter_dir=str(root / "catalogue"), max_model_len=480, max_num_seqs=4, kv_cache_memory_mb=32,
    )  # fmt: skip
    engine = Engine(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ui.settings.DEFAULT_MAX_TOKENS", SHORT_TOKENS)
        with serving(engine, ServerSettings().resolve()) as live:
            yield live
    engine.close(drain_s=1.0)


def chips(page: Page, count: int) -> None:
    """Wait until so many files are attached."""
    expect(page.get_by_role("button", name="Remove file")).to_have_count(count)


def test_images_are_dropped_pasted_and_mixed_with_audio_and_the_receipt_says_what_decided(
    open_page: Callable[..., Page], seeing: Live, tone: Path, tmp_path: Path
) -> None:
    page = open_page()
    chat = ChatPage(page).open(seeing.url)
    expect(chat.box).to_have_attribute("placeholder", "Write, drop images or audio, or record")
    image = write_image(tmp_path / "colours.png")
    paste_files(chat.box, {"image.png": image.read_bytes()})
    chips(page, 1)
    assert "the message holds images, and eyes is the default for images" in chat.ask("What is this?")
    shown = page.locator("#chatbot img[src*='image.png']")
    expect(shown).to_be_visible()
    assert shown.evaluate("(image) => image.naturalWidth") == 320
    drop_files(page.locator("#chatbot"), {"colours.png": image.read_bytes(), "tone.wav": tone.read_bytes()})
    chips(page, 2)
    receipt = chat.ask("And these?")
    assert receipt.startswith("Base model conflict: the defaults are ears for audio and eyes for images;")
    expect(page.locator("#last-answer .chip")).to_have_text("conflict")
    expect(page.locator("#chatbot img[src*='colours.png']")).to_be_visible()
    expect(page.locator("#chatbot").get_by_role("button", name="Play", exact=True)).to_be_visible()
    chat.choose_adapter("eyes")
    assert "chosen by you" in chat.ask("And now?")
    assert overflow(page) == 0


def test_an_image_that_cannot_be_read_is_told_in_words(
    open_page: Callable[..., Page], seeing: Live, tmp_path: Path
) -> None:
    chat = ChatPage(open_page()).open(seeing.url)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no pixels at all, but more than a header of sound would have")
    chat.attach(broken)
    chat.submit("What is this?")
    expect(chat.answers.last).to_contain_text("none of PNG, JPEG, WebP and GIF")


def test_a_model_that_only_hears_says_so_of_an_image_and_takes_the_rest(
    chat: ChatPage, tone: Path, tmp_path: Path
) -> None:
    page, hint = chat.page, chat.page.locator("#attach-hint")
    image = write_image(tmp_path / "colours.png")
    refusal = "colours.png is not attached: this model takes no images, only text and audio."
    assert "image" not in (page.get_by_test_id("file-upload").get_attribute("accept") or "")
    drop_files(page.locator("#chatbot"), {"colours.png": image.read_bytes(), "tone.wav": tone.read_bytes()})
    expect(hint).to_have_text(refusal)
    expect(hint.locator("p")).to_be_in_viewport(ratio=1)
    chips(page, 1)
    paste_files(chat.box, {"pasted.png": image.read_bytes()})
    expect(hint).to_contain_text("pasted.png is not attached")
    page.get_by_test_id("file-upload").set_input_files(image)
    expect(hint).to_have_text(refusal)
    chips(page, 1)
    assert chat.ask().startswith("speech ")
    expect(hint).to_be_empty()


def test_without_mediarecorder_the_pages_own_recorder_takes_over(open_page: Callable[..., Page], live: Live) -> None:
    page = open_page(permissions=["microphone"])
    page.add_init_script("delete window.MediaRecorder")
    chat = ChatPage(page).open(live.url)
    page.get_by_test_id("microphone-button").click()
    hint = page.locator("#attach-hint")
    expect(hint).to_contain_text("Recording 0:01")
    page.get_by_role("button", name="Discard").click()
    expect(hint).to_be_empty()
    chips(page, 0)
    page.get_by_test_id("microphone-button").click()
    expect(hint).to_contain_text("Recording 0:01")
    page.get_by_role("button", name="Stop and attach").click()
    chips(page, 1)
    assert chat.ask().startswith("speech ")
    expect(page.locator("#chatbot").get_by_role("button", name="Play", exact=True)).to_be_visible()


def test_where_pages_get_no_microphone_another_app_records(
    open_page: Callable[..., Page], live: Live, tone: Path
) -> None:
    page = open_page()
    chat = ChatPage(page).open(f"http://plain-http.test:{urlsplit(live.url).port}/")
    assert page.evaluate("isSecureContext") is False
    page.get_by_test_id("microphone-button").click()
    hint = page.locator("#attach-hint")
    expect(hint).to_contain_text("The browser gives the microphone only to https pages and to localhost.")
    file = hint.get_by_label("Record with another app, or choose a recording")
    expect(file).to_have_attribute("capture", "user")
    file.set_input_files(tone)
    chips(page, 1)
    assert chat.ask().startswith("speech ")
