"""`python -m adapters`: look at an adapter's files, and see what adapters cost in memory.

    python -m adapters inspect PATH [--base MODEL] [--json]
    python -m adapters estimate MODEL [--ranks 8,16,32,64] [--max-loras 8] [--target-modules q_proj,v_proj]

A program on top of the packages, like `app.py`: nothing imports it. A base model is built from its config alone, without
weights. Exit status: 0 done, 1 the adapter is refused, 2 the command line is wrong or nothing is there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.errors import AppError
from adapters.estimate import RankEstimate, estimate
from adapters.inspection import Inspection, inspect_adapter
from adapters.report import AdapterReport
from adapters.surface import LinearSite

if TYPE_CHECKING:
    from engine.model import BaseModel

_MATCHES = {
    "same": "the same by name",
    "other": "another by name",
    "unnamed": "the adapter names none",
    "unknown": "not compared",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = _parser().parse_args(words)
    try:
        status: int = arguments.run(arguments)
    except AppError as error:
        sys.stderr.write(f"{error.message}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"the files cannot be read ({error.strerror or 'unknown reason'})\n")
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m adapters", description="Adapters' files and what they cost.")
    commands = parser.add_subparsers(required=True)
    look = commands.add_parser("inspect", help="what an adapter's files hold, and whether they can be served")
    look.add_argument("path", type=Path, help="the adapter's folder")
    look.add_argument(
        "--base", help="base model, folder or Hugging Face id, to judge the adapter on; its config is enough"
    )
    look.add_argument("--max-lora-rank", type=int, default=1 << 20, help="refuse larger ranks, as a server would")
    look.add_argument("--json", action="store_true", help="print one JSON object")
    look.set_defaults(run=_inspect)
    cost = commands.add_parser("estimate", help="memory by rank on a base model")
    cost.add_argument("model", help="base model, folder or Hugging Face id; its config is enough")
    cost.add_argument("--ranks", type=_ranks, default=[8, 16, 32, 64], help="comma-separated, such as 8,16,32,64")
    cost.add_argument("--max-loras", type=int, default=8, help="LoRA rows of the server (default 8)")
    cost.add_argument(
        "--target-modules", type=lambda text: text.split(","), default=[],
        help="last name components of the layers that an adapter changes; default: all linear layers of the decoder",
    )  # fmt: skip
    cost.set_defaults(run=_estimate)
    return parser


def _ranks(text: str) -> list[int]:
    ranks = [int(word) for word in text.split(",")]
    if not all(rank > 0 for rank in ranks):
        raise ValueError(text)
    return ranks


def _outline(model: str) -> BaseModel:
    """The model without weights."""
    from engine.model import outline_model

    return outline_model(model)


def _inspect(arguments: argparse.Namespace) -> int:
    surface = None
    if arguments.base:
        base = _outline(arguments.base)
        surface = base.surface(max_lora_rank=arguments.max_lora_rank, lora_dtype=base.dtype)
    found = inspect_adapter(arguments.path, surface)
    if arguments.json:
        report = None if found.report is None else found.report.to_dict()
        sys.stdout.write(json.dumps(vars(found) | {"report": report}) + "\n")
    else:
        sys.stdout.write("\n".join(_inspection_lines(found)) + "\n")
    return 1 if found.report is None else 0


def _inspection_lines(found: Inspection) -> list[str]:
    lines = [f"format      {found.format}", f"base        {found.base or 'none given'}"]
    if found.report is not None:
        lines += _report_lines(found.report)
    for title, sentences in (
        ("refused", found.reasons),
        ("warnings", [] if found.report is None else found.report.warnings),
        ("notes", found.notes),
    ):
        lines += [f"{title}:", *(f"  - {sentence}" for sentence in sentences)] if sentences else []
    return lines


def _report_lines(report: AdapterReport) -> list[str]:
    stored = ", ".join(report.file_dtypes)
    lines = [
        f"trained on  {report.base_model or 'not said'} ({_MATCHES[report.base_match]})",
        f"matched     {report.matched} of {report.total} tensor pairs, {report.unmatched} unmatched",
        f"types       {stored} in the files, {report.dtype} served",
        f"memory      {_size(report.num_bytes)} on the GPU",
        f"digest      {report.digest}",
        *([] if report.card is None else [f"card        {report.card['description'] or 'without a description'}"]),
        "modules     count  rank       scale",
    ]
    for group in report.groups:
        ranks = ", ".join(map(str, group.ranks))
        scales = ", ".join(f"{scale:.6g}" for scale in group.scales)
        where = f"  ({group.part})" if report.parts else ""
        lines.append(f"  {group.name:<16} {group.num_modules:>4}  {ranks:<9}  {scales}{where}")
    return lines


def _estimate(arguments: argparse.Namespace) -> int:
    base = _outline(arguments.model)
    surface = base.surface(max_lora_rank=max(arguments.ranks), lora_dtype=base.dtype)
    sites = list(surface.linears.values())
    touched = [site for site in sites if _is_touched(site, arguments.target_modules)]
    if not touched:
        known = ", ".join(sorted({site.name.rpartition(".")[2] for site in sites}))
        sys.stderr.write(f"--target-modules names no layer of {base.name}; it has {known}.\n")
        return 2
    rows = estimate(touched, surface, arguments.ranks, num_slots=arguments.max_loras, base_bytes=base.num_bytes)
    title = f"{base.name}: {_size(base.num_bytes)} in {str(base.dtype).removeprefix('torch.')}, {len(touched)} layers"
    sys.stdout.write("\n".join([title, *estimate_table(rows, arguments.max_loras)]) + "\n")
    return 0


def estimate_table(rows: Sequence[RankEstimate], num_slots: int) -> list[str]:
    """Lines of the table that `estimate` prints."""
    head = f"{'rank':>5}  {'one adapter':>12}  {'of the base':>11}  {f'room for {num_slots}':>12}"
    return [head] + [
        f"{row.rank:>5}  {_size(row.adapter_bytes):>12}  {row.share:>11.2%}  {_size(row.slot_bytes):>12}"
        for row in rows
    ]


def _is_touched(site: LinearSite, suffixes: Sequence[str]) -> bool:
    return site.name.rpartition(".")[2] in suffixes if suffixes else site.part == "decoder"


def _size(num_bytes: int) -> str:
    """Bytes with three digits, in powers of ten: 83.9 MB."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.3g} GB" if value < 999.5 else f"{value:.0f} GB"


if __name__ == "__main__":
    sys.exit(main())
