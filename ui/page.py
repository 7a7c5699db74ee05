"""What every tab is given: the service, the settings, the words, and who may change adapters.

Knows nothing of any tab. `ui/app` builds one `Page` and hands it to each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr

from api.tenants import Role
from engine.errors import AppError
from ui.streaming import Stops
from ui.text import Texts

if TYPE_CHECKING:
    from adapters.records import AdapterInfo
    from api.service import Service

# Listeners that answer at once: outside Gradio's queue, no spinner, not part of a public API.
DIRECT: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


@dataclass(frozen=True)
class Page:
    """The borders of the web app, passed to each tab."""

    service: Service
    text: Texts
    stops: Stops = field(default_factory=Stops)

    @property
    def takes_audio(self) -> bool:
        """Whether the model hears."""
        return "audio" in self.service.engine.modalities

    def service_for(self, request: gr.Request) -> Service:
        """The service as it is for this visitor: with the adapters of the visitor's key alone."""
        return self.service.for_caller(self.service.policy.caller_of(request.headers.get("authorization")))

    @property
    def shared_adapters(self) -> list[AdapterInfo]:
        """What every visitor may know of, for the page before anybody has asked: nothing where keys differ in that."""
        return [] if self.service.policy.has_tenants else self.service.engine.adapters.list()

    def lock_reason(self, request: gr.Request) -> str | None:
        """Why this visitor may not change adapters; None if they may. A hidden button proves nothing: ask at each action."""
        try:
            self.service.require_updates()
        except AppError as error:
            return error.message
        authorization = request.headers.get("authorization")
        return None if self.service.policy.role_of(authorization) >= Role.ADMIN else self.text("adapters.locked")


def session_of(request: gr.Request) -> str:
    """The browser tab that a callback belongs to."""
    return str(request.session_hash or "")
