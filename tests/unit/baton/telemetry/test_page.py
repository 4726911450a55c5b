"""Every series of a page says which cluster it belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import choose_encoder

from baton.telemetry.page import MetricsPage

OPENMETRICS, _ = choose_encoder("application/openmetrics-text; version=1.0.0")
LABELS = 'cluster="blue",model_name="tiny"'


@pytest.fixture
def registry() -> CollectorRegistry:
    found = CollectorRegistry()
    Counter("a", "Text.", ["worker"], registry=found).labels("w").inc(2)
    Gauge("b", "Text.", registry=found).set(3)
    Histogram("c", "Text.", buckets=(1,), registry=found).observe(0.5, {"trace_id": "t"})
    return found


def lines(page: str) -> list[str]:
    return [line for line in page.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("draw", [generate_latest, OPENMETRICS], ids=["text", "openmetrics"])
def test_each_series_has_the_labels(
    registry: CollectorRegistry, draw: Callable[[CollectorRegistry], bytes]
) -> None:
    page = MetricsPage(registry, "blue", "tiny", lambda: None)
    for _ in range(2):
        found = lines(draw(page).decode())
        assert f'a_total{{{LABELS},worker="w"}} 2.0' in found
        assert f"b{{{LABELS}}} 3.0" in found
        assert found
        assert all(line.count("cluster=") == line.count("model_name=") == 1 for line in found)
    assert registry.get_sample_value("b") == 3.0, "the process itself reads it without them"


def test_exemplars_stay(registry: CollectorRegistry) -> None:
    page = OPENMETRICS(MetricsPage(registry, "blue", "tiny", lambda: None)).decode()
    assert re.search(
        r'^c_bucket{cluster="blue",le="1.0",model_name="tiny"} 1.0 # {trace_id="t"} 0.5',
        page,
        re.MULTILINE,
    )


def test_a_part_of_a_page(registry: CollectorRegistry) -> None:
    part = MetricsPage(registry, "blue", "tiny", lambda: None).restricted_registry(["b", "a_total"])
    assert sorted(lines(generate_latest(part).decode())) == [
        f'a_total{{{LABELS},worker="w"}} 2.0',
        f"b{{{LABELS}}} 3.0",
    ]
