"""The Transcribe tab in a real browser, on the real engine with the embedded model."""

from __future__ import annotations

import re
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from engine.config import EMBEDDED_ASSETS
from engine.request import AudioPart, SamplingParams
from tests.pace import held_after
from tests.ui.live import ANSWER_MS, ChatPage, Live, overflow

CLIP = EMBEDDED_ASSETS / "audio" / "weather-report.wav"
SAID = "the weather in madrid is rainy today"


@pytest.fixture
def page(shared_tab: ChatPage) -> Page:
    shared_tab.page.get_by_role("tab", name="Transcribe").click()
    expect(shared_tab.page.locator("#transcribe-audio")).to_be_visible()
    return shared_tab.page


def columns(page: Page, lora: str) -> Any:
    return page.locator(f"#transcribe-results article[data-lora='{lora}']")


def attach(page: Page, clip: Path) -> None:
    while page.locator("#transcribe-audio").get_by_role("button", name="Clear").count():
        page.locator("#transcribe-audio").get_by_role("button", name="Clear").first.click()
    page.locator("#transcribe-audio input[type=file]").set_input_files(str(clip))
    expect(page.locator("#transcribe-audio").get_by_role("button", name="Play", exact=True)).to_be_visible()


def download(page: Page, kind: str, lora: str = "auto") -> str:
    with page.expect_download() as waiting:
        columns(page, lora).get_by_role("link", name=f"Download {kind}").click()
    assert waiting.value.suggested_filename == f"weather-report.{kind.lower()}"
    return Path(waiting.value.path()).read_text(encoding="utf-8")


def test_a_recording_is_written_down_with_and_without_the_adapter(page: Page) -> None:
    page.locator("#transcribe-run").click()
    expect(page.get_by_test_id("toast-text")).to_contain_text("Add a recording first")
    page.locator("#transcribe-run").click()
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-run").click()
    expect(page.get_by_test_id("toast-text").last).to_contain_text("Write a prompt or add media first.")
    expect(page.get_by_test_id("toast-body").last.locator(".toast-title")).to_have_text(re.compile(r"^Please note\s*$"))
    page.get_by_role("tab", name="Transcribe").click()
    attach(page, CLIP)
    page.locator("#transcribe-run").click()
    for lora in ("auto", "none"):
        expect(columns(page, lora).get_by_role("link", name="Download TXT")).to_be_visible(timeout=ANSWER_MS)
    expect(columns(page, "auto").locator("h3")).to_contain_text("speech")
    for lora in ("auto", "none"):
        assert columns(page, lora).locator("ins").count() > 0 and columns(page, lora).locator("del").count() == 0
        expect(columns(page, lora).locator("[data-legend]")).to_have_text("not in the other transcript ")
    assert columns(page, "auto").locator(".segment span").inner_text() == SAID
    assert columns(page, "none").locator(".segment span").inner_text() in download(page, "TXT", "none")
    assert download(page, "TXT") == f"{SAID}\n"
    srt, vtt = download(page, "SRT"), download(page, "VTT")
    assert srt.startswith("1\n00:00:00,") and SAID in srt and vtt.startswith("WEBVTT") and SAID in vtt
    columns(page, "auto").get_by_role("button", name="Play from 0:00").click()
    expect(columns(page, "auto").locator("button.playing")).to_have_count(1)
    page.wait_for_function("document.querySelector('#transcribe-player audio').currentTime > 0.1")
    columns(page, "auto").get_by_role("button", name="Play from 0:00").click()
    assert page.evaluate("document.querySelector('#transcribe-player audio').paused")

    page.locator("#transcribe-reference textarea").fill("The weather in Madrid is sunny today.")
    expect(columns(page, "auto")).to_contain_text(
        "Word error rate 14.3%: 1 wrong + 0 missing + 0 added = 1, against 7 words"
    )
    expect(columns(page, "auto").locator("ins")).to_have_text(["rainy"])
    missing = columns(page, "auto").locator("del")
    expect(missing).to_have_attribute("data-words", "sunny")
    shown = missing.evaluate("each => getComputedStyle(each, '::before').content + each.getBoundingClientRect().width")
    assert shown.startswith('"sunny"') and float(shown.removeprefix('"sunny"')) > 20
    assert columns(page, "auto").locator(".segment span").inner_text() == SAID
    assert copied(page, columns(page, "auto").locator(".words")) == SAID
    expect(columns(page, "auto").locator("[data-legend]")).to_have_text(
        "not in the reference missing: only in the reference "
    )
    page.set_viewport_size({"width": 390, "height": 844})
    assert overflow(page) == 0
    page.set_viewport_size({"width": 1280, "height": 860})
    page.locator("#transcribe-reference textarea").fill("")


def copied(page: Page, part: Locator) -> str:
    """What the clipboard would get of all that stands in `part`."""
    part.evaluate("each => getSelection().selectAllChildren(each)")
    return str(page.evaluate("getSelection().toString()")).strip()


