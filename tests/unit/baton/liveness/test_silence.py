"""Which peers are taken to be silent, by a listener that may be held up itself."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from baton.liveness.silence import SilenceWatch

LIMIT_S = 3.0
PAUSES = st.lists(
    st.one_of(st.floats(0.01, 0.5), st.floats(0.5, 2 * LIMIT_S), st.floats(10.0, 3600.0)),
    min_size=1,
    max_size=60,
)
"""Seconds between two ticks: mostly as it should be, now and then after a pause of any length."""


def ticks(watch: SilenceWatch[str], signs: dict[str, int], start: float, count: int) -> list[str]:
    return [name for n in range(count) for name in watch.tick(signs, start + n * 0.1)]


def test_silence_counts_from_when_a_peer_was_expected_to_speak() -> None:
    watch = SilenceWatch[str](1.0)
    assert ticks(watch, {}, 0.0, 50) == []
    assert ticks(watch, {"a": 3}, 5.0, 10) == []
    assert ticks(watch, {"a": 3}, 6.0, 3) == ["a"]


def test_a_sign_ends_it() -> None:
    watch = SilenceWatch[str](1.0)
    for number in range(20):
        assert ticks(watch, {"a": number}, float(number), 9) == []


def test_a_peer_that_stays_silent_is_found_again() -> None:
    watch = SilenceWatch[str](1.0)
    assert ticks(watch, {"a": 1, "b": 1}, 0.0, 35) == ["a", "b"] * 3
    assert watch.is_silent("a")
    watch.tick({"a": 2, "b": 1}, 3.5)
    assert not watch.is_silent("a")
    assert watch.is_silent("b")


def test_a_clock_that_goes_back_adds_nothing() -> None:
    watch = SilenceWatch[str](0.5)
    for now in (10.0, 5.0, 1.0, 0.5):
        assert watch.tick({"a": 1}, now) == []


def test_a_listener_that_was_held_up_grants_another_period() -> None:
    watch = SilenceWatch[str](1.0)
    assert ticks(watch, {"a": 1}, 0.0, 10) == []
    assert watch.tick({"a": 1}, 100.0) == []
    assert ticks(watch, {"a": 1}, 100.1, 9) == [], "another whole period"
    assert ticks(watch, {"a": 1}, 101.0, 5) == ["a"]


@given(PAUSES, st.lists(st.floats(0.0, 1.0), min_size=1))
def test_a_peer_that_speaks_within_each_period_is_never_found(
    gaps: list[float], moments: list[float]
) -> None:
    """However long the listener is paused: what comes in a gap is read before the next but one."""
    watch = SilenceWatch[str](LIMIT_S)
    now = listened = spoke = 0.0
    heard = waiting = 0
    watch.tick({"peer": 0}, now)
    for number, gap in enumerate(gaps):
        # The peer speaks in time, by the listener's own: the latest that it may.
        counted = min(gap, LIMIT_S / 3)
        if listened + counted - spoke >= LIMIT_S * 0.99:
            moment = moments[number % len(moments)] * counted
            spoke = min(listened + moment, spoke + LIMIT_S * 0.99)
            waiting += 1
        now, listened = now + gap, listened + counted
        assert watch.tick({"peer": heard}, now) == []
        # The loop reads what came before this tick, and may not have read the latest.
        heard, waiting = heard + waiting, 0


@given(PAUSES.filter(lambda gaps: len(gaps) > 2))
def test_a_silent_peer_is_found_within_a_bounded_number_of_ticks(gaps: list[float]) -> None:
    """Also by a listener that is held up again and again."""
    watch = SilenceWatch[str](LIMIT_S)
    now, found_after = 0.0, None
    watch.tick({"peer": 0}, now)
    least = min(*gaps, LIMIT_S / 3)
    bound = 2 * math.ceil(LIMIT_S / least) + 3
    for number in range(bound):
        now += gaps[number % len(gaps)]
        if watch.tick({"peer": 0}, now):
            found_after = number
            break
    assert found_after is not None
    assert watch.is_silent("peer")
