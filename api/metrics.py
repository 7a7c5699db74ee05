"""`GET /metrics`: what the server and its engine do, in Prometheus' text form.

Owns the names of the metrics, the counts by route and adapter, and the bound on label values: the catalogue's names, at
most `MAX_NAMES` of them, then `other`. The base model is `none`. Everything else is read from the engine when it is asked
for. One `Metrics` and one registry for each application; `prometheus_client` is imported when it is first needed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from engine.metrics import Histogram

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from engine.answer import Answer
    from engine.engine import Engine, EngineStats
    from engine.errors import AppError

MAX_NAMES = 256
BASE = "none"
OTHER = "other"
PREFIX = "switchboard_"
WAIT_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
ANSWER_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass
class _Series:
    """One route's and adapter's answers."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    queue: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    first_token: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS))
    per_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    whole: Histogram = field(default_factory=lambda: Histogram(ANSWER_BOUNDS))

    def note(self, answer: Answer) -> None:
        """Count an answer that has ended."""
        self.outcomes["error" if answer.error is not None else str(answer.finish_reason)] += 1
        if answer.index == 0:  # n answers share their prompt
            self.tokens["prompt"] += len(answer.prompt_token_ids)
            self.tokens["cached"] += answer.receipt.cached_tokens
        self.tokens["output"] += answer.num_output_tokens
        if answer.started_at is not None:
            self.queue.observe(answer.started_at - answer.submitted_at)
        if answer.ended_at is None or answer.first_token_at is None:
            return
        self.first_token.observe(answer.first_token_at - answer.submitted_at)
        self.whole.observe(answer.ended_at - answer.submitted_at)
        if answer.num_output_tokens > 1:
            self.per_token.observe((answer.ended_at - answer.first_token_at) / (answer.num_output_tokens - 1))

    def add(self, other: _Series) -> None:
        """Take another series in."""
        for row in fields(self):
            mine, theirs = getattr(self, row.name), getattr(other, row.name)
            (mine.update if isinstance(mine, Counter) else mine.add)(theirs)


