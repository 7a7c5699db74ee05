"""The generation settings that a tab shows, and what the engine is given of them. Used by the tabs that ask the model."""

from __future__ import annotations

from typing import Any

import gradio as gr

from engine.errors import InvalidRequest
from engine.request import SamplingParams
from ui.page import Page

DEFAULT_MAX_TOKENS = 256


class GenerationSettings:
    """Sliders and boxes in a closed accordion."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def build(self, elem_id: str) -> None:
        """Create the components inside the current column."""
        label = self._page.label
        limit = self._page.service.engine.max_model_len
        with gr.Accordion(label("chat.settings"), open=False, elem_id=elem_id):
            self.temperature = gr.Slider(
                0, 2, 0, step=0.05, label=label("chat.temperature"), info=label("chat.temperature_info")
            )
            self.max_tokens = gr.Slider(
                1, limit, min(DEFAULT_MAX_TOKENS, max(1, limit // 4)), step=1, label=label("chat.max_tokens"),
                info=label("chat.max_tokens_info"),
            )  # fmt: skip
            self.top_p = gr.Slider(0.05, 1, 1, step=0.05, label=label("chat.top_p"), info=label("chat.top_p_info"))
            # Not a gr.Number: an empty one turns into 0 in the browser, with or without a placeholder.
            self.seed = gr.Textbox(
                "", max_lines=1, label=label("chat.seed"), info=label("chat.seed_info"),
                placeholder=label("chat.seed_placeholder"),
            )  # fmt: skip
            self.system = gr.Textbox(
                "", lines=3, label=label("chat.system"), placeholder=label("chat.system_placeholder")
            )

    @property
    def inputs(self) -> set[Any]:
        """The components that a callback must ask for."""
        return {self.temperature, self.max_tokens, self.top_p, self.seed, self.system}

    def sampling(self, values: dict[Any, Any]) -> SamplingParams:
        """The values as the engine takes them; raises `InvalidRequest`."""
        return SamplingParams(
            temperature=values[self.temperature],
            max_tokens=int(values[self.max_tokens]),
            top_p=values[self.top_p],
            seed=whole_number(str(values[self.seed] or "").strip()),
        )


def whole_number(seed: str) -> int | None:
    """A seed as it was typed; None where nothing was. Raises `InvalidRequest`."""
    try:
        return int(seed) if seed else None
    except ValueError:
        raise InvalidRequest(
            f"seed is a whole number, and '{seed[:40]}' is none; leave it empty for a new one each time", param="seed"
        ) from None
