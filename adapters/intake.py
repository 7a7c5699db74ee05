"""Steps between an adapter's files and the manager's records: read, judge an upload, take stock of a stored one.

Turns faults of the file system into refusals that name no path. Holds no state. Called by `manager`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from adapters.card import AdapterCard
from adapters.catalog import CatalogRow
from adapters.errors import AdapterError, AdapterFilesNotFound, AdapterRefused, StorageFull
from adapters.generation import Generation
from adapters.located import Located
from adapters.plan import check_adapter
from adapters.readme import find_card
from adapters.records import AdapterEntry
from adapters.report import AdapterReport
from adapters.slab_pool import Memory, fresh_memory
from adapters.surface import ModelSurface
from adapters.upload import UploadFiles, UploadReport, unpack_upload
from adapters.weights import has_first_format_digest, read_adapter

log = logging.getLogger(__name__)


def read_generation(
    folder: Path,
    surface: ModelSurface,
    *,
    allowed_roots: Sequence[Path] | None = None,
    known_digest: str | None = None,
    memory: Memory = fresh_memory,
) -> Generation:
    """Read and check a folder; its pairs lie in `memory`. Raises `AdapterFilesNotFound` or `AdapterRefused`.

    `known_digest` is what the content was listed under before. Where an earlier version of this program computed it, and
    the content is still that, the generation keeps it: names, rows and caches go on knowing the content by it.
    """
    with _without_os_errors():
        content = read_adapter(folder, surface, allowed_roots=allowed_roots, memory=memory)
        report = content.report
        if known_digest not in (None, report.digest) and has_first_format_digest(folder, surface, known_digest):
            report = replace(report, digest=known_digest)
    return Generation(report.digest, content.spec, content.pairs, report, content.extras)


def judge_upload(
    files: UploadFiles, folder: Path, surface: ModelSurface, *, max_bytes: int, memory: Memory = fresh_memory
) -> tuple[UploadReport, Generation | None]:
    """Unpack an upload into an empty folder and report on it, with its content if it is good.

    The caller deletes the folder. Raises `StorageFull`, which says nothing about the upload.
    """
    try:
        unpacked = unpack_upload(files, folder, max_bytes=max_bytes)
    except StorageFull:
        raise
    except AdapterError as error:
        return UploadReport(is_ok=False, errors=[error.message], code=error.code), None
    try:
        generation = read_generation(folder, surface, memory=memory)
        card = find_card(folder)
    except AdapterError as error:
        errors = error.reasons if isinstance(error, AdapterRefused) else [error.message]
        return UploadReport(False, errors, error.code, unpacked.files, unpacked.ignored), None
    found = with_card(generation.report, card)
    return UploadReport(True, [], None, unpacked.files, unpacked.ignored, found.to_dict()), generation


def with_card(report: AdapterReport, card: AdapterCard | None) -> AdapterReport:
    """A report that tells of this card: equal tensors may lie beside different ones."""
    return replace(report, card=None if card is None else card.to_dict())


def card_of(report: AdapterReport) -> AdapterCard | None:
    """The card that a report tells of."""
    return None if report.card is None else AdapterCard.from_dict(report.card)


def new_entry(
    name: str,
    source: str,
    located: Located,
    generation: Generation,
    base_model_name: str | None = None,
    *,
    card: AdapterCard | None = None,
) -> AdapterEntry:
    """The record of a name that points to content that was just read; its files are given back when it is gone."""
    return AdapterEntry(
        name,
        source,
        located.folder,
        revision=located.revision,
        lease=located.lease,
        created=time.time(),
        base_model_name=base_model_name,
        digest=generation.digest,
        report=with_card(generation.report, card),
    )


def restored_entry(row: CatalogRow, folder: Path, surface: ModelSurface) -> AdapterEntry:
    """The record of a stored adapter, judged by everything but its numbers; those are checked when they are read."""
    entry = AdapterEntry(row.name, row.source, folder, created=row.created, base_model_name=row.base_model_name)
    entry.version, entry.is_pinned = row.folder, row.is_pinned
    try:
        with about(row.name), _without_os_errors():
            plan = check_adapter(folder, surface)
            report = _stored_report(row)
    except AdapterError as error:
        entry.error = error
        log.warning("event=stored_adapter_failed adapter=%s reason=%r", row.name, error.message)
        return entry
    entry.digest = row.digest
    entry.report = replace(
        report,
        num_bytes=plan.num_bytes(surface.lora_dtype),
        dtype=str(surface.lora_dtype).removeprefix("torch."),
        warnings=[*dict.fromkeys([*plan.warnings, *report.warnings])],
    )
    return entry


@contextmanager
def about(name: str) -> Iterator[None]:
    """Errors about files say which adapter they are about."""
    try:
        yield
    except AdapterRefused as error:
        raise AdapterRefused(error.reasons, param=error.param, name=name) from error.__cause__
    except AdapterFilesNotFound as error:
        raise AdapterFilesNotFound(f"adapter {name!r}: {error.message}", param=error.param) from error.__cause__


def _stored_report(row: CatalogRow) -> AdapterReport:
    try:
        return AdapterReport.from_dict(row.report)
    except (KeyError, TypeError, ValueError):
        raise AdapterRefused(["the catalogue's report on it is of another program version; upload it again"]) from None


@contextmanager
def _without_os_errors() -> Iterator[None]:
    """The operating system's errors hold paths; ours do not."""
    try:
        yield
    except OSError as error:
        raise AdapterRefused([f"its files cannot be read ({error.strerror or 'unknown reason'})"]) from error
    except MemoryError:
        raise AdapterRefused(["there is not enough memory to read it"]) from None
