"""Admission: a bound on those that wait, and a guess of how long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Overloaded
from router.admission import Admission


def test_no_more_than_the_limit_wait() -> None:
    admission = Admission(2)
    admission.admit("a", 0.0)
    admission.admit("b", 0.0)
    with pytest.raises(Overloaded, match="2 requests wait already") as caught:
        admission.admit("c", 0.0)
    assert caught.value.retry_after == 1.0
    admission.first_token("a", 0.5)
    admission.admit("c", 1.0)
    assert admission.waiting == 2


def test_one_that_leaves_without_a_token_makes_room() -> None:
    admission = Admission(1)
    admission.admit("a", 0.0)
    admission.left("a")
    admission.left("a")
    admission.admit("b", 0.0)
    admission.first_token("a", 9.0)
    assert admission.waiting == 1


def test_the_retry_time_follows_the_waits() -> None:
    admission = Admission(1)
    for turn in range(60):
        admission.admit("a", 100.0 * turn)
        admission.first_token("a", 100.0 * turn + 20.0)
        admission.first_token("a", 100.0 * turn + 90.0)
    admission.admit("a", 0.0)
    with pytest.raises(Overloaded) as caught:
        admission.admit("b", 0.0)
    assert caught.value.retry_after == pytest.approx(20.0, rel=0.01)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(("admit", "token", "left")), st.integers(0, 5))),
)
def test_it_counts_right(limit: int, calls: list[tuple[str, int]]) -> None:
    admission, waiting = Admission(limit), set[int]()
    for now, (call, request) in enumerate(calls):
        if call == "admit" and request not in waiting:
            if len(waiting) == limit:
                with pytest.raises(Overloaded):
                    admission.admit(request, float(now))
            else:
                admission.admit(request, float(now))
                waiting.add(request)
        elif call == "token":
            admission.first_token(request, float(now))
            waiting.discard(request)
        elif call == "left":
            admission.left(request)
            waiting.discard(request)
        assert admission.waiting == len(waiting)
