"""The busiest part of a trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.common.traces import Trace, TracedRequest
from planning.planner.traffic import busiest, whole


def _trace(times: list[float]) -> Trace:
    return Trace(tuple(TracedRequest(at_s, 100, 10) for at_s in times), 32)


def test_the_busiest_part_has_a_lead() -> None:
    quiet = [float(n) for n in range(100)]
    busy = [60 + n / 10 for n in range(1, 100)]
    part = busiest(_trace(sorted(quiet + busy)), 10.0)
    assert part.counted[0].arrival_s == part.counted_from_s == pytest.approx(5.0)
    assert len(part.counted) >= 109
    assert part.span_s == pytest.approx(10.0, abs=0.2)
    assert part.requests[0].arrival_s == 0.0
    assert len(part.requests) - len(part.counted) == 5


def test_the_part_may_be_at_the_beginning() -> None:
    part = busiest(_trace([0.0, 0.1, 0.2, 5.0, 10.0]), 1.0)
    assert part.counted_from_s == 0.0
    assert len(part.requests) == len(part.counted) == 3


def test_long_answers_weigh_as_much_as_long_prompts() -> None:
    prompts = [TracedRequest(float(n), 1000, 1) for n in range(10)]
    answers = [TracedRequest(100.0 + n / 10, 1, 100) for n in range(10)]
    part = busiest(Trace((*prompts, *answers)), 5.0)
    assert {one.output_tokens for one in part.counted} == {100}


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.sampled_from([0.0, 3.0, 200.0]))
def test_it_is_never_empty(times: list[float], seconds: float) -> None:
    ordered = sorted(times)
    trace = _trace([one - ordered[0] for one in ordered])
    part = busiest(trace, seconds)
    assert part.counted
    assert part.span_s <= max(seconds, trace.span_s)
    if seconds == 0.0 or seconds >= trace.span_s:
        assert part == whole(trace)


def test_twice_the_rate() -> None:
    part = busiest(_trace([float(n) for n in range(40)]), 10.0)
    twice = part.faster(2.0)
    assert len(twice.counted) == len(part.counted)
    assert twice.span_s == pytest.approx(part.span_s / 2)
