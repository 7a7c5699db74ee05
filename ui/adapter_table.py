"""The figures, the table and the list of versions of the Adapters tab, as escaped HTML.

Pure functions of `AdapterInfo`s. A press on a row's button reaches the server through `TABLE_SCRIPT`; what it may do is
decided there. Called by `ui/adapters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

from ui.memory_chart import once_each
from ui.receipt import short_digest
from ui.text import Texts

if TYPE_CHECKING:
    from adapters.manager import AdapterInfo, VersionInfo

TABLE_SCRIPT = """
element.addEventListener('click', async (event) => {
  const button = event.target.closest('button[data-act]');
  if (!button || button.disabled) return;
  const { act, name, value, title, body, yes } = button.dataset;
  if (title && !(await window.switchboard.confirm(title, body, yes))) return;
  trigger('action', { act, name, value: value || '' });
});
"""
STATE_CHIPS = {"gpu": "good", "cpu": "accent", "disk": "plain", "failed": "bad"}


def figures_html(text: Texts, adapters: Sequence[AdapterInfo], *, num_slots: int) -> str:
    """The four figures on top."""
    resident = once_each([adapter for adapter in adapters if adapter.state == "gpu"])
    in_memory = once_each([adapter for adapter in adapters if adapter.state in ("gpu", "cpu")])
    num_bytes = sum(adapter.num_bytes for adapter in in_memory)
    cells = (
        ("count", str(len(adapters)), ""),
        ("resident", str(len(resident)), text("adapters.figure.resident_of", slots=num_slots)),
        ("memory", text.size(num_bytes), text("adapters.figure.memory_of", count=len(in_memory))),
        ("requests", str(sum(adapter.num_requests for adapter in adapters)), text("adapters.figure.requests_of")),
    )
    shown = "".join(
        f"<div><dt>{escape(text(f'adapters.figure.{key}'))}</dt>"
        f"<dd>{escape(value)} <small>{escape(note)}</small></dd></div>"
        for key, value, note in cells
    )
    return f"<dl class='figures'>{shown}</dl>"


def table_html(text: Texts, adapters: Sequence[AdapterInfo], *, is_locked: bool, modalities: Sequence[str] = ()) -> str:
    """One row for each adapter, by name; with `is_locked`, buttons that cannot be pressed.

    `modalities` are those that the model takes, for which an adapter can be the default.
    """
    if not adapters:
        title, body = escape(text("adapters.empty_title")), escape(text("adapters.empty_body"))
        return f"<div class='table-card'><p class='empty'><strong>{title}</strong>{body}</p></div>"
    columns = ("name", "state", "rank", "modules", "size", "requests", "last_used", "actions")
    numeric = {"rank", "modules", "size", "requests"}
    head = "".join(
        f"<th scope='col' class='{_column_class(key, numeric)}'>{escape(text(f'adapters.column.{key}'))}</th>"
        for key in columns
    )
    by_name = sorted(adapters, key=lambda adapter: adapter.name)
    rows = "".join(_row(text, adapter, is_locked, modalities) for adapter in by_name)
    caption = escape(text("adapters.table"))
    return (
        f"<div class='table-card'><table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _column_class(key: str, numeric: set[str]) -> str:
    return "number" if key in numeric else "actions" if key == "actions" else ""


def versions_html(text: Texts, name: str, versions: Sequence[VersionInfo], *, is_locked: bool) -> str:
    """What a name points to and can be rolled back to; the empty text where no name is chosen."""
    if not name:
        return ""
    rows = "".join(_version(text, name, version, is_locked) for version in versions)
    title, close = escape(text("adapters.versions_title", name=name)), escape(text("adapters.versions_close"))
    head = (
        f"<tr><th scope='col' colspan='3'>{title}</th><th scope='col' class='actions'>"
        f"<button type='button' data-act='close' data-name=''>{close}</button></th></tr>"
    )
    return f"<div class='table-card'><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>"


def _version(text: Texts, name: str, version: VersionInfo, is_locked: bool) -> str:
    digest = short_digest(version.generation)
    last = f"<span class='chip good'>{escape(text('adapters.current'))}</span>"
    if not version.is_current:
        last = _button(text, name, "rollback", "", is_locked, value=version.generation, version=digest)
    return (
        f"<tr data-version='{escape(version.generation)}'><th scope='row'><code>{digest}</code></th>"
        f"<td class='wide'>{escape(version.source)}</td><td>{escape(text.age(version.created))}</td>"
        f"<td class='actions'>{last}</td></tr>"
    )


def _row(text: Texts, adapter: AdapterInfo, is_locked: bool, modalities: Sequence[str]) -> str:
    cells = (
        ("rank", str(adapter.rank) if adapter.rank else "–"),
        ("modules", str(adapter.num_modules) if adapter.num_modules else "–"),
        ("size", text.size(adapter.num_bytes) if adapter.num_bytes else "–"),
        ("requests", str(adapter.num_requests)),
    )
    numbers = "".join(
        f"<td class='number' data-label='{escape(text(f'adapters.column.{key}'))}'>{escape(value)}</td>"
        for key, value in cells
    )
    last_used = escape(text("adapters.column.last_used"))
    return (
        f"<tr data-adapter='{escape(adapter.name)}'><th scope='row'>{_name_cell(adapter)}</th>"
        f"<td class='wide'><span class='chips'>{_chips(text, adapter)}</span></td>{numbers}"
        f"<td data-label='{last_used}'>{escape(text.age(adapter.last_used))}</td>"
        f"<td class='actions'>{_actions(text, adapter, is_locked, modalities)}</td></tr>"
    )


def _name_cell(adapter: AdapterInfo) -> str:
    name = f"<span class='name'>{escape(adapter.name)}</span>"
    if adapter.error:
        return f"{name}<span class='under trouble'>{escape(adapter.error)}</span>"
    digest = short_digest(adapter.generation)
    code = f"<code title='{escape(adapter.generation or '')}'>{digest}</code>"
    modules = escape(", ".join(adapter.target_modules))
    return f"{name}<span class='under'>{code} {modules}</span>"


def _chips(text: Texts, adapter: AdapterInfo) -> str:
    chips = [(STATE_CHIPS[adapter.state], text(f"adapters.state.{adapter.state}"))]
    if adapter.pinned:
        chips.append(("accent", text("adapters.pinned")))
    if adapter.default_for:
        modalities = text("receipt.and").join(adapter.default_for)
        chips.append(("plain", text("adapters.default_for", modalities=modalities)))
    return "".join(f"<span class='chip {kind}'>{escape(label)}</span>" for kind, label in chips)


def _actions(text: Texts, adapter: AdapterInfo, is_locked: bool, modalities: Sequence[str]) -> str:
    """What is usual first; then delete for an upload, unload for what came from elsewhere."""
    buttons = [] if adapter.state == "failed" else _uses(text, adapter, is_locked, modalities)
    buttons.append(_button(text, adapter.name, "versions", "", is_locked=False))
    if not is_locked:
        label = escape(text("adapters.download_label", name=adapter.name))
        target = escape(f"v1/adapters/{quote(adapter.name)}/download")
        buttons.append(
            f"<a class='button' download href='{target}' aria-label='{label}'>{escape(text('adapters.download'))}</a>"
        )
    remove = "delete" if adapter.is_stored else "unload"
    warning = ""
    if adapter.default_for:
        answered = text("receipt.and").join(adapter.default_for)
        warning = "\n" + text("adapters.default_warning", modalities=answered)
    title = text(f"adapters.{remove}_title", name=adapter.name)
    body = text(f"adapters.{remove}_body", name=adapter.name) + warning
    yes = text(f"adapters.{remove}")
    asking = f" data-title='{escape(title)}' data-body='{escape(body)}' data-yes='{escape(yes)}'"
    buttons.append(_button(text, adapter.name, remove, asking, is_locked))
    return " ".join(buttons)


def _uses(text: Texts, adapter: AdapterInfo, is_locked: bool, modalities: Sequence[str]) -> list[str]:
    """Pin or unpin, where it is not pinned as a default anyway; and what it answers by itself."""
    pin = "unpin" if adapter.pinned else "pin"
    buttons = [] if adapter.default_for else [_button(text, adapter.name, pin, "", is_locked)]
    for modality in modalities:
        act = "no_default" if modality in adapter.default_for else "default"
        buttons.append(_button(text, adapter.name, act, "", is_locked, value=modality))
    return buttons


def _button(text: Texts, name: str, act: str, more: str, is_locked: bool, *, value: str = "", version: str = "") -> str:
    words = {"name": name, "modality": value, "version": version}
    label = escape(text(f"adapters.{act}_label", **words))
    pressed = {"pin": " aria-pressed='false'", "unpin": " aria-pressed='true'"}.get(act, "")
    return (
        f"<button type='button' data-act='{act}' data-name='{escape(name)}' data-value='{escape(value)}' "
        f"aria-label='{label}'{pressed}{more}{' disabled' if is_locked else ''}>"
        f"{escape(text(f'adapters.{act}', **words))}</button>"
    )
