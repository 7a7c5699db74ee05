"""`/metrics`: every family is there, numbers add up, and label values stay bounded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from api.metrics import MAX_NAMES, Metrics
from engine import Engine
from engine.answer import Answer
from engine.metrics import Histogram
from engine.request import Delta, Receipt
from tests.api.conftest import Serve

DASHBOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "switchboard.json"

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(http: httpx.Client) -> Values:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return values_of(answer.text)


def values_of(text: str) -> Values:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(values: Values, name: str, **labels: str) -> float:
    return values.get((f"switchboard_{name}", tuple(sorted(labels.items()))), 0.0)


def test_answers_and_refusals_are_counted_by_route_adapter_and_reason(
    serve_with: Serve, base_model: str, audio_message: dict[str, Any]
) -> None:
    with serve_with() as url, httpx.Client(base_url=url, timeout=60) as http:
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
        for body in (
            {**chat, "model": base_model},
            {**chat, "model": base_model, "n": 2, "stream": True},
            {**chat, "model": "style"},
            {**chat, "model": base_model, "messages": [audio_message]},
        ):
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        usage = http.post("/v1/completions", json={"model": "style", "prompt": "a b", "max_tokens": 2}).json()["usage"]
        assert http.post("/v1/chat/completions", json={**chat, "model": "nobody"}).status_code == 404
        values = read(http)
        assert value(values, "requests_total", route="chat", adapter="none", outcome="length") == 3
        assert value(values, "requests_total", route="chat", adapter="style", outcome="length") == 1
        assert value(values, "requests_total", route="chat", adapter="speech", outcome="length") == 1
        assert value(values, "refusals_total", reason="model_not_found") == 1
        assert value(values, "tokens_total", route="chat", adapter="none", kind="output") == 9
        completion = {"route": "completions", "adapter": "style"}
        assert value(values, "tokens_total", **completion, kind="prompt") == usage["prompt_tokens"]
        assert value(values, "tokens_total", **completion, kind="output") == usage["completion_tokens"]
        for family in ("queue_seconds", "first_token_seconds", "per_token_seconds", "answer_seconds"):
            assert value(values, f"{family}_count", route="chat", adapter="none") == 3, family
            assert value(values, f"{family}_bucket", route="chat", adapter="none", le="+Inf") == 3, family
        assert value(values, "step_adapters_count") == value(values, "step_requests_count") > 0
        assert value(values, "adapters", tier="catalogue") == 3
        assert value(values, "up") == 1
        assert value(values, "encoder_cache_lookups_total", result="miss") >= 1


def test_label_values_are_the_catalogues_names_then_other(tiny_engine: Engine) -> None:
    metrics = Metrics(tiny_engine, lambda: 0)
    for number in range(8 * MAX_NAMES + 50):
        answer = Answer("id", Receipt(f"gone-{number}", "sha256:0", "explicit"), [1, 2])
        metrics.watch("chat", [answer])
        answer.put(Delta(receipt=answer.receipt))
        answer.put(Delta("x", token_ids=(1,), finish_reason="stop"))
    kept = Answer("id", Receipt("speech", "sha256:1", "explicit"), [1, 2])
    metrics.watch("chat", [kept])
    kept.put(Delta(finish_reason="abort"))
    assert len(metrics._series) <= 8 * MAX_NAMES + 1
    values = values_of(metrics.render().decode())
    names = {dict(labels)["adapter"] for _, labels in values if "adapter" in dict(labels)}
    assert names == {"speech", "other"}
    total = 8 * MAX_NAMES + 50
    assert value(values, "requests_total", route="chat", adapter="other", outcome="stop") == total
    assert value(values, "first_token_seconds_count", route="chat", adapter="other") == total


def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1, 2, 4))
    for number in (0, 1, 1.5, 4, 9):
        histogram.observe(number)
    assert histogram.cumulative() == [("1", 2.0), ("2", 3.0), ("4", 4.0), ("+Inf", 5.0)]
    assert (histogram.count, histogram.total) == (5, 15.5)


def test_the_dashboard_asks_for_metrics_that_exist(http: httpx.Client, base_model: str) -> None:
    http.post("/v1/completions", json={"model": base_model, "prompt": "a", "max_tokens": 2})
    http.get("/v1/models/nobody")
    known = {name for name, _ in read(http)}
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"switchboard_\w+", query)}
    assert len(panels) > 10
    assert asked - known <= {"switchboard_adapter_refusals_total"}  # nothing was refused yet