class Metrics:
    """One application's measurements.

    Args:
        engine: what is measured.
        num_waiting: requests that wait, those whose prompts are being prepared included.
    """

    def __init__(self, engine: Engine, num_waiting: Callable[[], int]) -> None:
        self._engine = engine
        self._num_waiting = num_waiting
        self._lock = threading.Lock()
        self._series: dict[tuple[str, str], _Series] = {}
        self._refusals: Counter[str] = Counter()

    def watch(self, route: str, answers: Sequence[Answer]) -> None:
        """Count these answers once they end."""
        if len(self._series) > 8 * MAX_NAMES:
            self._fold()
        for answer in answers:
            answer.on_end(partial(self._note, route))

    def refuse(self, error: AppError) -> None:
        """Count a request that was answered with an error."""
        with self._lock:
            self._refusals[error.code or error.error_type] += 1

    def _note(self, route: str, answer: Answer) -> None:
        with self._lock:
            self._series.setdefault((route, answer.receipt.name or BASE), _Series()).note(answer)

    def _fold(self) -> None:
        """Add the series of names that the catalogue has no more, or beyond the bound, to `other`."""
        names = {BASE, *sorted(self._engine.adapters.names())[:MAX_NAMES]}
        with self._lock:
            for route, name in [key for key in self._series if key[1] not in names and key[1] != OTHER]:
                self._series.setdefault((route, OTHER), _Series()).add(self._series.pop((route, name)))

    # The public form

    @cached_property
    def _registry(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry, ProcessCollector

        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        registry.register(self)
        return registry

    @property
    def content_type(self) -> str:
        """Of what `render` makes."""
        from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

        return CONTENT_TYPE_PLAIN_0_0_4

    def render(self) -> bytes:
        """Everything as Prometheus' text."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: names need not be known before the first reading."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        self._fold()
        with self._lock:
            yield from _request_metrics(self._series, self._refusals)
        stats = self._engine.stats()
        yield _gauge("requests_waiting", "Requests that have not begun.", {(): self._num_waiting()})
        yield from _engine_metrics(stats)
        yield from _adapter_metrics(stats)


def _request_metrics(series: Mapping[tuple[str, str], _Series], refusals: Mapping[str, int]) -> Iterator[Metric]:
    labels = ("route", "adapter")
    yield _counter(
        "requests",
        "Answers that have ended, by how.",
        {(*key, outcome): count for key, each in series.items() for outcome, count in each.outcomes.items()},
        (*labels, "outcome"),
    )
    yield _counter(
        "tokens",
        "Tokens of prompts, those of them that the prefix cache gave, and tokens of answers.",
        {(*key, kind): count for key, each in series.items() for kind, count in each.tokens.items()},
        (*labels, "kind"),
    )
    for name, text, histograms in (
        ("queue", "From submission to the first step.", {key: each.queue for key, each in series.items()}),
        ("first_token", "From submission to the first token.", {key: each.first_token for key, each in series.items()}),
        ("per_token", "Mean time between an answer's tokens.", {key: each.per_token for key, each in series.items()}),
        ("answer", "From submission to the end.", {key: each.whole for key, each in series.items()}),
    ):
        yield _histogram(f"{name}_seconds", text, histograms, labels)
    yield _counter(
        "refusals",
        "Requests answered with an error, by its code.",
        {(code,): count for code, count in refusals.items()},
        ("reason",),
    )


def _engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("up", "1 while the engine takes requests.", {(): stats.is_alive})
    yield _gauge("requests_running", "Requests in the batch.", {(): stats.num_running})
    yield _histogram("step_requests", "Requests in a step.", {(): stats.steps.num_requests})
    yield _histogram("step_tokens", "Tokens in a step.", {(): stats.steps.num_tokens})
    yield _histogram("step_adapters", "Distinct adapters in a step.", {(): stats.steps.num_adapters})
    blocks = {("used",): stats.kv_blocks_used, ("cached",): stats.kv_blocks_cached, ("total",): stats.kv_blocks_total}
    yield _gauge("kv_blocks", "KV cache blocks: held by requests, kept for reuse, and all.", blocks, ("state",))
    yield _counter("preemptions", "Requests put back for want of KV blocks.", {(): stats.num_preemptions})
    yield _counter(
        "prefix_query_tokens", "Prompt tokens looked for in the prefix cache.", {(): stats.prefix_query_tokens}
    )
    yield _counter("prefix_hit_tokens", "Prompt tokens that the prefix cache gave.", {(): stats.prefix_hit_tokens})
    hits = {("hit",): stats.encoder_hits, ("miss",): stats.encoder_misses}
    yield _counter("encoder_cache_lookups", "Media features looked for in the encoder cache.", hits, ("result",))
    yield _gauge("encoder_cache_bytes", "Memory of the encoder cache.", {(): stats.encoder_bytes})


def _adapter_metrics(stats: EngineStats) -> Iterator[Metric]:
    adapters = stats.adapters
    tiers = {
        ("catalogue",): adapters.num_adapters,
        ("failed",): adapters.num_failed,
        ("cpu",): adapters.num_cpu,
        ("gpu",): stats.lora_rows_used,
    }
    yield _gauge("adapters", "Adapters by tier: with a name, failed, in CPU memory, in a LoRA row.", tiers, ("tier",))
    yield _gauge("adapter_rows", "LoRA rows.", {(): stats.lora_rows_total})
    yield _gauge("adapter_cpu_bytes", "CPU memory of adapters.", {(): adapters.cpu_bytes})
    yield _gauge("adapter_spare_bytes", "CPU memory that waits for the next adapters.", {(): adapters.spare_bytes})
    evictions = {("cpu",): adapters.evictions, ("gpu",): stats.lora_row_evictions}
    yield _counter("adapter_evictions", "Adapters that made room for others.", evictions, ("tier",))
    yield _counter("adapter_row_loads", "Adapters written into a LoRA row.", {(): stats.lora_row_loads})
    yield _counter("adapter_loads", "Adapters read from files.", _by(adapters.loads), ("source",))
    yield _counter("adapter_load_seconds", "Time spent on reading them.", _by(adapters.load_seconds), ("source",))
    yield _counter("adapter_refusals", "Adapters refused, by reason.", _by(adapters.refusals), ("reason",))


_Values = Mapping[Any, float]  # label values in order -> number


def _by(counts: Mapping[str, float]) -> _Values:
    return {(key,): count for key, count in counts.items()}


def _counter(name: str, text: str, values: _Values, labels: Sequence[str] = ()) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(PREFIX + name, text, labels=labels), values)


def _gauge(name: str, text: str, values: _Values, labels: Sequence[str] = ()) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=labels), values)


def _filled(family: Any, values: _Values) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    made: Metric = family
    return made


def _histogram(name: str, text: str, values: Mapping[Any, Histogram], labels: Sequence[str] = ()) -> Metric:
    from prometheus_client.core import HistogramMetricFamily

    family: Any = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for key, histogram in values.items():
        family.add_metric(key, histogram.cumulative(), histogram.total)
    made: Metric = family
    return made
