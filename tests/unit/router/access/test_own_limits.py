"""A router's own count of API keys' limits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.access import KeyConfig
from router.access.own_limits import MINUTE_S, OwnLimits


def key(**limits: int) -> KeyConfig:
    return KeyConfig.model_validate({"name": "k", "sha256": "0" * 64, "tenant": "t", **limits})


def charge(
    own: OwnLimits, limited: KeyConfig, entry: str, now: float, tokens: int = 0, *, on: bool = True
) -> list[int]:
    return own.charge(limited, entry, tokens, now, enforced=on)


def test_a_whole_minutes_worth_may_be_used_at_once_and_refills_steadily() -> None:
    own, limited = OwnLimits(), key(requests_per_minute=6)
    for number in range(6):
        assert charge(own, limited, str(number), 0.0)[:3] == [0, 0, 5 - number]
    assert charge(own, limited, "7", 0.0)[:4] == [1, 10_000_000, 0, 60_000_000]
    assert charge(own, limited, "7", 9.9)[0] == 1
    assert charge(own, limited, "7", 10.0)[0] == 0


def test_tokens_are_charged_in_advance_and_then_as_the_answer_was() -> None:
    own, limited = OwnLimits(), key(tokens_per_minute=100)
    charge(own, limited, "a", 0.0)
    assert charge(own, limited, "a", 0.0, 80)[4] == 20
    # Charged once, however often it is asked.
    assert charge(own, limited, "a", 0.0, 80)[4] == 20
    charge(own, limited, "b", 0.0)
    assert charge(own, limited, "b", 0.0, 30)[:2] == [2, 6_000_000]
    own.leave(limited, "a", 10, 0.0)
    assert charge(own, limited, "b", 0.0, 30)[:5:4] == [0, 60]


def test_requests_at_a_time_leave_their_places() -> None:
    own, limited = OwnLimits(), key(concurrency=1)
    assert charge(own, limited, "a", 0.0)[0] == 0
    assert charge(own, limited, "b", 0.0)[0] == 3
    own.leave(limited, "b", 0, 0.0)
    assert charge(own, limited, "b", 0.0)[0] == 3
    own.leave(limited, "a", 0, 0.0)
    assert charge(own, limited, "b", 0.0)[0] == 0


def test_what_redis_has_admitted_is_counted_and_never_refused() -> None:
    own, limited = OwnLimits(), key(requests_per_minute=1, concurrency=1)
    for number in range(3):
        assert charge(own, limited, str(number), 0.0, on=False)[0] == 0
    assert charge(own, limited, "4", 100.0)[0] == 1


def test_a_key_that_was_idle_for_long_costs_no_memory() -> None:
    own, limited = OwnLimits(), key(requests_per_minute=60)
    charge(own, limited, "a", 0.0)
    own.leave(limited, "a", 0, 30.0)
    assert not own._counts


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans()), min_size=1, max_size=60),
)
def test_no_minute_admits_more_than_what_was_left_and_what_refills(
    limit: int, steps: list[tuple[float, bool]]
) -> None:
    own, limited = OwnLimits(), key(requests_per_minute=limit)
    now, admitted = 0.0, list[float]()
    for number, (pause, ends) in enumerate(steps):
        now += pause
        if charge(own, limited, str(number), now)[0] == 0:
            admitted.append(now)
        if ends:
            own.leave(limited, str(number), 0, now)
    for begin in admitted:
        count = sum(begin <= at < begin + MINUTE_S for at in admitted)
        assert count <= 2 * limit
    assert len(admitted) <= limit * (1 + now / MINUTE_S) + 1e-6