def test_a_sample_brings_what_is_said_in_it_and_takes_it_away_again(page: Page) -> None:
    reference = page.locator("#transcribe-reference textarea")
    page.locator("#transcribe-sample").click()
    expect(reference).to_have_value(SAID)
    page.locator("#transcribe-run").click()
    expect(columns(page, "auto")).to_contain_text("Word error rate 0.0%", timeout=ANSWER_MS)
    expect(columns(page, "auto").locator("[data-legend]")).to_have_count(0)
    attach(page, CLIP.with_name("train-time.wav"))
    expect(reference).to_have_value("")
    expect(columns(page, "auto")).not_to_contain_text("Word error rate")
    # The transcript is still that of the sample: words of another recording are no measure of it.
    reference.fill("the train to lisbon")
    page.wait_for_timeout(300)
    expect(columns(page, "auto")).not_to_contain_text("Word error rate")
    reference.fill("")


def test_a_missing_microphone_is_told_to_those_who_want_one(open_page: Callable[..., Page], live: Live) -> None:
    page = open_page()
    page.add_init_script("navigator.mediaDevices.enumerateDevices = async () => []")
    page.goto(live.url)
    for tab in ("Transcribe", "Compare"):
        page.get_by_role("tab", name=tab).click()
        audio = page.locator(f"#{tab.lower()}-audio")
        with page.expect_file_chooser() as chooser:
            audio.locator("button.upload-container, button:has(input[type=file])").first.click()
        chooser.value.set_files(str(CLIP))
        expect(audio.get_by_role("button", name="Play", exact=True)).to_be_visible()
        audio.get_by_role("button", name="Clear").first.click()
        page.wait_for_timeout(200)
        expect(audio.locator(".recorder-hint")).to_have_count(0)
        audio.get_by_role("button", name="Record audio").click()
        expect(audio.locator(".recorder-hint")).to_contain_text("No microphone was found")
        audio.get_by_role("button", name="Upload file").click()
        expect(audio.locator(".recorder-hint")).to_have_count(0)


def test_a_file_without_sound_is_refused_in_words_and_stop_ends_a_transcript(
    page: Page, live: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attach(page, CLIP)
    transcribe = live.service.transcribe
    endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    def transcribe_endlessly(audio: AudioPart, **keywords: Any) -> Any:
        return transcribe(audio, endless, **keywords)

    monkeypatch.setattr(live.service, "transcribe", transcribe_endlessly)
    with held_after(live.engine):
        page.locator("#transcribe-run").click()
        for lora in ("auto", "none"):
            expect(columns(page, lora)).to_contain_text("answering", timeout=ANSWER_MS)
        page.locator("#transcribe-stop").click()
        for lora in ("auto", "none"):
            expect(columns(page, lora)).to_contain_text("stopped")
    expect(page.locator("#transcribe-run")).to_be_visible()
    monkeypatch.undo()
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF" + bytes(200))
    page.locator("#transcribe-audio").get_by_role("button", name="Clear").first.click()
    with page.expect_response(lambda response: "/upload" in response.url):
        page.locator("#transcribe-audio input[type=file]").set_input_files(str(broken))
    page.wait_for_timeout(300)
    page.locator("#transcribe-run").click()
    expect(columns(page, "auto").locator(".trouble")).to_contain_text("Unsupported audio format", timeout=ANSWER_MS)


def test_what_the_microphone_hears_is_written_down(open_page: Callable[..., Page], live: Live) -> None:
    page = open_page(permissions=["microphone"])
    page.goto(live.url)
    page.get_by_role("tab", name="Transcribe").click()
    audio = page.locator("#transcribe-audio")
    audio.get_by_role("button", name="Record audio").click()
    audio.get_by_role("button", name="Record", exact=True).click()
    expect(audio.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    page.wait_for_timeout(700)
    audio.get_by_role("button", name="Stop", exact=True).click()
    expect(audio.get_by_role("button", name="Play", exact=True)).to_be_visible()
    page.get_by_label("Also without an adapter").uncheck()
    page.locator("#transcribe-run").click()
    expect(columns(page, "auto").locator("[data-figures]")).to_contain_text("first token", timeout=ANSWER_MS)
    expect(columns(page, "none")).to_have_count(0)


def test_a_long_recording_comes_in_segments_with_their_times(page: Page, live: Live, tmp_path: Path) -> None:
    with wave.open(str(CLIP)) as clip:
        parameters, sound = clip.getparams(), clip.readframes(clip.getnframes())
    long = tmp_path / "long.wav"
    with wave.open(str(long), "wb") as joined:
        joined.setparams(parameters)
        pause = bytes(parameters.framerate * parameters.sampwidth)
        joined.writeframes((sound + pause) * 6)
    attach(page, long)
    page.locator("#transcribe-run").click()
    expect(columns(page, "auto").get_by_role("link", name="Download SRT")).to_be_visible(timeout=ANSWER_MS)
    times = columns(page, "auto").locator("button.time").all_inner_texts()
    assert len(times) > 1 and times[0] == "0:00" and times == sorted(times)
