"""Arrivals of an open loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from loadtest.generator.workload.arrival_process import ArrivalProcess, Kind

KINDS: tuple[Kind, ...] = ("poisson", "gamma", "constant", "ramp")


@given(
    st.sampled_from(KINDS),
    st.floats(0.1, 200),
    st.floats(0.1, 10),
    st.floats(0, 50),
    st.floats(0.1, 20),
    st.integers(0, 1000),
)
def test_times_rise_within_the_run(
    kind: Kind, rate: float, burstiness: float, first: float, seconds: float, seed: int
) -> None:
    process = ArrivalProcess(kind, rate, burstiness, first)
    times = process.times(seconds, np.random.default_rng(seed))
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < seconds))
    again = process.times(seconds, np.random.default_rng(seed))
    assert np.array_equal(times, again)


def test_a_constant_process_is_even() -> None:
    times = ArrivalProcess("constant", 4.0).times(2.0, np.random.default_rng(1))
    assert times.tolist() == [0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


@pytest.mark.parametrize(
    ("kind", "burstiness", "variation"),
    [("poisson", 7.0, 1.0), ("gamma", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)],
)
def test_gaps_have_their_mean_and_variation(
    kind: Kind, burstiness: float, variation: float
) -> None:
    times = ArrivalProcess(kind, 50.0, burstiness).times(1000.0, np.random.default_rng(5))
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(variation, rel=0.05)


@pytest.mark.parametrize(("first", "last"), [(0.0, 100.0), (20.0, 100.0), (100.0, 20.0), (9, 9)])
def test_a_ramps_rate_changes_linearly(first: float, last: float) -> None:
    seconds = 400.0
    process = ArrivalProcess("ramp", last, first_rate=first)
    times = process.times(seconds, np.random.default_rng(3))
    found, _ = np.histogram(times, 4, (0, seconds))
    middles = (np.arange(4) + 0.5) / 4
    expected = (first + (last - first) * middles) * seconds / 4
    # Four standard deviations of a Poisson count.
    assert np.all(np.abs(found - expected) < 4 * np.sqrt(expected))


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        (("poisson", 0.0), "rate"),
        (("poisson", float("inf")), "rate"),
        (("gamma", 1.0, 0.0), "burstiness"),
        (("ramp", 1.0, 1.0, -1.0), "ramp"),
    ],
)
def test_what_is_no_process(given_: tuple[Kind, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ArrivalProcess(*given_)
