"""The search for the highest rate that meets."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from loadtest.generator.rate_search import RateSearch

_MAX_TRIES = 40


def run(search: RateSearch, capacity: float) -> list[float]:
    """A server that meets up to ``capacity``. The rates that were tried."""
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        assert len(tried) < _MAX_TRIES
        search.tell(rate, 0.9 if rate <= capacity else 0.89)
    return tried


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.floats(0.01, 0.5))
def test_it_finds_the_capacity(first: float, capacity: float, precision: float) -> None:
    search = RateSearch(first, precision=precision)
    run(search, capacity)
    if capacity < first / 1024:
        assert search.best <= capacity
    else:
        assert search.best <= capacity <= search.best * (1 + precision) * (1 + 1e-9)


def test_the_way_up_and_back() -> None:
    search = RateSearch(1.0, precision=0.1)
    assert run(search, 5.0) == [1, 2, 4, 8, 6, 5, 5.5]
    assert search.best == 5.0


def test_no_rate_above_the_most() -> None:
    search = RateSearch(4.0, max_rate=10.0)
    assert run(search, math.inf) == [4, 8, 10]
    assert search.best == 10
    assert run(RateSearch(40.0, max_rate=10.0), math.inf) == [10]


def test_nothing_meets() -> None:
    search = RateSearch(1.0)
    tried = run(search, 0.0)
    assert search.best == 0.0
    assert tried[-1] >= 1 / 1024
    assert len(tried) == 11


@given(st.lists(st.floats(0, 1), min_size=_MAX_TRIES, max_size=_MAX_TRIES))
def test_whatever_comes_it_ends_below_what_failed(attainments: list[float]) -> None:
    search = RateSearch(1.0, max_rate=64.0)
    met, failed = {0.0}, {math.inf}
    for attainment in attainments:
        rate = search.next_rate()
        if rate is None:
            break
        (met if attainment >= 0.9 else failed).add(rate)
        search.tell(rate, attainment)
    assert search.next_rate() is None
    assert search.best == max(met) < min(failed)
