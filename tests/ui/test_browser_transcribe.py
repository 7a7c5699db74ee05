"""The Transcribe tab in a real browser, on the real engine with the embedded model."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from engine.config import EMBEDDED_ASSETS
from engine.request import AudioPart, SamplingParams
from tests.ui.live import ChatPage, Live, overflow

CLIP = EMBEDDED_ASSETS / "audio" / "weather-report.wav"
SAID = "the weather in madrid is rainy today"
ANSWER_MS = 30_000


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


def download(page: Page, kind: str) -> str:
    with page.expect_download() as waiting:
        columns(page, "auto").get_by_role("link", name=f"Download {kind}").click()
    assert waiting.value.suggested_filename == f"weather-report.{kind.lower()}"
    return Path(waiting.value.path()).read_text(encoding="utf-8")


def test_a_recording_is_written_down_with_and_without_the_adapter(page: Page) -> None:
    page.locator("#transcribe-run").click()
    expect(page.get_by_test_id("toast-text").last).to_contain_text("Add a recording first")
    attach(page, CLIP)
    page.locator("#transcribe-run").click()
    for lora in ("auto", "none"):
        expect(columns(page, lora).get_by_role("link", name="Download TXT")).to_be_visible(timeout=ANSWER_MS)
    expect(columns(page, "auto").locator("h3")).to_contain_text("speech")
    assert columns(page, "auto").locator("ins").count() > 0
    assert download(page, "TXT") == f"{SAID}\n"
    srt, vtt = download(page, "SRT"), download(page, "VTT")
    assert srt.startswith("1\n00:00:00,") and SAID in srt and vtt.startswith("WEBVTT") and SAID in vtt
    columns(page, "auto").get_by_role("button", name="Play from 0:00").click()
    expect(columns(page, "auto").locator("button.playing")).to_have_count(1)
    page.wait_for_function("document.querySelector('#transcribe-player audio').currentTime > 0.1")
    columns(page, "auto").get_by_role("button", name="Play from 0:00").click()
    assert page.evaluate("document.querySelector('#transcribe-player audio').paused")

    page.locator("#transcribe-reference textarea").fill("The weather in Madrid is sunny today.")
    expect(columns(page, "auto")).to_contain_text("Word error rate 14.3%: 1 of 7 words")
    expect(columns(page, "auto").locator("ins")).to_have_text(["rainy"])
    expect(columns(page, "auto").locator("del")).to_have_text(["sunny"])
    page.set_viewport_size({"width": 390, "height": 844})
    assert overflow(page) == 0
    page.set_viewport_size({"width": 1280, "height": 860})
    page.locator("#transcribe-reference textarea").fill("")


def test_a_file_without_sound_is_refused_in_words_and_stop_ends_a_transcript(
    page: Page, live: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attach(page, CLIP)
    transcribe = live.service.transcribe
    endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)

    def transcribe_endlessly(audio: AudioPart, **keywords: Any) -> Any:
        return transcribe(audio, endless, **keywords)

    monkeypatch.setattr(live.service, "transcribe", transcribe_endlessly)
    page.locator("#transcribe-run").click()
    expect(columns(page, "auto")).to_contain_text("answering", timeout=ANSWER_MS)
    page.locator("#transcribe-stop").click()
    for lora in ("auto", "none"):
        expect(columns(page, lora)).to_contain_text("stopped")
    expect(page.locator("#transcribe-run")).to_be_visible()
    monkeypatch.undo()
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF" + bytes(200))
    page.locator("#transcribe-audio").get_by_role("button", name="Clear").first.click()
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
