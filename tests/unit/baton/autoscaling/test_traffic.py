"""What came between two looks, whatever routers come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.autoscaling.traffic import (
    GONE_S,
    SILENT_S,
    TIGHT_SHARE,
    RouterTraffic,
    TrafficCounts,
    TrafficTracker,
)


def told(beat: int, requests: float) -> RouterTraffic:
    return RouterTraffic(beat, TrafficCounts(requests=requests, input_tokens=10 * requests))


def test_a_request_is_judged_by_its_slos() -> None:
    counts = TrafficCounts()
    for ttft_s in (0.4, 0.6, 1.1):
        counts.judge_first_token(ttft_s, 1.0)
    for tpot_s in (0.04, 0.06, 0.11, 0.2):
        counts.judge_answer(tpot_s, 0.1)
    assert (counts.first_tokens, counts.tight_first_tokens, counts.late_first_tokens) == (3, 2, 1)
    assert (counts.answers, counts.tight_answers, counts.slow_answers) == (4, 3, 2)
    assert TIGHT_SHARE == 0.5


def test_the_routers_are_summed_and_a_new_one_counts_from_the_next_look() -> None:
    flow = TrafficTracker()
    assert flow.look({"a": told(1, 100)}, 0.0) is None
    seen = flow.look({"a": told(2, 104), "b": told(1, 50)}, 2.0)
    assert seen is not None
    assert (seen.seconds, seen.counts.requests, seen.counts.input_tokens) == (2.0, 4, 40)
    seen = flow.look({"a": told(3, 105), "b": told(2, 53)}, 3.0)
    assert seen is not None
    assert seen.counts.requests == 4


def test_a_router_that_was_started_again_is_another_one_and_nothing_goes_back() -> None:
    flow = TrafficTracker()
    flow.look({"a": told(1, 100), "b": told(1, 10)}, 0.0)
    seen = flow.look({"a:again": told(1, 3), "b": told(2, 12)}, 1.0)
    assert seen is not None
    assert seen.counts.requests == 2


def test_while_a_router_is_silent_nothing_is_known_until_it_is_gone() -> None:
    flow = TrafficTracker()
    flow.look({"a": told(1, 0), "b": told(1, 0)}, 0.0)
    assert flow.look({"a": told(2, 1), "b": told(1, 0)}, SILENT_S - 1) is not None
    now = SILENT_S
    beat = 2
    while now < GONE_S:
        beat += 1
        assert flow.look({"a": told(beat, beat), "b": told(1, 0)}, now) is None
        assert flow.gone(now) == []
        now += 1.0
    assert flow.gone(now) == ["b"]
    seen = flow.look({"a": told(beat + 1, beat + 1)}, now)
    assert seen is not None
    assert seen.counts.requests == 1


def test_without_a_router_nothing_is_known() -> None:
    flow = TrafficTracker()
    assert flow.look({}, 0.0) is None
    assert flow.look({}, 1.0) is None
    assert flow.look({"a": told(1, 7)}, 2.0) is None
    assert flow.look({"a": told(2, 7)}, 3.0) is not None
    assert flow.look({"a": told(3, 7)}, 3.0) is None, "no time has passed"


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 5), min_size=1),
        min_size=1,
        max_size=20,
    )
)
def test_every_request_counts_once_at_most(looks: list[dict[str, int]]) -> None:
    """A look has what came to each router that was there; one that goes comes back as another."""
    flow, lives, totals = TrafficTracker(), dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    came, seen = 0, 0.0
    before: set[str] = set()
    for beat, added in enumerate(looks, start=1):
        board = {}
        for name, requests in added.items():
            if name not in before:
                lives[name] += 1
                totals[name] = 0
            totals[name] += requests
            came += requests
            board[f"{name}:{lives[name]}"] = told(beat, totals[name])
        before = set(added)
        traffic = flow.look(board, float(beat))
        if traffic is not None:
            assert min(getattr(traffic.counts, name) for name in ("requests", "shed")) >= 0
            seen += traffic.counts.requests
    assert seen <= came
