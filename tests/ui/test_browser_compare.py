"""The Compare tab in a real browser, on the real engine with the embedded model."""

from __future__ import annotations

import base64
import csv
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect

from api.settings import ServerSettings
from engine import Engine, EngineConfig
from engine.config import EMBEDDED_ASSETS, LoRAModule
from engine.request import Message, SamplingParams
from tests.media_models import LLAVA
from tests.oracles import make_adapter, make_model
from tests.pace import held_after
from tests.ui.live import ANSWER_MS, ChatPage, Live, overflow, serving, wait_for
from ui.examples import PROMPTS

CLIP = EMBEDDED_ASSETS / "audio" / "weather-report.wav"
SIX = tuple(f"style-{number}" for number in range(6))


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
    expect(page.get_by_test_id("toast-text").last).to_contain_text("Write a prompt or add media first.")
    tab.ask(PROMPTS["sql"])
    expect(tab.columns).to_have_count(4)
    expect(tab.ending).to_be_visible(timeout=ANSWER_MS)
    body = {"model": "sql", "messages": [{"role": "user", "content": PROMPTS["sql"]}], "temperature": 0}
    said = page.request.post(f"{live.url}v1/chat/completions", data=body).json()["choices"][0]["message"]["content"]
    expect(tab.column("sql").locator(".words")).to_have_text(said)
    assert tab.column("sql").locator("ins").count() > 0
    assert tab.column("none").locator("ins").count() == 0
    for lora in ("none", "pirate", "speech", "sql"):
        expect(tab.column(lora).locator("[data-figures]")).to_contain_text(
            re.compile(r"First token\s*[0-9].*tokens/s", re.S)
        )
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
    with held_after(live.engine):
        tab.ask("Tell me a story")
        for lora in ("none", "pirate", "speech", "sql"):
            expect(tab.column(lora)).to_contain_text("answering", timeout=ANSWER_MS)
        wait_for(tab.page, lambda: len(live.service.stats().batch_by_adapter) == 4)
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


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose model takes images, with six adapters."""
    root = tmp_path_factory.mktemp("seeing")
    model = make_model(LLAVA, root / "model")
    targets = r".*language_model.*\.(q_proj|o_proj)"
    paths = {
        name: make_adapter(model, LLAVA, root / name, targets=targets, seed=seed, std=0.4)
        for seed, name in enumerate(SIX, 30)
    }
    config = EngineConfig(
        model=str(model), lora_modules=[LoRAModule(name, str(path)) for name, path in paths.items()], max_loras=6,
        max_num_seqs=8, max_lora_rank=8, max_model_len=160, adapter_dir=str(root / "catalogue"), kv_cache_memory_mb=16,
    )  # fmt: skip
    engine = Engine(config)
    with serving(engine, ServerSettings().resolve()) as running:
        yield running
    engine.close(drain_s=1.0)


def test_images_and_a_prompt_are_answered_by_the_base_and_six_adapters_in_one_batch(
    seeing: Live, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    image = tmp_path / "red.png"
    Image.new("RGB", (24, 24), (200, 30, 30)).save(image)
    page = open_page()
    page.goto(seeing.url)
    page.get_by_role("tab", name="Compare").click()
    tab = ComparePage(page)
    page.locator("#compare-images input[type=file]").set_input_files(str(image))
    expect(page.locator("#compare-images img").first).to_be_visible()
    with held_after(seeing.engine, 1):
        tab.ask("What is this?")
        wait_for(page, lambda: len(seeing.service.stats().batch_by_adapter) == 7)
    expect(tab.ending).to_be_visible(timeout=ANSWER_MS)
    expect(tab.columns).to_have_count(7)
    record = json.loads(tab.download("Download JSON"))
    assert (record["images"], [answer["error"] for answer in record["answers"]]) == (["red.png"], [None] * 7)
    coded = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
    question = {"type": "text", "text": "What is this?"}
    with_image = [{"type": "image_url", "image_url": {"url": coded}}, question]
    for content, is_same in ((with_image, True), ([question], False)):
        body = {"model": SIX[5], "messages": [{"role": "user", "content": content}], "temperature": 0}
        body["max_tokens"] = record["sampling"]["max_tokens"]
        said = page.request.post(f"{seeing.url}v1/chat/completions", data=body).json()["choices"][0]["message"]
        assert (record["answers"][6]["answer"] == said["content"]) is is_same
    assert next(iter(csv.DictReader(tab.download("Download CSV").splitlines())))["media"] == "red.png"

    page.locator("#compare-images").get_by_role("button", name="Clear").first.click()
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image at all")
    with page.expect_response(lambda response: "/upload" in response.url):
        page.locator("#compare-images input[type=file]").set_input_files(str(broken))
    page.wait_for_timeout(500)
    tab.ask("What is this?")
    expect(tab.column(SIX[0]).locator(".trouble")).to_contain_text("image", timeout=ANSWER_MS)
