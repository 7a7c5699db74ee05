"""Every sentence and label of the web app, by key, so that a second language is one more table.

Owns words and the formatting of figures for people. Knows nothing of Gradio, of components or of the engine. Each tab is
given one `Texts`; a key that is missing is a `KeyError` at once, and a test looks every key up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

ENGLISH: Mapping[str, str] = {
    # the page
    "app.name": "Switchboard",
    "app.subtitle": "One model, many LoRA adapters",
    "app.theme": "Theme",
    "app.theme_label": "Switch between light and dark",
    "app.ready": "Engine ready",
    "app.down": "Engine stopped",
    "app.running": "{running} running, {waiting} waiting",
    "app.adapters": "{count} adapters",
    "tab.chat": "Chat",
    "tab.transcribe": "Transcribe",
    "tab.compare": "Compare",
    "tab.adapters": "Adapters",
    "tab.status": "Status",
    # chat
    "chat.label": "Conversation",
    "chat.empty_title": "What shall we work on?",
    "chat.empty_audio": "Write, attach a recording, or speak. Each message goes to the adapter that fits.",
    "chat.empty_text": "Write a message and choose which adapter answers it.",
    "chat.composer": "Message",
    "chat.placeholder_audio": "Write, drop audio, or record",
    "chat.placeholder_text": "Write a message",
    "chat.adapter": "Adapter",
    "chat.adapter_info": "Used for the next message",
    "chat.auto": "Auto: decided by what the message holds",
    "chat.base": "Base model, no adapter",
    "chat.choice_default": "{name} · default for {modalities}",
    "chat.settings": "Generation settings",
    "chat.temperature": "Temperature",
    "chat.temperature_info": "0 always takes the likeliest token",
    "chat.max_tokens": "Max tokens",
    "chat.max_tokens_info": "Longest answer",
    "chat.top_p": "Top-p",
    "chat.top_p_info": "Share of the likeliest tokens to draw from",
    "chat.seed": "Seed",
    "chat.seed_info": "Same seed, same answer; empty for a new one each time",
    "chat.seed_placeholder": "New each time",
    "chat.system": "System prompt",
    "chat.system_placeholder": "Placed before the conversation",
    "chat.new": "New conversation",
    "chat.last": "Last answer",
    "chat.last_empty": "Send a message to see which adapter answers it, and why.",
    "chat.last_failed": "No answer",
    "chat.last_stopped": "Stopped by you before the first word.",
    "chat.empty_message": "Write a message or attach audio first.",
    "chat.empty_recording": "Nothing was recorded. Check the microphone and record again, or attach an audio file.",
    "chat.busy": "An answer is still running. Stop it first.",
    "chat.choice_gone": "The adapter {name} was unloaded, so the menu is back on Auto.",
    "chat.retry": "Try again",
    "chat.retry_base": "Ask the base model",
    "chat.failed": "**No answer.** {reason} {next}",
    "chat.failed_next": "This message is left out of what the model sees later. Undo takes it back into the box.",
    "chat.failed_midway": "**The answer stopped.** {reason} {next}",
    "chat.stopped": "*Stopped by you.*",
    "chat.stopped_early": "*Stopped by you before the first word.*",
    "chat.no_words": "*The model answered with nothing.*",
    "chat.cut": "*Cut at {tokens} tokens: raise Max tokens for a longer answer.*",
    "chat.fault": "The server made a mistake; its log says what.",
    # earlier conversations
    "history.title": "Earlier conversations",
    "history.empty": "Conversations appear here once there is an answer. Only this browser keeps them.",
    "history.where": "Kept in this browser only; recordings are not kept.",
    "history.untitled": "Conversation",
    "history.delete_label": "Delete: {title}",
    "history.delete_all": "Delete all",
    "history.delete_all_title": "Delete all earlier conversations?",
    "history.delete_all_body": "They are deleted from this browser. Nothing else has them.",
    "history.lost_media": "[{name}, not kept]",
    "history.you": "You",
    "history.md": "Export as Markdown",
    "history.json": "Export as JSON",
    # the card of the chosen adapter
    "card.none": "The base model answers, whatever the message holds.",
    "card.auto": "{rules}; everything else to the base model.",
    "card.auto_empty": "No adapter is a default, so the base model answers. Make one the default in the Adapters tab.",
    "card.rule": "Messages with {media} go to {name}",
    "card.generation": "Generation",
    "card.rank": "Rank",
    "card.rank_value": "{rank}, scale {scale}",
    "card.modules": "Modules",
    "card.modules_value": "{count}: {names}",
    "card.size": "Size",
    "card.base": "Trained on",
    "card.default_for": "Default for",
    "card.requests": "Requests",
    # microphone, used by the page's script
    "mic.insecure": "The browser gives the microphone only to https pages and to localhost. Attach an audio file instead.",
    "mic.missing": "No microphone was found. Connect one, or attach an audio file.",
    "mic.denied": "The browser has blocked the microphone for this page. Allow it in the address bar, or attach an audio file.",
    # what an answer is waiting for
    "phase.preparing": "Preparing",
    "phase.preparing_audio": "Preparing: reading the audio and the adapter",
    "phase.loading": "Loading adapter {name}",
    "phase.queued": "queued",
    "phase.queued_behind": "queued with {waiting} others",
    "phase.reading": "reading the prompt",
    "phase.answering": "answering",
    "phase.done": "done",
    "phase.stopped": "stopped",
    "phase.failed": "failed",
    # receipts
    "receipt.base": "Base model",
    "receipt.reason.explicit": "chosen by you",
    "receipt.reason.base": "base model, no adapter applies to this message by itself",
    "receipt.reason.base_audio": "base model, no adapter is the default for audio",
    "receipt.reason.opt-out": "you asked for the base model",
    "receipt.reason.default_new": "the message holds {media}, and {name} is the default for {media}",
    "receipt.reason.default_old": "an earlier message holds {media}, and {name} is the default for {media}",
    "receipt.reason.conflict": "conflict: {claims}, so none was applied",
    "receipt.reason.claim": "{media} calls for {name}",
    "receipt.and": " and ",
    "receipt.load": "loaded in {ms}",
    "receipt.loaded": "was in memory",
    "receipt.queue": "queued {ms}",
    "receipt.speed": "{speed} tokens/s",
    "receipt.cached": "{cached} of {prompt} prompt tokens cached",
    "receipt.detail.adapter": "Adapter",
    "receipt.detail.generation": "Generation",
    "receipt.detail.reason": "Reason",
    "receipt.detail.load": "Load",
    "receipt.detail.queue": "Queue",
    "receipt.detail.first": "First token",
    "receipt.detail.speed": "Speed",
    "receipt.detail.tokens": "Answer",
    "receipt.detail.cached": "Prompt cached",
    "receipt.detail.request": "Request",
    "receipt.detail.tokens_value": "{tokens} tokens",
    "receipt.detail.cached_value": "{cached} of {prompt}",
    "receipt.tag.auto": "auto",
    "receipt.tag.chosen": "chosen",
    "receipt.tag.conflict": "conflict",
    "receipt.tag.failed": "failed",
    # transcribe
    "transcribe.audio": "Recording",
    "transcribe.reference": "Reference (optional)",
    "transcribe.reference_placeholder": "Paste what was really said to see the word error rate",
    "transcribe.adapter_info": "Transcribes the recording",
    "transcribe.auto": "Auto: the default for audio",
    "transcribe.with_base": "Also without an adapter, side by side",
    "transcribe.run": "Transcribe",
    "transcribe.sample": "Use a sample recording",
    "transcribe.empty_title": "What was said?",
    "transcribe.empty_body": "Drop a recording or speak, then press Transcribe. The words appear here as they come.",
    "transcribe.no_audio": "Add a recording first, or use the sample.",
    "transcribe.busy": "A transcription is still running. Stop it first.",
    "transcribe.with": "With the adapter",
    "transcribe.without": "Without an adapter",
    "transcribe.progress": "{done} of {total} segments, {at} of {duration}",
    "transcribe.silent": "Nothing is said in this recording.",
    "transcribe.play": "Play from {start} to {end}",
    "transcribe.txt": "TXT",
    "transcribe.srt": "SRT",
    "transcribe.vtt": "VTT",
    "transcribe.download": "Download {kind}: {name}",
    "transcribe.wer": "Word error rate {rate}: {edits} of {words} words differ from the reference, as marked.",
    "transcribe.marked": "Marked: what it hears otherwise than the base model.",
    # compare
    "compare.prompt": "Prompt",
    "compare.placeholder": "One prompt for the base model and every adapter below",
    "compare.audio": "Recording (optional)",
    "compare.adapters": "Adapters, up to six",
    "compare.adapters_info": "The base model always answers too",
    "compare.run": "Compare",
    "compare.stop": "Stop",
    "compare.empty_title": "One prompt, side by side",
    "compare.empty_body": (
        "Write a prompt, choose adapters and press Compare. All answer at once, and differences to the base are marked."
    ),
    "compare.no_prompt": "Write a prompt or add a recording first.",
    "compare.no_adapters": "Choose at least one adapter to compare with the base model.",
    "compare.busy": "A comparison is still running. Stop it first.",
    "compare.first": "first token {time}",
    "compare.same": "The same words as the base model.",
    "compare.marked": "Marked: words that the base model did not say there.",
    "compare.shorter": "Leaves out words of the base model and adds none.",
    "compare.vote": "Best answer",
    "compare.voted": "Your choice",
    "compare.vote_label": "Best answer: {name}",
    "compare.votes": "Your votes in this tab: {tally}",
    "compare.no_votes": "Which answer is best? Your vote goes into the downloads.",
    "compare.json": "Download JSON",
    "compare.csv": "Download CSV",
    # adapters
    "adapters.figure.count": "Adapters",
    "adapters.figure.resident": "In batch slots",
    "adapters.figure.resident_of": "of {slots}",
    "adapters.figure.memory": "Adapter memory",
    "adapters.figure.memory_of": "{count} in memory",
    "adapters.figure.requests": "Requests",
    "adapters.figure.requests_of": "since the start",
    "adapters.table": "Adapters that this server knows",
    "adapters.column.name": "Adapter",
    "adapters.column.state": "State",
    "adapters.column.rank": "Rank",
    "adapters.column.modules": "Modules",
    "adapters.column.size": "Size",
    "adapters.column.requests": "Requests",
    "adapters.column.last_used": "Last used",
    "adapters.column.actions": "Actions",
    "adapters.state.gpu": "in batch slot",
    "adapters.state.cpu": "in memory",
    "adapters.state.disk": "on disk",
    "adapters.state.failed": "failed",
    "adapters.pinned": "pinned",
    "adapters.default_for": "default for {modalities}",
    "adapters.pin": "Pin",
    "adapters.unpin": "Unpin",
    "adapters.unload": "Unload",
    "adapters.delete": "Delete",
    "adapters.default": "Default for {modality}",
    "adapters.no_default": "No default",
    "adapters.versions": "Versions",
    "adapters.rollback": "Roll back",
    "adapters.download": "Download",
    "adapters.download_label": "Download {name} as a zip",
    "adapters.current": "current",
    "adapters.versions_title": "Versions of {name}",
    "adapters.versions_close": "Close",
    "adapters.default_label": "Let {name} answer {modality} by itself",
    "adapters.no_default_label": "Let {name} no longer answer {modality} by itself",
    "adapters.versions_label": "Versions of {name}",
    "adapters.rollback_label": "Roll {name} back to {version}",
    "adapters.pin_label": "Pin {name}: keep it in memory",
    "adapters.unpin_label": "Unpin {name}",
    "adapters.unload_label": "Unload {name}",
    "adapters.delete_label": "Delete {name}",
    "adapters.cancel": "Cancel",
    "adapters.unload_title": "Unload {name}?",
    "adapters.unload_body": (
        "New requests for {name} will get “not found”. Answers that are running finish with it. Its files stay where "
        "they came from."
    ),
    "adapters.delete_title": "Delete {name}?",
    "adapters.delete_body": "The uploaded files are deleted from this server. Answers that are running finish with it.",
    "adapters.default_warning": "It is the default for {modalities}: such messages will get an error until it is back.",
    "adapters.done.pin": "{name} is pinned: it stays in memory.",
    "adapters.done.unpin": "{name} is no longer pinned.",
    "adapters.done.default": "{name} now answers messages with {modality} by itself, and stays in memory.",
    "adapters.done.no_default": "{name} no longer answers messages with {modality} by itself.",
    "adapters.done.rollback": "{name} is rolled back to {version}.",
    "adapters.done.unload": "{name} is unloaded.",
    "adapters.done.delete": "{name} is deleted.",
    "adapters.done.install": "{name} is installed: rank {rank}, {modules} modules.",
    "adapters.empty_title": "No adapters yet",
    "adapters.empty_body": (
        "Drop a zip with adapter_config.json and adapter_model.safetensors below, as PEFT’s save_pretrained writes them."
    ),
    "adapters.add": "Add adapters: zips, or adapter_config.json with its .safetensors",
    "adapters.report_empty": "Each file is checked first, and nothing is installed before you say so. The report appears here.",
    "adapters.locked": "Adapters cannot be changed by this login: loading and unloading need the admin key.",
    # reports of a dry run
    "report.passed": "Passed",
    "report.warning": "Warning",
    "report.failed": "Failed",
    "report.ready": "Ready to install",
    "report.name_taken": "Name taken",
    "report.not_installed": "Not installed",
    "report.refused": "Refused",
    "report.installed": "Installed",
    "report.checking": "Checking",
    "report.name": "Name",
    "report.replace": "Replace the adapter that has this name",
    "report.install": "Install",
    "report.dismiss": "Dismiss",
    "report.loose": "{count} files",
    "report.default_name": "my-adapter",
    "report.files": "Found {files}",
    "report.ignored": "Not used: {files}",
    "report.twice": "There are two files called {name}: drop one adapter’s files at a time, or a zip for each.",
    "report.matched": "{matched} of {total} tensor pairs matched, in {modules} modules of this model",
    "report.rank": "Rank {rank}, alpha {alpha}, scale {scale}",
    "report.ranks": "Ranks {ranks}, alpha {alpha}, scales {scales}",
    "report.targets": "Changes {targets} in the {parts}",
    "report.tensors": "{size} of tensors, {dtype}",
    "report.base": "Trained on {base}",
    "report.zero": "Its effect is zero everywhere: it will answer exactly as the base model does.",
    "report.probe.effect": "Tried out: it changes the likeliest next word in {share} of {count} places (mean KL {kl})",
    "report.probe.slight": "Tried out: it changes little, {share} of {count} likeliest next words (mean KL {kl})",
    "report.probe.none": "Tried out: no effect. It answered as the base model does in all of {count} places.",
    "report.probe.broken": "Tried out: its numbers are broken (not finite), so its answers will fail.",
    "report.probe.not_measured": "Not tried out: the engine was too busy. Its effect is unknown.",
    "report.taken": "The name {name} is taken. Give it another name, or tick “Replace the adapter that has this name”.",
    "report.no_name": "Give it a name first.",
    "report.gone": "The uploaded files are gone from the server. Drop them again.",
    # memory by tier
    "memory.title": "Where adapters lie",
    "memory.gpu": "In batch slots",
    "memory.cpu": "CPU memory",
    "memory.disk": "On disk only",
    "memory.rows": "{used} of {total} slots",
    "memory.cpu_count": "{count} of {limit} adapters",
    "memory.cpu_bytes": "{count} adapters, at most {limit}",
    "memory.disk_note": "read when they are asked for",
    # status
    "status.running": "Running",
    "status.waiting": "{count} waiting",
    "status.speed": "Speed",
    "status.tokens_s": "tokens/s",
    "status.kv": "KV cache",
    "status.kv_of": "{used} of {total} blocks",
    "status.finished": "Answers",
    "status.tokens_total": "{count} tokens since the start",
    "status.plot.speed": "Generated",
    "status.plot.batch": "Requests in the batch, by adapter",
    "status.plot.kv": "KV cache in use",
    "status.plot.first": "First token of answers on this page",
    "status.plot.moves": "Adapters into slots, and evictions",
    "status.moves": "{loads} loads, {out} evictions",
    "status.loads": "Loads",
    "status.evictions": "Evictions",
    "status.others": "Others",
    "status.ago": "{minutes} min ago",
    "status.no_samples": "Samples begin while a page is open.",
    "status.no_answers": "Ask something in Chat to see one.",
    "status.setup": "Set-up",
    "status.setup.model": "Model",
    "status.setup.device": "Device",
    "status.setup.context": "Context",
    "status.setup.modalities": "Media",
    "status.setup.batch": "Batch",
    "status.setup.kv_cache": "KV cache",
    "status.setup.rows": "Adapters",
    "status.setup.uptime": "Up for",
    "status.text_only": "text only",
    "status.batch_value": "up to {requests} requests",
    "status.kv_value": "{blocks} blocks of {tokens} tokens",
    "status.rows_value": "{rows} slots, rank up to {rank}",
    "status.link.docs": "API routes",
    "status.link.openapi": "OpenAPI",
    "status.link.metrics": "Metrics",
    "status.ask_for": "From a program",
    "status.ask_for_info": "How to ask for this choice",
    "status.curl": "curl",
    "status.python": "Python, openai package",
    "status.copy": "Copy",
    "status.copied": "Copied",
    "status.copy_label": "Copy: {kind}",
    # figures
    "unit.ms": "{value} ms",
    "unit.s": "{value} s",
    "span.minutes": "{value} min",
    "span.hours": "{value} h",
    "span.days": "{value} d",
    "age.never": "never",
    "age.now": "just now",
    "age.minutes": "{value} min ago",
    "age.hours": "{value} h ago",
    "age.days": "{value} d ago",
    # examples
    "example.clip": "Recording: {title}",
    "example.sql": "Write SQL from a question",
    "example.pirate": "Answer like a pirate",
    "example.base": "Tell a story, base model",
    "example.base_prompt": "Tell me a long story about a fox",
}

LANGUAGES: Mapping[str, Mapping[str, str]] = {"en": ENGLISH}


@dataclass(frozen=True)
class Texts:
    """The words of one language; called with a key and the values of its placeholders."""

    phrases: Mapping[str, str] = field(default_factory=lambda: ENGLISH)

    def __call__(self, key: str, **values: object) -> str:
        """The phrase of `key` with its placeholders filled in; raises `KeyError` for a key that does not exist."""
        return self.phrases[key].format(**values)

    def size(self, num_bytes: int) -> str:
        """`1.5 MB`: bytes for people, in powers of 1000 as disks count."""
        value = float(num_bytes)
        for unit in ("B", "kB", "MB"):
            if value < 1000:
                return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
            value /= 1000
        return f"{value:.1f} GB"

    def duration(self, seconds: float) -> str:
        """`12 ms` or `1.3 s`."""
        if seconds >= 1:
            return self("unit.s", value=f"{seconds:.1f}")
        return self("unit.ms", value=f"{seconds * 1000:.1f}" if 0 < seconds < 0.01 else f"{seconds * 1000:.0f}")

    def span(self, seconds: float) -> str:
        """A long time: `5 min`, `3 h` or `2 d`."""
        for limit, unit, key in ((7200, 60, "minutes"), (172800, 3600, "hours")):
            if seconds < limit:
                return self(f"span.{key}", value=int(seconds // unit))
        return self("span.days", value=int(seconds // 86400))

    def age(self, then: float | None) -> str:
        """How long ago a Unix time was."""
        if then is None:
            return self("age.never")
        seconds = max(0.0, time.time() - then)
        if seconds < 60:
            return self("age.now")
        for limit, unit, key in ((3600, 60, "minutes"), (86400, 3600, "hours")):
            if seconds < limit:
                return self(f"age.{key}", value=int(seconds // unit))
        return self("age.days", value=int(seconds // 86400))


def language_of(accept_language: str) -> str:
    """The first language of an `Accept-Language` header (RFC 9110, 12.5.4) that there is a table for, else English."""
    ranked = []
    for place, part in enumerate(accept_language.split(",")):
        tag, _, quality = part.strip().partition(";q=")
        try:
            ranked.append((-float(quality or 1), place, tag.lower()))
        except ValueError:
            continue
    for _, _, tag in sorted(ranked):
        for language in LANGUAGES:
            if tag.split("-")[0] == language.split("-")[0]:
                return language
    return "en"


def texts(language: str = "en") -> Texts:
    """The words of a language code; English where there is no such table yet."""
    return Texts(LANGUAGES.get(language, ENGLISH))
