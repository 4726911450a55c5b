from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.console.rates import CounterWindow, percentiles

SENT, LOST = ("sent",), ("lost",)


def test_growth_over_a_span() -> None:
    window = CounterWindow(60)
    assert window.growth(10) == (0.0, {})
    window.add(100, {SENT: 5})
    assert window.growth(10) == (0.0, {})
    for second in range(1, 31):
        window.add(100 + second, {SENT: 5 + 2 * second})
    assert window.growth(10) == (10.0, {SENT: 20})
    assert window.growth(0) == (1.0, {SENT: 2})
    assert window.growth(1000) == (30.0, {SENT: 60})


def test_samples_older_than_the_span_are_dropped() -> None:
    window = CounterWindow(10)
    for second in range(100):
        window.add(second, {SENT: second})
    assert window.growth(1000) == (10.0, {SENT: 10})
    window.clear()
    assert window.growth(1000) == (0.0, {})


def test_a_restarted_counter_counts_from_zero() -> None:
    window = CounterWindow(60)
    window.add(0, {SENT: 500})
    window.add(1, {SENT: 7, LOST: 2})
    assert window.growth(60) == (1.0, {SENT: 7, LOST: 2})


def test_rates_use_the_real_time_between_snapshots() -> None:
    window = CounterWindow(10)
    window.add(0, {SENT: 0})
    window.add(50, {SENT: 100})
    assert window.growth(10) == (50.0, {SENT: 100})


BOUNDS = (0.01, 0.1, 1.0, 10.0, math.inf)


def histogram(values: list[float]) -> dict[float, float]:
    return {bound: float(sum(value <= bound for value in values)) for bound in BOUNDS}


def test_an_empty_histogram_has_no_percentiles() -> None:
    assert percentiles({}) is None
    assert percentiles(dict.fromkeys(BOUNDS, 0.0)) is None


def test_values_are_spread_evenly_within_a_bucket() -> None:
    found = percentiles({0.01: 0.0, 0.1: 100.0, 1.0: 100.0, 10.0: 100.0, math.inf: 100.0})
    assert found is not None
    assert found.count == 100
    assert found.p50 == pytest.approx(0.055)
    assert found.p99 == pytest.approx(0.0991)


def test_values_beyond_the_last_bound_count_as_that_bound() -> None:
    found = percentiles(histogram([50.0, 60.0]))
    assert found is not None
    assert found.p50 == found.p99 == 10.0


@given(st.lists(st.floats(0, 9.9), min_size=1, max_size=50))
def test_percentiles_lie_in_the_bucket_of_the_true_value(values: list[float]) -> None:
    found = percentiles(histogram(values))
    assert found is not None
    assert found.p50 <= found.p95 <= found.p99
    for told, share in ((found.p50, 0.5), (found.p95, 0.95), (found.p99, 0.99)):
        true = np.percentile(values, share * 100, method="inverted_cdf")
        upper = min(bound for bound in BOUNDS if true <= bound)
        lower = max([bound for bound in BOUNDS if bound < upper], default=0.0)
        assert lower <= told <= upper
