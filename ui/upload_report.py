"""Uploads that wait to be installed, and the report of each as escaped HTML.

Owns `Parcel` (one zip, or loose files that belong together) and how a dry run's outcome reads in plain words. Nothing
here decides whether an adapter is good. Called by `ui/adapters`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from ui.text import Texts

if TYPE_CHECKING:
    from adapters.upload import ProbeReport, UploadReport

Verdict = Literal["passed", "warning", "failed"]

DOCUMENTS = ("readme", "license", "licence", "notice", ".gitattributes")
"""How the names of files begin that lie beside most adapters and that no server needs."""

# What is typed into a card outlives a new drawing of the report, which happens while other cards are being checked.
REPORT_SCRIPT = """
const typed = new Map();
const drawn = new WeakSet();
let lastTyped = null;
const cards = () => [...element.querySelectorAll('article[data-key]')];
const nameOf = (card) => card.querySelector('input[type="text"]');
const tickOf = (card) => card.querySelector('input[type="checkbox"]');
const draftOf = (card) => ({ name: nameOf(card)?.value ?? '', replace: tickOf(card)?.checked ?? false });
// Says at each key stroke whether the name is free; what the last attempt to install said holds until something changes.
const review = (card) => {
  const name = nameOf(card), tick = tickOf(card), { taken, words } = card.querySelector('.install').dataset;
  const isTaken = JSON.parse(taken).includes(name.value.trim()) && !tick.checked;
  const problem = card.querySelector('li.problem');
  if (problem) problem.hidden = name.value !== name.defaultValue || tick.checked !== tick.defaultChecked;
  const warning = card.querySelector('li.taken');
  warning.hidden = !isTaken;
  warning.querySelector('span').textContent = isTaken ? words.replace('{name}', () => name.value.trim()) : '';
  const chip = card.querySelector('.chip');
  const status = isTaken ? 'taken' : problem && !problem.hidden ? 'failed' : 'ready';
  chip.textContent = chip.dataset[status];
  chip.className = 'chip ' + { taken: 'warn', failed: 'bad', ready: 'good' }[status];
};
element.addEventListener('input', (event) => {
  const card = event.target.closest('article');
  typed.set(card.dataset.key, draftOf(card));
  review(card);
  lastTyped = event.target.matches('input[type="text"]') ? card.dataset.key : null;
});
element.addEventListener('focusout', (event) => {
  if (event.relatedTarget) lastTyped = null;
});
new MutationObserver(() => {
  for (const card of cards()) {
    const draft = typed.get(card.dataset.key);
    const name = nameOf(card);
    if (!draft || !name || drawn.has(card)) continue;
    drawn.add(card);
    if (name.value !== draft.name) name.value = draft.name;
    tickOf(card).checked = draft.replace;
    review(card);
    if (lastTyped === card.dataset.key && document.activeElement === document.body) name.focus();
  }
}).observe(element, { childList: true, subtree: true });
element.addEventListener('click', (event) => {
  const button = event.target.closest('button[data-act]');
  if (!button || button.disabled) return;
  const drafts = Object.fromEntries(cards().map((card) => [card.dataset.key, draftOf(card)]));
  const details = { key: button.closest('article').dataset.key, drafts };
  // Gradio finds the names of events by reading these calls.
  if (button.dataset.act === 'dismiss') return trigger('dismiss', details);
  button.disabled = true;
  trigger('install', details);
});
element.addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || !event.target.matches('input[type="text"]')) return;
  event.preventDefault();
  event.target.closest('article').querySelector('button[data-act="install"]')?.click();
});
"""


@dataclass
class Parcel:
    """One upload: its files, what the dry run said, and what the visitor has typed about it."""

    title: str
    files: dict[str, Path]
    name: str
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    report: UploadReport | None = None
    problem: str | None = None
    replaces: bool = False
    is_installed: bool = False
    num_tries: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether it can be installed now."""
        return self.report is not None and self.report.is_ok and not self.is_installed


