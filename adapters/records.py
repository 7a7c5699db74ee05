"""What the manager tells about adapters: one `AdapterInfo` each, their versions, and `ManagerStats`.

Plain data for the API, the UI and metrics. `AdapterEntry` is the manager's own mutable record behind an `AdapterInfo`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from adapters.errors import AdapterError
from adapters.folder import Stamp
from adapters.located import Lease, Located
from adapters.report import AdapterReport

State = Literal["disk", "cpu", "gpu", "failed"]


@dataclass(frozen=True)
class AdapterInfo:
    """One adapter as a list shows it.

    Attributes:
        name: what requests call it.
        source: where it came from: the path or id exactly as it was given, or `upload:NAME`.
        revision: the commit that a hub address was pinned to, or None.
        base_model_name: the base model that its loader named, or None.
        generation: `sha256:…` of what the name points to; None where it failed.
        rank, alpha, target_modules, scale, num_bytes, num_modules, warnings: from the report, else 0 or empty.
        state: the fastest tier that holds it, or failed.
        pinned: never evicted from CPU memory, because somebody said so or because it is a default.
        default_for: modalities whose prompts it answers by itself.
        created: when the name got this content, in seconds since the epoch.
        error: why it cannot be served, or None.
        num_requests, last_used: how often it was borrowed, and when last (seconds since the epoch).
        num_loads, load_ms: how often the name's content was read from files, and the milliseconds of the latest read.
        prefix_query_tokens, prefix_hit_tokens: tokens of its prompts, and those that the prefix cache gave.
        report: `AdapterReport.to_dict()`.
        is_stored: an upload, kept in the server's adapter folder and found again after a restart.
        lora_int_id: a number from 1 that stays the same while the name exists.
    """

    name: str
    source: str
    revision: str | None
    base_model_name: str | None
    generation: str | None
    rank: int
    alpha: float
    target_modules: list[str]
    scale: float
    num_bytes: int
    num_modules: int
    state: State
    pinned: bool
    default_for: list[str]
    created: int
    error: str | None
    warnings: list[str]
    num_requests: int
    last_used: float | None
    num_loads: int
    load_ms: float
    prefix_query_tokens: int
    prefix_hit_tokens: int
    report: dict[str, Any]
    is_stored: bool
    lora_int_id: int

    @property
    def path(self) -> str:
        """Another word for `source`."""
        return self.source

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True)
class VersionInfo:
    """Present or earlier content of a name.

    Attributes:
        generation: `sha256:…` of the content.
        created: when the name got it, in seconds since the epoch.
        is_current: whether the name points to it.
        is_stored: an upload that lies in the server's own folder; an earlier version that does not can be gone back to
            only while its files still hold the same content or something still has it in memory.
        source: where it came from.
    """

    generation: str
    created: float
    is_current: bool
    is_stored: bool
    source: str


@dataclass(frozen=True)
class ManagerStats:
    """Counters since start, and what is resident now. Seconds are sums; `max_cpu_bytes` None means no such bound;
    `spare_bytes` is memory that waits for the next loads."""

    num_adapters: int
    num_failed: int
    num_cpu: int
    cpu_bytes: int
    max_cpu_loras: int
    max_cpu_bytes: int | None
    spare_bytes: int
    num_pinned: int
    evictions: int
    loads: dict[str, int]
    load_seconds: dict[str, float]
    refusals: dict[str, int]


@dataclass
class NameUsage:
    """What a name was used for since it exists; goes with the name."""

    num_requests: int = 0
    last_used: float | None = None
    num_loads: int = 0
    load_ms: float = 0.0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


@dataclass(eq=False)
class AdapterEntry:
    """The manager's record of a name. Content fields never change: new content is a new entry.

    `usage` is the name's, whatever it points to. `changed_stamp` is what its files looked like when they were last found
    to hold other content.
    """

    name: str
    source: str
    folder: Path
    created: float
    lora_int_id: int = 0
    revision: str | None = None
    lease: Lease | None = None
    base_model_name: str | None = None
    digest: str | None = None
    report: AdapterReport | None = None
    # name of the folder in the server's own store; None where the files are somebody else's
    version: str | None = None
    error: AdapterError | None = None
    is_pinned: bool = False
    usage: NameUsage = field(default_factory=NameUsage)
    changed_stamp: Stamp | None = None

    @property
    def located(self) -> Located:
        """Where its files are."""
        return Located(self.folder, self.source, self.revision, self.lease)

    def describe(self, state: State, default_for: list[str]) -> AdapterInfo:
        """The public form."""
        report, usage = self.report, self.usage
        return AdapterInfo(
            name=self.name,
            source=self.source,
            revision=self.revision,
            base_model_name=self.base_model_name,
            generation=self.digest,
            rank=report.rank if report else 0,
            alpha=report.alpha if report else 0.0,
            target_modules=list(report.target_modules) if report else [],
            scale=report.scale if report else 0.0,
            num_bytes=report.num_bytes if report else 0,
            num_modules=report.num_modules if report else 0,
            state="failed" if self.error is not None else state,
            pinned=self.is_pinned or bool(default_for),
            default_for=default_for,
            created=int(self.created),
            error=None if self.error is None else self.error.message,
            warnings=list(report.warnings) if report else [],
            num_requests=usage.num_requests,
            last_used=usage.last_used,
            num_loads=usage.num_loads,
            load_ms=usage.load_ms,
            prefix_query_tokens=usage.prefix_query_tokens,
            prefix_hit_tokens=usage.prefix_hit_tokens,
            report=report.to_dict() if report else {},
            is_stored=self.version is not None,
            lora_int_id=self.lora_int_id,
        )
