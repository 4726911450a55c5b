"""How long a unit of work takes, as learned."""

from __future__ import annotations

import pytest

from worker.costs.step_costs import UnitCost


def test_it_starts_with_its_settings() -> None:
    assert UnitCost(0.25, 8).unit_s == 0.25


def test_it_follows_what_it_sees() -> None:
    pace = UnitCost(1.0, 10)
    for _ in range(50):
        pace.observe(100, 2.0)
    assert pace.unit_s == pytest.approx(0.02, rel=0.01)
    for _ in range(50):
        pace.observe(100, 30.0)
    assert pace.unit_s == pytest.approx(0.3, rel=0.01)


def test_large_observations_count_more() -> None:
    small, large = UnitCost(1.0, 100), UnitCost(1.0, 100)
    small.observe(1, 2.0)
    large.observe(1000, 2000.0)
    assert 1.0 < small.unit_s < 1.1
    assert large.unit_s > 1.9


@pytest.mark.parametrize(("units", "seconds"), [(0, 1.0), (1, 0.0), (5, -1.0)])
def test_what_says_nothing_changes_nothing(units: float, seconds: float) -> None:
    pace = UnitCost(1.0, 10)
    pace.observe(units, seconds)
    assert pace.unit_s == 1.0