def make_parcels(text: Texts, paths: Sequence[Path]) -> list[Parcel]:
    """Each zip by itself; all loose files together."""
    parcels = [Parcel(path.name, {path.name: path}, adapter_name(path.stem)) for path in paths if _is_zip(path)]
    loose = [path for path in paths if not _is_zip(path)]
    if loose:
        names = [path.name for path in loose]
        title = names[0] if len(names) == 1 else text("report.loose", count=len(names))
        parcel = Parcel(title, {path.name: path for path in loose}, text("report.default_name"))
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            parcel.problem = text("report.twice", name=twice)
        parcels.append(parcel)
    return parcels


def adapter_name(stem: str) -> str:
    """A file's name as an adapter may be called: `my lora (1)` -> `my-lora-1`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "adapter"


def _is_zip(path: Path) -> bool:
    return path.suffix.lower() == ".zip"


def report_lines(text: Texts, parcel: Parcel) -> list[tuple[Verdict, str]]:
    """The outcome of a dry run, a sentence a line."""
    if parcel.report is None:
        return []
    report = parcel.report
    lines: list[tuple[Verdict, str]] = []
    if report.files:
        lines.append(("passed", text("report.files", files=", ".join(report.files))))
    if report.report is not None:
        lines += _fact_lines(text, report.report)
    if report.probe is not None:
        lines.append(_probe_line(text, report.probe))
    if report.ignored:
        is_usual = all(PurePosixPath(name).name.lower().startswith(DOCUMENTS) for name in report.ignored)
        lines.append(("passed" if is_usual else "warning", text("report.ignored", files=", ".join(report.ignored))))
    return lines + [("failed", _sentence(error)) for error in report.errors]


def _fact_lines(text: Texts, facts: dict[str, Any]) -> list[tuple[Verdict, str]]:
    """What the weights say; keys are those of `AdapterReport.to_dict`."""
    matched = text("report.matched", matched=facts["matched"], total=facts["total"], modules=facts["num_modules"])
    alpha = f"{facts['alpha']:g}"
    if len(facts["ranks"]) == 1 and len(facts["scales"]) == 1:
        rank = text("report.rank", rank=facts["rank"], alpha=alpha, scale=f"{facts['scale']:g}")
    else:
        rank = text("report.ranks", ranks=_counted(facts["ranks"]), alpha=alpha, scales=_counted(facts["scales"]))
    targets = text("report.targets", targets=", ".join(facts["target_modules"]), parts=", ".join(facts["parts"]))
    lines: list[tuple[Verdict, str]] = [("passed", matched), ("passed", rank), ("passed", targets)]
    lines.append(("passed", text("report.tensors", size=text.size(facts["num_bytes"]), dtype=facts["dtype"])))
    if facts["base_model"]:
        lines.append(("passed", text("report.base", base=facts["base_model"])))
    if facts["card"]:
        lines.append(("passed", _card_words(text, facts["card"])))
    if facts["is_zero_effect"]:
        lines.append(("warning", text("report.zero")))
    return lines + [("warning", _sentence(warning)) for warning in facts["warnings"]]


def _card_words(text: Texts, card: dict[str, Any]) -> str:
    """What the adapter's card brings: keys are those of `AdapterCard.to_dict`."""
    sampling = [
        f"{text(f'card.setting.{name}')} {card[name]:g}"
        for name in ("temperature", "top_p", "max_tokens")
        if card[name] is not None
    ]
    brought = [
        *([text("report.card.description")] if card["description"] else []),
        *([text("report.card.license", name=card["license"])] if card.get("license") else []),
        *([text("card.setting.system")] if card["system_prompt"] else []),
        *sampling,
        *([text("report.card.examples", count=len(card["examples"]))] if card["examples"] else []),
    ]
    return text("report.card", brought=", ".join(brought)) if brought else text("report.card.empty")


def _probe_line(text: Texts, probe: ProbeReport) -> tuple[Verdict, str]:
    """What trying the adapter out showed."""
    if probe.mean_kl is None or probe.top1_changed is None:
        return "warning", text("report.probe.broken" if probe.verdict == "broken" else "report.probe.not_measured")
    if probe.verdict == "no effect":
        return "warning", text("report.probe.none", count=probe.num_tokens)
    share, kl = f"{probe.top1_changed:.0%}", f"{probe.mean_kl:.2g}"
    phrase = "report.probe.slight" if probe.verdict == "slight effect" else "report.probe.effect"
    if probe.top1_changed == 0:
        phrase = "report.probe.likelihoods"
    return "passed", text(phrase, share=share, kl=kl, count=probe.num_tokens)


