"""The Chat tab in a real browser, on the real engine with the embedded model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from engine.config import EMBEDDED_ASSETS
from engine.errors import InvalidRequest
from engine.request import Message, SamplingParams
from tests.pace import held_after
from tests.ui.live import ANSWER_MS, ChatPage, Live, drop_files, overflow, wait_for, write_tone
from ui.examples import PROMPTS

MANIFEST = EMBEDDED_ASSETS / "audio" / "manifest.json"


@pytest.fixture
def endless(live: Live, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Answers that begin, and then go on until they are stopped."""
    start = live.service.start_chat

    async def start_endless(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        return await start(messages, dataclasses.replace(sampling, ignore_eos=True, max_tokens=1000), **keywords)

    monkeypatch.setattr(live.service, "start_chat", start_endless)
    with held_after(live.engine):
        yield


@pytest.fixture
def sent(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Message]]:
    """The prompts that reach the service."""
    prompts: list[Sequence[Message]] = []
    start = live.service.start_chat

    async def start_noted(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        prompts.append(messages)
        return await start(messages, sampling, **keywords)

    monkeypatch.setattr(live.service, "start_chat", start_noted)
    return prompts


def wait_until_idle(page: Page, live: Live) -> None:
    """Wait until nothing runs or waits in the engine."""
    wait_for(page, lambda: live.service.stats().num_running + live.service.stats().num_waiting == 0)


def test_plain_text_is_answered_by_the_base_model_and_says_so(chat: ChatPage) -> None:
    receipt = chat.ask("Hello!")
    assert receipt.startswith("Base model base model, no adapter applies")
    red, green, blue = (int(part) for part in re.findall(r"\d+", mark_colours(chat)[0]))
    assert max(red, green, blue) - min(red, green, blue) < 50  # grey
    assert "queued" in receipt and "tokens cached" in receipt
    card = chat.page.locator("#last-answer")
    expect(card).to_contain_text("Base model")
    expect(card).to_contain_text("First token")


def test_the_adapter_that_was_picked_answers_with_its_generation(chat: ChatPage, live: Live) -> None:
    chat.choose_adapter("sql")
    receipt = chat.ask("List all notes")
    digest = (live.engine.adapters.get("sql").generation or "").removeprefix("sha256:")[:8]
    assert receipt.startswith(f"sql {digest} · chosen by you was in memory · queued ")
    # The closed menu holds nothing that the answer has just changed.
    expect(chat.page.get_by_label("Adapter", exact=True)).to_have_value("sql")
    chat.choose_adapter("Base model")
    assert "you asked for the base model" in chat.ask("And now?")


def test_a_chosen_adapter_shows_its_card_and_is_fetched_before_it_is_asked_for(
    chat: ChatPage, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(live.engine, "prefetch", fetched.append)
    card = chat.page.locator("#adapter-card")
    expect(card).to_contain_text("Conversations with audio go to speech; all others to the base model.")
    chat.choose_adapter("pirate")
    info = live.engine.adapters.get("pirate")
    expect(card).to_contain_text((info.generation or "").removeprefix("sha256:")[:8])
    expect(card).to_contain_text(f"{info.num_modules}: {', '.join(info.target_modules)}")
    assert fetched == ["pirate"]
    chat.choose_adapter("Base model")
    expect(card).to_contain_text("The base model answers, whatever the message holds.")
    assert fetched == ["pirate"]


def test_attached_audio_fetches_the_adapter_that_answers_it_by_itself(
    chat: ChatPage, live: Live, monkeypatch: pytest.MonkeyPatch, tone: Path
) -> None:
    fetched: list[str] = []
    has_fetched = threading.Event()

    def fetch(name: str) -> None:
        fetched.append(name)
        has_fetched.set()

    monkeypatch.setattr(live.engine, "prefetch", fetch)
    chat.ask("only words")
    assert fetched == []
    chat.attach(tone)
    assert has_fetched.wait(60) and set(fetched) == {"speech"}
    chat.choose_adapter("Base model")
    before = len(fetched)
    chat.ask("and now?")
    assert len(fetched) == before


def test_a_wait_for_an_adapter_is_told_with_its_time(
    chat: ChatPage, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = live.service.start_chat
    may_go_on = threading.Event()

    async def start_late(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        await asyncio.to_thread(may_go_on.wait)
        return await start(messages, sampling, **keywords)

    monkeypatch.setattr(live.service, "start_chat", start_late)
    monkeypatch.setattr(live.service, "is_on_disk", lambda name: name == "sql")
    chat.choose_adapter("sql")
    chat.submit("List all notes")
    expect(chat.receipts.last).to_have_text(re.compile(r"Loading adapter sql \d"))
    may_go_on.set()
    assert chat.wait_for_receipt(1).startswith("sql ")


def test_the_browser_alone_keeps_conversations_which_can_be_opened_exported_and_deleted(
    fresh_chat: ChatPage, live: Live
) -> None:
    page, chat = fresh_chat.page, fresh_chat
    chat.ask("First question")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="Export as Markdown").click()
    assert "First question" in Path(waiting.value.path()).read_text(encoding="utf-8")
    page.locator("#new-conversation").click()
    expect(chat.questions).to_have_count(0)
    chat.ask("Second question")
    page.reload()
    expect(chat.box).to_be_visible()
    expect(chat.questions).to_have_count(0)
    page.get_by_role("button", name="Earlier conversations").click()
    rows = page.locator("#chat-history li")
    expect(rows).to_have_count(2)
    rows.filter(has_text="First question").locator("button.open").click()
    expect(chat.questions).to_have_text(["First question"], use_inner_text=True)
    chat.ask("And then?")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("First question")
    page.get_by_role("button", name="Delete: Second question").click()
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Delete all", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete all").click()
    expect(page.locator("#chat-history")).to_contain_text("Only this browser keeps them")


def test_an_uploaded_clip_goes_to_the_default_for_audio_and_can_be_played(chat: ChatPage, tone: Path) -> None:
    chat.attach(tone)
    receipt = chat.ask()
    assert receipt.startswith("speech ")
    assert "the message holds audio, and speech is the default for audio" in receipt
    play = chat.page.locator("#chatbot").get_by_role("button", name="Play", exact=True)
    expect(play).to_be_visible()
    receipt = chat.ask("Thank you")
    expect(chat.page.locator("#last-answer .mark")).to_have_css("background-color", mark_colours(chat)[0])
    assert "an earlier message holds audio, and speech is the default for audio" in receipt


def mark_colours(chat: ChatPage) -> list[str]:
    """The colour of the square in each receipt."""
    script = "(marks) => marks.map((mark) => getComputedStyle(mark).backgroundColor)"
    colours: list[str] = chat.receipts.locator(".mark").evaluate_all(script)
    return colours


def test_a_clip_may_be_dropped_on_the_conversation(chat: ChatPage, tone: Path) -> None:
    for place in ("#chatbot", "#composer textarea"):
        drop_files(chat.page.locator(place), {"tone.wav": tone.read_bytes()}, "audio/wav")
        expect(chat.page.get_by_role("button", name="Remove file")).to_have_count(1)
        chat.page.get_by_role("button", name="Remove file").click()
    drop_files(chat.page.locator("#chatbot"), {"notes.txt": b"no sound"}, "text/plain")
    expect(chat.page.locator("#attach-hint")).to_have_text(
        "notes.txt is not attached: this model takes text and audio."
    )
    expect(chat.page.get_by_role("button", name="Remove file")).to_have_count(0)


TYPED = "<b>bold</b> <script>gone()</script> **stars** &amp;\n```sql\n  SELECT 1 < 2;\n```"


def test_what_a_person_typed_is_shown_copied_and_edited_as_typed(
    open_page: Callable[..., Page], live: Live, sent: list[Sequence[Message]]
) -> None:
    chat = ChatPage(open_page(permissions=["clipboard-read", "clipboard-write"])).open(live.url)
    page = chat.page
    chat.ask(TYPED)
    expect(chat.questions).to_have_text(TYPED, use_inner_text=True)
    assert chat.questions.locator("b:visible, strong:visible").count() == 0
    page.get_by_role("button", name="Copy message").first.click()
    assert page.evaluate("navigator.clipboard.readText()") == TYPED
    page.get_by_role("button", name="Edit", exact=True).click()
    expect(page.locator("#chatbot textarea")).to_have_value(TYPED)
    page.locator("#chatbot textarea").fill("<i>other</i>")
    page.locator("#chatbot").get_by_role("button", name="Submit").click()
    wait_for(page, lambda: len(sent) == 2)
    chat.wait_for_receipt(1)
    expect(chat.questions).to_have_text("<i>other</i>", use_inner_text=True)
    assert sent[-1][0].content == "<i>other</i>"


DEFAULT_GONE = (
    "The default adapter for audio, 'speech', is not loaded; load it again, or ask with lora none for the base model."
)


def test_a_failure_is_told_whole_with_its_ways_out(chat: ChatPage, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    start = live.service.start_chat

    async def fail_unless_none(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        if keywords["lora"] != "none":
            raise InvalidRequest(DEFAULT_GONE)
        return await start(messages, sampling, **keywords)

    monkeypatch.setattr(live.service, "start_chat", fail_unless_none)
    chat.submit("Hello")
    expect(chat.answers.last).to_contain_text(f"No answer. {DEFAULT_GONE} This message is left out")
    expect(chat.page.locator("#last-answer")).to_contain_text(DEFAULT_GONE)
    for name in ("Try again", "Ask the base model"):
        expect(chat.page.get_by_role("button", name=name)).to_be_in_viewport(ratio=1)
    chat.page.get_by_role("button", name="Ask the base model").click()
    assert chat.wait_for_receipt(1).startswith("Base model")


def test_a_recording_of_the_microphone_is_sent(open_page: Callable[..., Page], live: Live) -> None:
    chat = ChatPage(open_page(permissions=["microphone"])).open(live.url)
    page = chat.page
    page.get_by_test_id("microphone-button").click()
    page.get_by_role("button", name="Start recording").click()
    expect(page.get_by_role("button", name="Stop recording")).to_be_visible()
    page.wait_for_timeout(700)
    page.get_by_role("button", name="Stop recording").click()
    page.get_by_role("button", name="Attach audio").click()
    expect(page.get_by_role("button", name="Remove file")).to_be_visible()
    assert chat.ask().startswith("speech ")


def test_a_page_without_microphone_says_what_to_do(open_page: Callable[..., Page], live: Live) -> None:
    page = open_page()
    page.add_init_script("navigator.mediaDevices.enumerateDevices = async () => []")
    chat = ChatPage(page).open(live.url)
    page.get_by_test_id("microphone-button").click()
    expect(page.locator("#attach-hint")).to_contain_text("No microphone was found")
    expect(chat.box).to_be_visible()


def test_nothing_is_sent_without_content(chat: ChatPage, tmp_path: Path, sent: list[Any]) -> None:
    chat.submit("")
    expect(chat.hint).to_contain_text("Write a message or attach audio first.")
    expect(chat.hint.locator("p")).to_be_in_viewport(ratio=1)
    chat.attach(write_tone(tmp_path / "empty.wav", seconds=0))
    chat.submit("What is this?")
    expect(chat.hint).to_contain_text("Nothing was recorded.")
    expect(chat.questions).to_have_count(0)
    assert sent == []


@pytest.mark.usefixtures("endless")
def test_stop_ends_the_answer_and_frees_the_engine(chat: ChatPage, live: Live) -> None:
    chat.submit("Tell me a story")
    expect(chat.receipts).to_contain_text("answering", timeout=ANSWER_MS)
    wait_for(chat.page, lambda: live.service.stats().num_running == 1)
    chat.stop_button.click()
    expect(chat.answers.last).to_contain_text("Stopped by you", timeout=ANSWER_MS)
    wait_until_idle(chat.page, live)
    chat.wait_until_ready()


@pytest.mark.usefixtures("endless")
def test_a_closed_tab_frees_the_engine(fresh_chat: ChatPage, live: Live, open_page: Callable[..., Page]) -> None:
    fresh_chat.submit("Tell me a story")
    expect(fresh_chat.receipts).to_contain_text("answering", timeout=ANSWER_MS)
    wait_for(fresh_chat.page, lambda: live.service.stats().num_running == 1)
    fresh_chat.page.close()
    wait_until_idle(open_page(), live)


@pytest.mark.usefixtures("endless")
def test_two_visitors_are_answered_at_once_and_see_only_their_own(
    chat: ChatPage, live: Live, open_page: Callable[..., Page]
) -> None:
    other = ChatPage(open_page()).open(live.url)
    chat.submit("First visitor")
    other.submit("Second visitor")
    for each in (chat, other):
        expect(each.receipts).to_contain_text("answering", timeout=ANSWER_MS)
    wait_for(chat.page, lambda: live.service.stats().num_running == 2)
    chat.stop_button.click()
    expect(chat.answers.last).to_contain_text("Stopped by you", timeout=ANSWER_MS)
    wait_for(chat.page, lambda: live.service.stats().num_running == 1)
    expect(other.questions).to_have_text(["Second visitor"], use_inner_text=True)
    other.stop_button.click()
    wait_until_idle(chat.page, live)


def test_retry_edit_undo_and_new_conversation(chat: ChatPage, sent: list[Sequence[Message]]) -> None:
    page = chat.page
    chat.ask("Hello")
    chat.ask("Who are you?")
    page.get_by_role("button", name="Retry", exact=True).click()
    wait_for(page, lambda: len(sent) == 3)
    chat.wait_for_receipt(2)
    assert [message.content for message in sent[2] if message.role == "user"] == ["Hello", "Who are you?"]

    page.get_by_role("button", name="Edit", exact=True).first.click()
    page.locator("#chatbot textarea").fill("Good morning")
    page.locator("#chatbot").get_by_role("button", name="Submit").click()
    wait_for(page, lambda: len(sent) == 4)
    chat.wait_for_receipt(1)
    assert [message.content for message in sent[3]] == ["Good morning"]

    page.get_by_role("button", name="Undo", exact=True).click()
    expect(chat.box).to_have_value("Good morning")
    expect(chat.questions).to_have_count(0)
    chat.ask("Good evening")
    page.get_by_role("button", name="New conversation").click()
    expect(chat.questions).to_have_count(0)


def test_only_what_was_said_goes_back_to_the_model(
    chat: ChatPage, tone: Path, tmp_path: Path, sent: list[Sequence[Message]]
) -> None:
    chat.attach(tone)
    chat.ask("What is this?")
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"RIFF" + bytes(200))
    chat.attach(broken)
    chat.submit("And this?")
    expect(chat.answers.last).to_contain_text("No answer.", timeout=ANSWER_MS)
    expect(chat.answers.last).to_contain_text("left out of what the model sees")
    chat.wait_until_ready()
    chat.ask("Thank you")
    roles = [message.role for message in sent[-1]]
    assert roles == ["user", "assistant", "user"]
    assert sent[-1][2].content == "Thank you"
    everything = str(sent[-1])
    assert "tone.wav" in everything
    for never in ("default for audio", "No answer.", "broken.wav", "tokens/s"):
        assert never not in everything


def test_settings_reach_the_engine(fresh_chat: ChatPage, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Sequence[Message], SamplingParams]] = []
    start = live.service.start_chat

    async def start_noted(messages: Sequence[Message], sampling: SamplingParams, **keywords: Any) -> Any:
        seen.append((messages, sampling))
        return await start(messages, sampling, **keywords)

    monkeypatch.setattr(live.service, "start_chat", start_noted)
    page = fresh_chat.page
    page.get_by_role("button", name="Generation settings").click()
    expect(page.get_by_label("Seed")).to_have_value("")
    for label, value in (
        ("number input for Max tokens", "7"),
        ("number input for Temperature", "0.5"),
        ("Seed", "42"),
        ("System prompt", "Be brief."),
    ):
        control = page.get_by_label(label)
        control.click()
        control.fill(value)
        control.press("Tab")
        expect(control).to_have_value(value)
    fresh_chat.ask("Hello")
    page.get_by_label("Seed").fill("")
    fresh_chat.ask("Hello")
    assert seen[1][1].seed is None
    page.get_by_label("Seed").fill("lucky")
    fresh_chat.submit("Hello")
    expect(fresh_chat.answers.last).to_contain_text("seed is a whole number, and 'lucky' is none", timeout=ANSWER_MS)
    messages, sampling = seen[0]
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.5, 42)
    assert messages[0] == Message("system", "Be brief.")


def test_a_sample_recording_is_written_down_word_by_word(chat: ChatPage) -> None:
    clip = next(clip for clip in json.loads(MANIFEST.read_text(encoding="utf-8")) if clip.get("example"))
    chat.page.locator("#chatbot").get_by_role("button", name="Recording:").first.click()
    assert chat.wait_for_receipt(1).startswith("speech ")
    expect(chat.answers.last).to_have_text(clip["text"])


def test_a_text_example_is_answered_by_its_adapter_as_the_api_would(chat: ChatPage, live: Live) -> None:
    chat.page.locator("#chatbot").get_by_role("button", name="Write SQL").click()
    assert chat.wait_for_receipt(1).startswith("sql ")
    expect(chat.page.get_by_label("Adapter", exact=True)).to_have_value(re.compile("^sql"))
    body = {"model": "sql", "messages": [{"role": "user", "content": PROMPTS["sql"]}], "temperature": 0}
    reply = chat.page.request.post(f"{live.url}v1/chat/completions", data=body).json()
    said = reply["choices"][0]["message"]["content"]
    assert said.startswith("SELECT")
    expect(chat.answers.last).to_have_text(said)


def test_no_request_leaves_the_server_whatever_an_answer_says(
    fresh_chat: ChatPage, live: Live, tone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []
    fetched: list[str] = []
    page = fresh_chat.page
    page.on("request", lambda request: requested.append(request.url))
    page.on("response", lambda response: fetched.append(response.url))
    page.reload()
    fresh_chat.attach(tone)
    fresh_chat.ask("![spy](https://example.com/spy.png) <img src='https://example.com/spy2.png'>")
    page.get_by_role("tab", name="Adapters").click()
    expect(page.locator("#adapters-table")).to_contain_text("speech")
    outside = [url for url in fetched if not url.startswith((live.url, "data:", "blob:"))]
    assert len(fetched) > 20 and outside == []
    # The page wanted the pictures, so that the policy is what kept them from being fetched.
    assert any("example.com" in url for url in requested)


def test_a_phone_shows_everything_without_scrolling_sideways(
    open_page: Callable[..., Page], live: Live, tone: Path
) -> None:
    page = open_page(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    chat = ChatPage(page).open(live.url)
    assert overflow(page) == 0
    menu, composer = page.locator("#adapter-menu").bounding_box(), page.locator("#composer").bounding_box()
    assert menu is not None and composer is not None
    assert menu["y"] < composer["y"] and composer["y"] + composer["height"] <= 844
    chat.attach(tone)
    chat.ask("Please write down every single word of this recording, averylongwordthatdoesnotbreakanywhere" * 2)
    assert overflow(page) == 0
    page.get_by_role("tab", name="Adapters").click()
    expect(page.locator("#adapters-table")).to_contain_text("speech")
    assert overflow(page) == 0


def test_every_control_has_a_name(chat: ChatPage, tone: Path) -> None:
    chat.attach(tone)
    chat.ask("Hello")
    chat.page.get_by_role("button", name="Generation settings").click()
    nameless = chat.page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, select, [role=button], [role=tab]')]
          .filter((node) => node.offsetParent !== null && !node.closest('[aria-hidden=true]'))
          .filter((node) => !(node.getAttribute('aria-label') || node.innerText || node.title
            || [...(node.labels ?? [])].some((label) => label.innerText.trim())))
          .map((node) => node.outerHTML.slice(0, 200))"""
    )
    assert nameless == []


def test_the_theme_button_is_remembered(fresh_chat: ChatPage) -> None:
    page = fresh_chat.page
    body = page.locator("body")
    expect(body).not_to_have_class(re.compile(r"\bdark\b"))
    page.get_by_role("button", name="Theme: switch between light and dark").click()
    expect(body).to_have_class(re.compile(r"\bdark\b"))
    page.reload()
    expect(fresh_chat.box).to_be_visible()
    expect(body).to_have_class(re.compile(r"\bdark\b"))
    page.get_by_role("tab", name="Adapters").click()
    pill = page.locator("#adapters-table .chip.plain").first
    colour = pill.evaluate("(pill) => getComputedStyle(pill).color")
    assert min(int(part) for part in re.findall(r"\d+", colour)) > 200  # not faint on the dark page
