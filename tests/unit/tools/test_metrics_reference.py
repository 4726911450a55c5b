"""Metrics are named as Prometheus asks, and the catalog of the reference page is complete."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from baton.telemetry.metrics import RouterMetrics, SupervisorMetrics
from baton.telemetry.worker_metrics import WorkerMetrics
from tests.support.programs import promtool
from tests.unit.tools.metric_lint import problems
from tools.reference.metrics import Family, families

KINDS = (RouterMetrics, WorkerMetrics, SupervisorMetrics)


def full_page(kind: type[RouterMetrics] | type[WorkerMetrics] | type[SupervisorMetrics]) -> str:
    """A page with a series of every family."""
    metrics = kind(CollectorRegistry())
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            names = metric._labelnames
            one: Any = metric.labels(*("x" for _ in names)) if names else metric
            change = one.observe if isinstance(one, Histogram) else one.inc
            change = one.set if isinstance(one, Gauge) else change
            change(1)
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize("family", families(), ids=lambda one: f"{one.page} {one.name}")
def test_metrics_are_named_as_prometheus_asks(family: Family) -> None:
    assert list(problems(family.shown_name, family.kind, family.labels, family.meaning)) == []
    assert family.name.startswith("baton_")
    assert family.meaning.endswith(".")


@pytest.mark.parametrize(
    ("name", "kind", "labels", "text"),
    [
        ("baton_x", "counter", (), "Text."),
        ("baton_x_total", "gauge", (), "Text."),
        ("baton_x_milliseconds", "gauge", (), "Text."),
        ("baton_x_minutes", "gauge", (), "Text."),
        ("baton_x_ms", "gauge", (), "Text."),
        ("baton_x_count", "gauge", (), "Text."),
        ("baton_gauge_x", "gauge", (), "Text."),
        ("baton_requestBytes", "gauge", (), "Text."),
        ("baton_x", "gauge", ("le",), "Text."),
        ("baton_x", "gauge", (), " "),
    ],
)
def test_the_lint_finds_what_is_wrong(
    name: str, kind: str, labels: tuple[str, ...], text: str
) -> None:
    assert len(list(problems(name, kind, labels, text))) == 1


def series_of(family: Family) -> list[str]:
    if family.kind != "histogram":
        return [family.shown_name]
    return [f"{family.name}_{part}" for part in ("bucket", "sum", "count")]


def test_the_catalogue_is_what_pages_show() -> None:
    shown = {
        line.split("{")[0].split(" ")[0]
        for kind in KINDS
        for line in full_page(kind).splitlines()
        if not line.startswith("#")
    }
    known = {name for family in families() for name in series_of(family)}
    assert {name for name in shown if not name.endswith("_created")} == known


def test_pages_agree_on_what_they_share() -> None:
    known: dict[str, tuple[str, tuple[str, ...], str]] = {}
    for family in families():
        told = (family.kind, family.labels, family.meaning)
        assert known.setdefault(family.name, told) == told


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.__name__))
def test_promtool_takes_them(
    kind: type[RouterMetrics] | type[WorkerMetrics] | type[SupervisorMetrics],
) -> None:
    told = subprocess.run(
        [promtool(), "check", "metrics"],
        input=full_page(kind),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