def _counted(counts: dict[str, int]) -> str:
    """`8 (4×), 16 (2×)`."""
    return ", ".join(f"{value} ({count}×)" for value, count in counts.items())


def _sentence(words: str) -> str:
    """With a capital at the beginning and a full stop at the end."""
    words = words.strip()
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def report_html(text: Texts, parcels: Sequence[Parcel], taken: Collection[str] = ()) -> str:
    """One card for each parcel; `taken` are the names that adapters have already."""
    if not parcels:
        return f"<p class='empty dashed'>{escape(text('adapters.report_empty'))}</p>"
    return f"<div class='report'>{''.join(_card(text, parcel, taken) for parcel in parcels)}</div>"


def _card(text: Texts, parcel: Parcel, taken: Collection[str]) -> str:
    items = "".join(_line(text, verdict, words) for verdict, words in report_lines(text, parcel))
    is_taken = parcel.name in taken and not parcel.replaces
    if parcel.is_ready:
        items += _line(text, "warning", text("report.taken", name=parcel.name) if is_taken else "", "taken")
    if parcel.problem:
        items += _line(text, "failed", parcel.problem, "problem")
    # The count makes each drawing after an attempt a new one: Gradio leaves equal HTML, and its pressed button, alone.
    form = _install_form(text, parcel, taken) if parcel.is_ready else _dismiss(text, parcel)
    return (
        f"<article data-key='{parcel.key}' data-tries='{parcel.num_tries}' aria-label='{escape(parcel.title)}'>"
        f"<header><h3>{escape(parcel.title)}</h3>"
        f"{_chip(text, parcel, is_taken)}</header><ul>{items}</ul>{form}</article>"
    )


def _line(text: Texts, verdict: Verdict, words: str, role: str = "") -> str:
    """One line of a card; a line without words waits, unseen, until the card's script has some."""
    return (
        f"<li class='{verdict} {role}'{'' if words else ' hidden'}><b>{escape(text(f'report.{verdict}'))}</b>"
        f"<span>{escape(words)}</span></li>"
    )


def _chip(text: Texts, parcel: Parcel, is_taken: bool) -> str:
    """How things stand; with the other words that the card's script may need for it."""
    kind, status = _status(parcel, is_taken)
    words = {"ready": "report.ready", "taken": "report.name_taken", "failed": "report.not_installed"}
    more = "".join(f" data-{key}='{escape(text(phrase))}'" for key, phrase in words.items())
    return f"<span class='chip {kind}' role='status'{more}>{escape(text(f'report.{status}'))}</span>"


def _status(parcel: Parcel, is_taken: bool) -> tuple[str, str]:
    if parcel.is_installed:
        return "good", "installed"
    if parcel.is_ready:
        if is_taken:
            return "warn", "name_taken"
        return ("bad", "not_installed") if parcel.problem else ("good", "ready")
    return ("bad", "refused") if parcel.report is not None or parcel.problem else ("plain", "checking")


def _install_form(text: Texts, parcel: Parcel, taken: Collection[str]) -> str:
    checked = " checked" if parcel.replaces else ""
    names, words = escape(json.dumps(sorted(taken))), escape(text("report.taken", name="{name}"))
    return (
        f"<div class='install' data-taken='{names}' data-words='{words}'><label>{escape(text('report.name'))}"
        f"<input type='text' value='{escape(parcel.name)}' maxlength='128' autocomplete='off' spellcheck='false'></label>"
        f"<button type='button' class='primary' data-act='install'>{escape(text('report.install'))}</button>"
        f"<button type='button' data-act='dismiss'>{escape(text('report.dismiss'))}</button>"
        f"<label class='tick'><input type='checkbox'{checked}>{escape(text('report.replace'))}</label></div>"
    )


def _dismiss(text: Texts, parcel: Parcel) -> str:
    if parcel.report is None and not parcel.problem:
        return ""
    return (
        f"<div class='install'><button type='button' data-act='dismiss'>{escape(text('report.dismiss'))}</button></div>"
    )
