"""The rate of a moment later."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.autoscaling.needs import RateForecast

rates = st.floats(0, 1e6)


@given(rates, st.floats(0.1, 100))
def test_a_steady_rate_stays(rate: float, seconds: float) -> None:
    forecast = RateForecast(20.0)
    assert forecast.ahead(10) == 0
    for _ in range(30):
        forecast.add(rate, seconds)
    assert forecast.ahead(10) == pytest.approx(rate)


def test_a_rise_goes_on_for_a_moment_and_a_jump_does_not() -> None:
    rising, jumped = RateForecast(15.0), RateForecast(15.0)
    for look in range(20):
        rising.add(10.0 * look, 10.0)
        jumped.add(100.0 if look else 0.0, 10.0)
        assert jumped.ahead(10.0) <= 118
    assert rising.ahead(10.0) > 190
    assert jumped.ahead(10.0) == pytest.approx(100, abs=1)


def test_a_fall_is_not_foreseen() -> None:
    forecast = RateForecast(15.0)
    forecast.add(100.0, 10.0)
    levels = []
    for _ in range(40):
        forecast.add(0.0, 10.0)
        levels.append(forecast.ahead(10.0))
        assert forecast.ahead(100.0) == pytest.approx(forecast.ahead(0.0), abs=0.1)
    assert levels[0] > 40
    assert levels[-1] < 0.1


@settings(max_examples=50)
@given(st.lists(st.tuples(rates, st.floats(0.1, 100)), min_size=1, max_size=30))
def test_it_is_never_below_nothing_nor_far_beyond_what_was_seen(
    readings: list[tuple[float, float]],
) -> None:
    forecast = RateForecast(15.0)
    for rate, seconds in readings:
        forecast.add(rate, seconds)
        most = max(one for one, _ in readings)
        assert 0 <= forecast.ahead(10.0) <= 2 * most + 1e-6
