"""The Adapters tab: figures, the table of adapters with its actions, and uploads that are checked before they are installed.

Owns the components and their thin callbacks; the drawing is in `ui/adapter_table` and `ui/upload_report`, the work in the
service. Each action asks again whether this visitor may do it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from api.service import Service
from engine.errors import AppError, InvalidRequest
from ui.adapter_table import TABLE_SCRIPT, figures_html, table_html, versions_html
from ui.memory_chart import memory_html
from ui.page import DIRECT, Page, warn
from ui.receipt import short_digest
from ui.upload_report import REPORT_SCRIPT, Parcel, make_parcels, report_html

REFRESH_S = 3
Update = dict[Any, Any]


class AdaptersTab:
    """Builds the tab's components and answers their events."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def build(self) -> None:
        """Create the components inside the current tab, then connect them."""
        text = self._page.text
        self.parcels = gr.State([])
        self.notice = gr.HTML("", elem_id="adapters-notice", padding=False, apply_default_css=False, visible=False)
        self.figures = gr.HTML("", elem_id="adapters-figures", padding=False, apply_default_css=False)
        self.table = gr.HTML(
            "", elem_id="adapters-table", padding=False, apply_default_css=False, js_on_load=TABLE_SCRIPT
        )
        self.versions = gr.HTML(
            "", elem_id="adapters-versions", padding=False, apply_default_css=False, js_on_load=TABLE_SCRIPT
        )
        with gr.Row(elem_id="adapter-row", equal_height=False):
            with gr.Column(scale=4, min_width=300):
                self.drop = gr.File(
                    label=self._page.label("adapters.add"),
                    file_count="multiple",
                    type="filepath",
                    elem_id="adapter-upload",
                    height=190,
                )
            with gr.Column(scale=6, min_width=320):
                self.report = gr.HTML(
                    report_html(text, []),
                    elem_id="adapters-report",
                    padding=False,
                    apply_default_css=False,
                    js_on_load=REPORT_SCRIPT,
                )
        self.memory = gr.HTML("", elem_id="adapters-memory", padding=False, apply_default_css=False)
        self.timer = gr.Timer(REFRESH_S, active=False)
        self._shown = [self.notice, self.figures, self.table, self.memory, self.drop]
        self._connect()

    def load(self, blocks: gr.Blocks) -> None:
        """Nothing happens here when the page is opened."""

    def watch(self, selected: gr.Tab, others: Sequence[gr.Tab]) -> None:
        """Refresh when the tab is opened and while it stays open."""
        opened = selected.select(self.refresh, None, self._shown, **DIRECT)
        opened.then(self._report, self.parcels, self.report, **DIRECT)
        opened.then(lambda: gr.Timer(active=True), None, self.timer, **DIRECT)
        for other in others:
            other.select(lambda: gr.Timer(active=False), None, self.timer, **DIRECT)

    def _connect(self) -> None:
        self.timer.tick(self.refresh, None, self._shown, **DIRECT)
        # The names of these events are the ones that the scripts trigger.
        report: Any = self.report
        changed = [self.report, self.versions, *self._shown]
        for buttons in (self.table, self.versions):
            source: Any = buttons
            source.action(self.act, self.parcels, changed, show_progress="hidden", api_visibility="private")
        checked = [self.parcels, self.report, self.drop]
        self.drop.upload(
            self.check, [self.drop, self.parcels], checked, show_progress="hidden", api_visibility="private",
            concurrency_limit=None,
        )  # fmt: skip
        installed = [self.report, *self._shown]
        report.install(self.install, self.parcels, installed, show_progress="hidden", api_visibility="private")
        report.dismiss(self.dismiss, self.parcels, self.report, **DIRECT)

    async def refresh(self, request: gr.Request) -> Update:
        """The tab as things stand."""
        reason, service = self._page.lock_reason(request), self._page.service_for(request)
        text, adapters = self._page.words(request), await service.list_adapters()
        notice = f"<p class='notice' role='note'>{escape(reason or '')}</p>"
        num_slots = self._page.service.engine.config.max_loras
        return {
            self.notice: gr.update(value=notice, visible=reason is not None),
            self.memory: memory_html(text, adapters, service.stats() if service.caller.sees_all else None),
            self.figures: figures_html(text, adapters, num_slots=num_slots),
            self.table: table_html(
                text,
                adapters,
                is_locked=reason is not None,
                modalities=sorted(self._page.service.engine.modalities),
            ),
            self.drop: gr.update(interactive=reason is None),
        }

    async def act(self, parcels: list[Parcel], event: gr.EventData, request: gr.Request) -> Update:
        """A button of the table, or of the list of versions, pressed."""
        action, name, value = str(event.act), str(event.name), str(event.value)
        if action in ("versions", "close"):
            return {self.versions: await self._versions(name, request)}
        try:
            self._require_leave(request)
            await self._change(self._page.service_for(request), action, name, value)
        except AppError as error:
            raise gr.Error(escape(error.message), print_exception=False) from None
        words = {"name": name, "modality": value, "version": short_digest(value)}
        gr.Success(escape(self._page.words(request)(f"adapters.done.{action}", **words)))
        shown = await self.refresh(request) | {self.versions: ""}
        if action == "rollback":
            shown[self.versions] = await self._versions(name, request)
        # Only where a name has become free does the report change.
        return shown | {self.report: await self._report(parcels, request)} if action in ("unload", "delete") else shown

    async def _change(self, service: Service, action: str, name: str, value: str) -> None:
        """Do what a button says; raises `AppError`."""
        if action in ("pin", "unpin"):
            await service.pin_adapter(name, action == "pin")
        elif action in ("default", "no_default"):
            answered = set((await service.get_adapter(name)).default_for)
            wanted = answered | {value} if action == "default" else answered - {value}
            await service.set_default_for(name, sorted(wanted))
        elif action == "rollback":
            await service.roll_back_adapter(name, value)
        elif action == "unload":
            await service.unload_adapter(name)
        elif action == "delete":
            await service.delete_adapter(name)
        else:
            raise InvalidRequest("This action is not known.")

    async def _versions(self, name: str, request: gr.Request) -> str:
        """The list of a name's versions; empty where the name is, or is gone."""
        try:
            versions = await self._page.service_for(request).adapter_versions(name) if name else []
        except AppError as error:
            raise gr.Error(escape(error.message), print_exception=False) from None
        return versions_html(
            self._page.words(request), name, versions, is_locked=self._page.lock_reason(request) is not None
        )

    async def check(self, paths: list[str] | None, parcels: list[Parcel], request: gr.Request) -> AsyncIterator[Update]:
        """Files dropped: a dry run for each parcel, drawn as each is done. The drop box is free again at once."""
        self._require_leave(request)
        arrived = make_parcels(self._page.words(request), [Path(path) for path in paths or []])
        parcels[:0] = arrived
        yield {self.report: await self._report(parcels, request), self.drop: None, self.parcels: parcels}
        for parcel in arrived:
            if parcel.problem is None:
                parcel.report = await self._page.service_for(request).inspect_upload(parcel.files)
            yield {self.report: await self._report(parcels, request)}

    async def install(self, parcels: list[Parcel], event: gr.EventData, request: gr.Request) -> Update:
        """Install pressed on a card."""
        _keep_drafts(parcels, event.drafts)
        parcel = next((parcel for parcel in parcels if parcel.key == event.key and parcel.is_ready), None)
        if parcel is not None:
            parcel.num_tries += 1
            parcel.problem = await self._install(parcel, request)
        return {self.report: await self._report(parcels, request)} | await self.refresh(request)

    async def _install(self, parcel: Parcel, request: gr.Request) -> str | None:
        """Install a parcel; returns what went wrong, in words. That a name is taken is on the card as long as it is."""
        self._require_leave(request)
        text, service = self._page.words(request), self._page.service_for(request)
        if not parcel.name:
            return text("report.no_name")
        if not all(path.is_file() for path in parcel.files.values()):
            return text("report.gone")
        if not parcel.replaces and parcel.name in await self._page.adapter_names(request):
            warn(text, text("report.taken", name=parcel.name))
            return None
        try:
            info = await service.install_upload(parcel.name, parcel.files, load_inplace=parcel.replaces)
        except AppError as error:
            return error.message[:1].upper() + error.message[1:]
        parcel.is_installed = True
        gr.Success(escape(text("adapters.done.install", name=info.name, rank=info.rank, modules=info.num_modules)))
        return None

    async def dismiss(self, parcels: list[Parcel], event: gr.EventData, request: gr.Request) -> str:
        """Take a card away."""
        _keep_drafts(parcels, event.drafts)
        parcels[:] = [parcel for parcel in parcels if parcel.key != event.key]
        return await self._report(parcels, request)

    async def _report(self, parcels: list[Parcel], request: gr.Request) -> str:
        taken = await self._page.adapter_names(request) if parcels else ()
        return report_html(self._page.words(request), parcels, taken)

    def _require_leave(self, request: gr.Request) -> None:
        if reason := self._page.lock_reason(request):
            raise gr.Error(escape(reason), print_exception=False)


def _keep_drafts(parcels: list[Parcel], drafts: dict[str, dict[str, Any]]) -> None:
    """Take over what was typed into every card, so that drawing them again loses nothing."""
    for parcel in parcels:
        draft = drafts.get(parcel.key)
        if draft is not None and parcel.is_ready:
            name, replaces = str(draft["name"]).strip(), bool(draft["replace"])
            if (name, replaces) != (parcel.name, parcel.replaces):
                parcel.problem = None
            parcel.name, parcel.replaces = name, replaces
