"""What every tab is given: the service, the settings, the words, and who may change adapters.

Knows nothing of any tab. `ui/app` builds one `Page` and hands it to each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import gradio as gr
from gradio.i18n import I18nData

from api.tenants import Role
from engine.errors import AppError
from ui.samples import Samples
from ui.streaming import Stops
from ui.text import LANGUAGES, Texts, language_of, texts

if TYPE_CHECKING:
    from adapters.records import AdapterInfo
    from api.service import Service

# Listeners that answer at once: outside Gradio's queue, no spinner, not part of a public API.
DIRECT: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}

HINT_S = 5.0


@dataclass(frozen=True)
class Page:
    """The borders of the web app, passed to each tab."""

    service: Service
    text: Texts
    all_stops: list[Stops] = field(default_factory=list)
    label_keys: set[str] = field(default_factory=set)
    # What can be read beside the page: key of its words -> its path, without the slash before it.
    links: dict[str, str] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)

    def new_stops(self) -> Stops:
        """Stop flags of one tab's answers."""
        stops = Stops()
        self.all_stops.append(stops)
        return stops

    def stop_all(self, session: str) -> None:
        """A visitor has left: every answer of theirs ends."""
        for stops in self.all_stops:
            stops.request(session)

    def label(self, key: str) -> Any:
        """A component's fixed words, which the browser puts into its own language; raises `KeyError`."""
        self.text(key)
        self.label_keys.add(key)
        return I18nData(key)

    def words(self, request: gr.Request) -> Texts:
        """What the server writes, in the language of this visitor's browser."""
        return texts(language_of(request.headers.get("accept-language") or ""))

    def translations(self) -> gr.I18n:
        """The labels' words, for the browser."""
        tables = {language: {key: table[key] for key in self.label_keys} for language, table in LANGUAGES.items()}
        # Browsers of other regions fall back to the bare language.
        return gr.I18n(**({language.split("-")[0]: table for language, table in tables.items()} | tables))

    @property
    def modalities(self) -> frozenset[str]:
        """The media that the model takes."""
        return frozenset(self.service.engine.modalities)

    @property
    def takes_audio(self) -> bool:
        """Whether the model hears."""
        return "audio" in self.modalities

    @property
    def takes_images(self) -> bool:
        """Whether the model sees."""
        return "image" in self.service.engine.modalities

    def service_for(self, request: gr.Request) -> Service:
        """The service as it is for this visitor: with the adapters of the visitor's key alone."""
        return self.service.for_caller(self.service.policy.caller_of(request.headers.get("authorization")))

    @property
    def shared_adapters(self) -> list[AdapterInfo]:
        """What every visitor may know of, for the page before anybody has asked: nothing where keys differ in that."""
        return [] if self.service.policy.has_tenants else self.service.engine.adapters.list()

    async def adapter_names(self, request: gr.Request) -> list[str]:
        """The adapters that this visitor can ask for, by name."""
        return sorted(info.name for info in await self.service_for(request).list_adapters())

    def lock_reason(self, request: gr.Request) -> str | None:
        """Why this visitor may not change adapters; None if they may. A hidden button proves nothing: ask at each action."""
        try:
            self.service.require_updates()
        except AppError as error:
            return error.message
        authorization = request.headers.get("authorization")
        return (
            None if self.service.policy.role_of(authorization) >= Role.ADMIN else self.words(request)("adapters.locked")
        )


def warn(text: Texts, message: str) -> None:
    """Tell the visitor what is still missing, for a short while."""
    gr.Warning(escape(message), duration=HINT_S, title=text("toast.warning"))


def session_of(request: gr.Request) -> str:
    """The browser tab that a callback belongs to."""
    return str(request.session_hash or "")
