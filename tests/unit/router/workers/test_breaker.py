"""Which workers are skipped, and which come back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.workers.breaker import FIRST_PAUSE_S, HALF_LIFE_S, LONGEST_PAUSE_S, TRIAL_S, Breaker


def opened(at: float = 0.0) -> Breaker:
    """One whose worker has broken three streams, the last at ``at``."""
    breaker = Breaker()
    for n in range(3):
        breaker.broke(at - 2.0 + n)
    assert breaker.openings == 1
    return breaker


def test_it_opens_at_the_third_break() -> None:
    breaker = Breaker()
    for now in (1.0, 2.0):
        breaker.broke(now)
        assert breaker.allows(now)
    breaker.broke(3.0)
    assert not breaker.allows(3.0)
    assert not breaker.is_closed(3.0)


def test_a_stream_that_began_before_it_opened_does_not_close_it() -> None:
    breaker = opened(at=10.0)
    breaker.ended_well(9.0, 10.1)
    assert not breaker.is_closed(10.1)
    breaker.ended_well(10.2, 10.3)
    assert breaker.is_closed(10.3)


def test_what_breaks_at_once_is_one_break() -> None:
    breaker = Breaker()
    for n in range(30):
        breaker.broke(5.0 + n / 1000, streams=4)
    assert breaker.allows(5.1)


def test_breaks_are_forgotten() -> None:
    breaker = Breaker()
    for n in range(30):
        breaker.broke(n * 2 * HALF_LIFE_S)
        assert breaker.is_closed(n * 2 * HALF_LIFE_S)


def test_few_among_many_whole_ones_do_not_count() -> None:
    breaker = Breaker()
    for n in range(200):
        now = n / 10
        breaker.ended_well(now - 1.0, now)
        if n % 20 == 0:
            breaker.broke(now)
    assert breaker.openings == 0


def test_one_that_begins_well_and_breaks_is_broken() -> None:
    """All that matters is how a stream ends: nothing tells of its beginning."""
    breaker = Breaker()
    for n in range(3):
        breaker.began(float(n))
        breaker.broke(n + 0.9)
    assert not breaker.allows(3.0)


def test_one_stream_each_pause_tries_it() -> None:
    breaker = opened()
    assert not breaker.allows(FIRST_PAUSE_S - 0.1)
    now = FIRST_PAUSE_S
    assert breaker.allows(now)
    breaker.began(now)
    assert not breaker.allows(now)
    assert breaker.allows(now + FIRST_PAUSE_S), "the client of the first may have left"


def test_a_whole_stream_closes_it() -> None:
    breaker = opened()
    breaker.ended_well(-1.0, 0.5)
    assert not breaker.is_closed(0.5), "it began before"
    breaker.began(FIRST_PAUSE_S)
    breaker.ended_well(FIRST_PAUSE_S, 2.0)
    assert breaker.is_closed(2.0)
    breaker.broke(2.5)
    assert breaker.is_closed(2.5)


def test_without_any_other_worker_all_streams_try_it() -> None:
    """A worker that is asked although its breaker is open proves itself by a whole stream."""
    breaker = opened()
    breaker.began(0.1)
    breaker.ended_well(0.1, 0.2)
    assert breaker.is_closed(0.2)


def test_a_long_stream_closes_it_before_its_end() -> None:
    breaker = opened()
    breaker.began(FIRST_PAUSE_S)
    assert not breaker.is_closed(FIRST_PAUSE_S + TRIAL_S - 0.1)
    assert breaker.is_closed(FIRST_PAUSE_S + TRIAL_S)
    assert breaker.allows(FIRST_PAUSE_S + TRIAL_S)


def test_changes_are_reported_once_each() -> None:
    changes: list[bool] = []
    breaker = Breaker(changes.append)
    for n in range(3):
        breaker.broke(float(n))
    assert changes == [True]
    breaker.began(3.0 + FIRST_PAUSE_S)
    breaker.began(3.5 + FIRST_PAUSE_S)
    assert changes == [True], "its trial may still break"
    breaker.began(3.0 + FIRST_PAUSE_S + TRIAL_S)
    breaker.ended_well(3.0 + FIRST_PAUSE_S, 4.0 + FIRST_PAUSE_S + TRIAL_S)
    assert changes == [True, False]


def test_a_trial_that_breaks_opens_it_for_twice_as_long() -> None:
    breaker, now, pause = opened(), 0.0, FIRST_PAUSE_S
    for _ in range(10):
        now += pause
        assert breaker.allows(now)
        breaker.began(now)
        breaker.broke(now)
        pause = min(LONGEST_PAUSE_S, 2 * pause)
        assert not breaker.allows(now + pause - 0.1)
    assert pause == LONGEST_PAUSE_S


def test_what_ran_when_it_opened_makes_it_no_longer() -> None:
    breaker = opened()
    for n in range(5):
        breaker.broke(0.3 * (n + 1) / 5)
    assert breaker.openings == 1
    assert breaker.allows(FIRST_PAUSE_S)


def test_doubt_opens_only_where_nothing_ends_well() -> None:
    """Handoffs fail between one culprit and each of its peers; the second tries end well."""
    culprit, peer = Breaker(), Breaker()
    for n in range(50):
        now = float(n)
        culprit.broke(now, doubtful=True)
        peer.broke(now, doubtful=True)
        peer.ended_well(now, now + 0.5)
    assert culprit.openings
    assert not peer.openings


@given(st.lists(st.tuples(st.sampled_from("abw"), st.floats(0.0, 30.0)), max_size=60))
def test_it_is_never_shut_for_ever(events: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(), 0.0
    for kind, passed in events:
        now += passed
        if kind == "a" and breaker.allows(now):
            breaker.began(now)
        elif kind == "b":
            breaker.broke(now)
        elif kind == "w":
            breaker.ended_well(now - 0.1, now)
    assert breaker.allows(now + LONGEST_PAUSE_S)
