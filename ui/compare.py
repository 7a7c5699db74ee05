"""The Compare tab: one prompt to the base model and up to six adapters at once, streamed side by side.

Owns the components and their thin callbacks; the record and its drawing are `ui/comparison`, an answer's progress
`ui/answer`. All answers run in the engine's one batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import gradio as gr

from api.service import Service
from engine.answer import Answer
from engine.routing import NONE
from ui.answer import run_reply
from ui.comparison import VOTE_SCRIPT, Column, Comparison, comparison_html
from ui.page import DIRECT, Page, session_of, warn
from ui.receipt import Reply
from ui.settings import GenerationSettings
from ui.streaming import batches, merged
from ui.text import Texts

MAX_ADAPTERS = 6
Values = dict[Any, Any]
Update = dict[Any, Any]


class CompareTab:
    """Builds the tab's components and answers their events."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._stops = page.new_stops()

    def build(self) -> None:
        """Create the components inside the current tab, then connect them."""
        label, hears = self._page.label, self._page.takes_audio
        names = sorted(info.name for info in self._page.shared_adapters)
        self.comparison = gr.State(Comparison())
        with gr.Row(elem_id="compare-row", equal_height=False):
            with gr.Column(scale=7, min_width=320):
                self.prompt = gr.Textbox(
                    label=label("compare.prompt"), placeholder=label("compare.placeholder"), lines=4, max_lines=12,
                    elem_id="compare-prompt",
                )  # fmt: skip
                self.audio = gr.Audio(
                    label=label("compare.audio"), sources=["upload", "microphone"], buttons=["download"], type="filepath",
                    elem_id="compare-audio", visible=hears,
                )  # fmt: skip
                # Not a gr.Image: that one opens the file itself, and a broken one gets no words.
                self.images = gr.Gallery(
                    label=label("compare.images"), sources=["upload", "clipboard"], file_types=["image"], type="filepath",
                    columns=4, height=190, object_fit="contain", buttons=[], elem_id="compare-images",
                    visible=self._page.takes_images, interactive=True,
                )  # fmt: skip
            with gr.Column(scale=4, min_width=300):
                self.adapters = gr.Dropdown(
                    names, value=names[:MAX_ADAPTERS], multiselect=True, max_choices=MAX_ADAPTERS,
                    label=label("compare.adapters"), info=label("compare.adapters_info"), elem_id="compare-adapters",
                )  # fmt: skip
                self.settings = GenerationSettings(self._page)
                self.settings.build("compare-settings")
                self.run = gr.Button(label("compare.run"), variant="primary", elem_id="compare-run")
                self.stop = gr.Button(label("compare.stop"), variant="stop", elem_id="compare-stop", visible=False)
        self.results = gr.HTML(
            comparison_html(self._page.text, Comparison()), elem_id="compare-results", padding=False,
            apply_default_css=False, js_on_load=VOTE_SCRIPT,
        )  # fmt: skip
        self._connect()

    def load(self, blocks: gr.Blocks) -> None:
        """Nothing happens here when the page is opened."""

    def watch(self, selected: gr.Tab, others: Sequence[gr.Tab]) -> None:
        """The adapters to choose from are those of the moment the tab is opened."""
        shown = [self.adapters, self.results]
        selected.select(self.refresh, [self.adapters, self.comparison], shown, **DIRECT)

    def _connect(self) -> None:
        inputs = {self.prompt, self.audio, self.images, self.adapters, self.comparison, *self.settings.inputs}
        outputs = [self.results, self.run, self.stop]
        begun = gr.on(
            [self.run.click, self.prompt.submit], self.compare, inputs, outputs,
            concurrency_limit=None, show_progress="hidden", api_visibility="private",
        )  # fmt: skip
        begun.then(self.settle, self.comparison, outputs, **DIRECT)
        self.stop.click(self.request_stop, None, None, **DIRECT)
        self.adapters.focus(self.refresh, [self.adapters, self.comparison], [self.adapters, self.results], **DIRECT)
        results: Any = self.results
        results.vote(self.vote, self.comparison, self.results, **DIRECT)

    async def refresh(self, chosen: list[str] | None, comparison: Comparison, request: gr.Request) -> Update:
        """The adapters as they are now; those that are gone are no longer chosen."""
        names = await self._page.adapter_names(request)
        kept = [name for name in chosen or [] if name in names]
        # While answers grow, the run draws: this answer may arrive after the run's last.
        is_busy = self._stops.is_busy(session_of(request))
        drawn = gr.skip() if is_busy else comparison_html(self._page.words(request), comparison)
        return {self.adapters: gr.update(choices=names, value=kept), self.results: drawn}

    async def compare(self, values: Values, request: gr.Request) -> AsyncGenerator[Update, None]:
        """Send the prompt to all columns and draw them as they grow."""
        words = self._page.words(request)
        prompt, clip = (values[self.prompt] or "").strip(), values[self.audio]
        images = tuple(Path(path) for path, _ in values[self.images] or [])
        chosen = list(values[self.adapters] or [])[:MAX_ADAPTERS]
        if problem := _problem(words, chosen, has_prompt=bool(prompt or clip or images)):
            warn(words, problem)
            yield {self.results: gr.skip()}
            return
        stop = self._stops.begin(session_of(request))
        if stop is None:
            warn(words, words("compare.busy"))
            yield {self.results: gr.skip()}
            return
        comparison: Comparison = values[self.comparison]
        comparison.prompt, comparison.system = prompt, values[self.settings.system] or ""
        comparison.audio, comparison.images, comparison.best = (Path(clip),) if clip else (), images, None
        comparison.columns = [Column(NONE), *(Column(name, Reply(expected=name)) for name in chosen)]
        settings = self.settings
        comparison.sampling = {
            "temperature": values[settings.temperature], "max_tokens": values[settings.max_tokens],
            "top_p": values[settings.top_p], "seed": values[settings.seed],
        }  # fmt: skip
        try:
            yield {
                self.results: comparison_html(words, comparison),
                self.run: gr.update(visible=False),
                self.stop: gr.update(visible=True),
            }
            service = self._page.service_for(request)
            runs = [self._answer(service, column, comparison, values, stop) for column in comparison.columns]
            # Each answer ends by itself at Stop and says so; the list of changes needs no flag of its own.
            async with aclosing(batches(merged(runs), asyncio.Event())) as lists:
                async for changes in lists:
                    has_changed = any(changed for _, changed in changes)
                    yield {self.results: comparison_html(words, comparison) if has_changed else gr.skip()}
        finally:
            self._stops.end(session_of(request))

    def _answer(
        self, service: Service, column: Column, comparison: Comparison, values: Values, stop: asyncio.Event
    ) -> AsyncGenerator[bool, None]:
        async def start() -> Sequence[Answer]:
            sampling = self.settings.sampling(values)
            return await service.start_chat(comparison.messages(), sampling, lora=column.lora)

        return run_reply(service, column.reply, start, stop=stop, samples=self._page.samples)

    def settle(self, comparison: Comparison, request: gr.Request) -> Update:
        """However it ended: the button comes back, and an answer that a fault cut off says so."""
        words = self._page.words(request)
        if self._stops.is_busy(session_of(request)):
            return {self.results: gr.skip()}
        for column in comparison.columns:
            if not column.reply.is_final:
                column.reply.phase, column.reply.error = "failed", words("chat.fault")
        return {
            self.results: comparison_html(words, comparison),
            self.run: gr.update(visible=True),
            self.stop: gr.update(visible=False),
        }

    def request_stop(self, request: gr.Request) -> None:
        """Stop pressed: every answer ends."""
        self._stops.request(session_of(request))

    def vote(self, comparison: Comparison, event: gr.EventData, request: gr.Request) -> str:
        """An answer called the best."""
        comparison.vote(str(event.lora))
        return comparison_html(self._page.words(request), comparison)


def _problem(text: Texts, chosen: Sequence[str], *, has_prompt: bool) -> str | None:
    """Why a comparison cannot begin; None if it can."""
    if not has_prompt:
        return text("compare.no_prompt")
    return None if chosen else text("compare.no_adapters")
