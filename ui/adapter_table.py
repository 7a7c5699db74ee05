"""The figures and the table of the Adapters tab, as escaped HTML.

Pure functions of `AdapterInfo`s. A press on a row's button reaches the server through `TABLE_SCRIPT`; what it may do is
decided there. Called by `ui/adapters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ui.receipt import short_digest
from ui.text import Texts

if TYPE_CHECKING:
    from adapters.manager import AdapterInfo

TABLE_SCRIPT = """
element.addEventListener('click', async (event) => {
  const button = event.target.closest('button[data-act]');
  if (!button || button.disabled) return;
  const { act, name, title, body, yes } = button.dataset;
  if (title && !(await window.switchboard.confirm(title, body, yes))) return;
  trigger('action', { act, name });
});
"""
STATE_CHIPS = {"gpu": "good", "cpu": "accent", "disk": "plain", "failed": "bad"}


def figures_html(text: Texts, adapters: Sequence[AdapterInfo], *, num_slots: int) -> str:
    """The four figures on top."""
    resident = [adapter for adapter in adapters if adapter.state == "gpu"]
    in_memory = [adapter for adapter in adapters if adapter.state in ("gpu", "cpu")]
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


def table_html(text: Texts, adapters: Sequence[AdapterInfo], *, is_locked: bool) -> str:
    """One row for each adapter, by name; with `is_locked`, buttons that cannot be pressed."""
    if not adapters:
        title, body = escape(text("adapters.empty_title")), escape(text("adapters.empty_body"))
        return f"<div class='table-card'><p class='empty'><strong>{title}</strong>{body}</p></div>"
    columns = ("name", "state", "rank", "modules", "size", "requests", "last_used", "actions")
    numeric = {"rank", "modules", "size", "requests"}
    head = "".join(
        f"<th scope='col' class='{_column_class(key, numeric)}'>{escape(text(f'adapters.column.{key}'))}</th>"
        for key in columns
    )
    rows = "".join(_row(text, adapter, is_locked) for adapter in sorted(adapters, key=lambda adapter: adapter.name))
    caption = escape(text("adapters.table"))
    return (
        f"<div class='table-card'><table><caption>{caption}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _column_class(key: str, numeric: set[str]) -> str:
    return "number" if key in numeric else "actions" if key == "actions" else ""


def _row(text: Texts, adapter: AdapterInfo, is_locked: bool) -> str:
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
        f"<td class='actions'>{_actions(text, adapter, is_locked)}</td></tr>"
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


def _actions(text: Texts, adapter: AdapterInfo, is_locked: bool) -> str:
    """Pin or unpin; then delete for an upload, unload for what came from elsewhere."""
    pin = "unpin" if adapter.pinned else "pin"
    remove = "delete" if adapter.is_stored else "unload"
    buttons = [] if adapter.state == "failed" else [_button(text, adapter, pin, "", is_locked)]
    warning = ""
    if adapter.default_for:
        modalities = text("receipt.and").join(adapter.default_for)
        warning = "\n" + text("adapters.default_warning", modalities=modalities)
    title = text(f"adapters.{remove}_title", name=adapter.name)
    body = text(f"adapters.{remove}_body", name=adapter.name) + warning
    yes = text(f"adapters.{remove}")
    asking = f" data-title='{escape(title)}' data-body='{escape(body)}' data-yes='{escape(yes)}'"
    buttons.append(_button(text, adapter, remove, asking, is_locked))
    return " ".join(buttons)


def _button(text: Texts, adapter: AdapterInfo, act: str, more: str, is_locked: bool) -> str:
    label = escape(text(f"adapters.{act}_label", name=adapter.name))
    pressed = {"pin": " aria-pressed='false'", "unpin": " aria-pressed='true'"}.get(act, "")
    return (
        f"<button type='button' data-act='{act}' data-name='{escape(adapter.name)}' aria-label='{label}'{pressed}{more}"
        f"{' disabled' if is_locked else ''}>{escape(text(f'adapters.{act}'))}</button>"
    )
