"""The Transcribe tab: a recording in, what is said in it out, with and without the adapter.

Owns the components and their thin callbacks; the record and its drawing are `ui/transcript`, an answer's progress
`ui/answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from api.service import Service
from engine.request import AudioPart
from engine.routing import AUTO, NONE
from ui.answer import run_transcript
from ui.examples import find_examples
from ui.page import DIRECT, Page, session_of, warn
from ui.streaming import batches, merged
from ui.text import Texts
from ui.transcript import Transcript, Transcription, player_html, transcription_html

Values = dict[Any, Any]
Update = dict[Any, Any]


class TranscribeTab:
    """Builds the tab's components and answers their events."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._stops = page.new_stops()
        clips = find_examples(page.text, takes_audio=page.takes_audio, adapters=())
        self._sample = next((example for example in clips if example.audio is not None), None)

    def build(self) -> None:
        """Create the components inside the current tab, then connect them."""
        label = self._page.label
        choices = self._choices(self._page.text, [info.name for info in self._page.shared_adapters])
        self.transcription = gr.State(Transcription())
        with gr.Row(elem_id="transcribe-row", equal_height=False):
            with gr.Column(scale=7, min_width=320):
                self.audio = gr.Audio(
                    label=label("transcribe.audio"), sources=["upload", "microphone"], buttons=["download"], type="filepath",
                    elem_id="transcribe-audio",
                )  # fmt: skip
                self.reference = gr.Textbox(
                    label=label("transcribe.reference"), placeholder=label("transcribe.reference_placeholder"),
                    lines=2, max_lines=8, elem_id="transcribe-reference",
                )  # fmt: skip
            with gr.Column(scale=4, min_width=300):
                self.adapter = gr.Dropdown(
                    choices, value=AUTO, label=label("chat.adapter"), filterable=False,
                    info=label("transcribe.adapter_info"), elem_id="transcribe-adapter",
                )  # fmt: skip
                self.with_base = gr.Checkbox(True, label=label("transcribe.with_base"), elem_id="transcribe-base")
                self.run = gr.Button(label("transcribe.run"), variant="primary", elem_id="transcribe-run")
                self.stop = gr.Button(label("compare.stop"), variant="stop", elem_id="transcribe-stop", visible=False)
                self.sample = gr.Button(
                    label("transcribe.sample"), size="md", elem_id="transcribe-sample", visible=self._sample is not None
                )
        self.player = gr.HTML("", elem_id="transcribe-player", padding=False, apply_default_css=False)
        self.results = gr.HTML(
            transcription_html(self._page.text, Transcription()), elem_id="transcribe-results", padding=False,
            apply_default_css=False,
        )  # fmt: skip
        self._connect()

    def load(self, blocks: gr.Blocks) -> None:
        """Nothing happens here when the page is opened."""

    def watch(self, selected: gr.Tab, others: Sequence[gr.Tab]) -> None:
        """The adapters to choose from are those of the moment the tab is opened."""
        selected.select(self.refresh, [self.adapter, self.transcription], [self.adapter, self.results], **DIRECT)

    def _connect(self) -> None:
        outputs = [self.results, self.player, self.run, self.stop]
        begun = self.run.click(
            self.transcribe, {self.audio, self.adapter, self.with_base, self.reference, self.transcription}, outputs,
            concurrency_limit=None, show_progress="hidden", api_visibility="private",
        )  # fmt: skip
        begun.then(self.settle, self.transcription, outputs, **DIRECT)
        self.stop.click(self.request_stop, None, None, **DIRECT)
        if sample := self._sample:
            self.sample.click(lambda: (str(sample.audio), sample.said), None, [self.audio, self.reference], **DIRECT)
        for another in (self.audio.upload, self.audio.start_recording, self.audio.clear):
            another(self.forget_sample, self.reference, self.reference, **DIRECT)
        measured = [self.reference, self.audio, self.transcription]
        self.reference.change(self.measure, measured, self.results, trigger_mode="always_last", **DIRECT)

    def _choices(self, text: Texts, names: Sequence[str]) -> list[tuple[str, str]]:
        return [(text("transcribe.auto"), AUTO), *((name, name) for name in names)]

    async def refresh(self, chosen: str, transcription: Transcription, request: gr.Request) -> Update:
        """The adapters as they are now; one that is gone is no longer chosen."""
        words = self._page.words(request)
        choices = self._choices(words, await self._page.adapter_names(request))
        value = chosen if any(chosen == value for _, value in choices) else AUTO
        # While a transcript grows, the run draws: this answer may arrive after the run's last.
        is_busy = self._stops.is_busy(session_of(request))
        return {
            self.adapter: gr.update(choices=choices, value=value),
            self.results: gr.skip() if is_busy else transcription_html(words, transcription),
        }

    async def transcribe(self, values: Values, request: gr.Request) -> AsyncGenerator[Update, None]:
        """Transcribe the recording and draw what comes."""
        words, clip = self._page.words(request), values[self.audio]
        if not clip:
            warn(words, words("transcribe.no_audio"))
            yield {self.results: gr.skip()}
            return
        stop = self._stops.begin(session_of(request))
        if stop is None:
            warn(words, words("transcribe.busy"))
            yield {self.results: gr.skip()}
            return
        transcription: Transcription = values[self.transcription]
        transcription.audio, transcription.reference = Path(clip), values[self.reference] or ""
        lora = values[self.adapter] or AUTO
        wanted = [lora, NONE] if values[self.with_base] else [lora]
        transcription.columns = [Transcript(each) for each in wanted]
        try:
            yield {
                self.results: transcription_html(words, transcription),
                self.player: player_html(Path(clip)),
                self.run: gr.update(visible=False),
                self.stop: gr.update(visible=True),
            }
            service = self._page.service_for(request)
            runs = [self._answer(service, column, Path(clip), stop) for column in transcription.columns]
            async with aclosing(batches(merged(runs), asyncio.Event())) as lists:
                async for changes in lists:
                    has_changed = any(changed for _, changed in changes)
                    yield {self.results: transcription_html(words, transcription) if has_changed else gr.skip()}
        finally:
            self._stops.end(session_of(request))

    def _answer(
        self, service: Service, transcript: Transcript, clip: Path, stop: asyncio.Event
    ) -> AsyncGenerator[bool, None]:
        events = service.transcribe(AudioPart(clip, param=clip.name), lora=transcript.lora)
        return run_transcript(events, transcript, stop=stop, samples=self._page.samples)

    def settle(self, transcription: Transcription, request: gr.Request) -> Update:
        """However it ended: the button comes back, and a transcript that a fault cut off says so."""
        if self._stops.is_busy(session_of(request)):
            return {self.results: gr.skip()}
        words = self._page.words(request)
        for column in transcription.columns:
            if not column.reply.is_final:
                column.reply.phase, column.reply.error = "failed", words("chat.fault")
        return {
            self.results: transcription_html(words, transcription),
            self.run: gr.update(visible=True),
            self.stop: gr.update(visible=False),
        }

    def request_stop(self, request: gr.Request) -> None:
        """Stop pressed: both transcripts end."""
        self._stops.request(session_of(request))

    def forget_sample(self, reference: str) -> Any:
        """Another recording: what the sample says is no reference for it."""
        return "" if self._sample and reference == self._sample.said else gr.skip()

    def measure(self, reference: str, clip: str | None, transcription: Transcription, request: gr.Request) -> Any:
        """A reference pasted: the error rates of what is there, unless it is the transcript of another recording."""
        if clip and Path(clip) != transcription.audio:
            return gr.skip()
        transcription.reference = reference or ""
        if self._stops.is_busy(session_of(request)):
            return gr.skip()  # the run draws, and what it draws last has the reference too
        return transcription_html(self._page.words(request), transcription)
