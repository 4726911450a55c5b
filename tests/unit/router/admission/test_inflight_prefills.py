"""When a prefill worker is free, behind what lies at the workers and what waits."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.capacity import Capacity
from router.admission.inflight_prefills import InflightPrefills


def capacity(workers: int) -> Capacity:
    return Capacity(16, workers, 0, 64, (4000,), (4000,))


def served_by(workers: int) -> InflightPrefills:
    prefills = InflightPrefills()
    prefills.look(capacity(workers), 0.0)
    return prefills


def test_an_idle_worker_takes_a_prompt_at_once() -> None:
    prefills = served_by(2)
    assert prefills.free_after_s((), 0.0) == 0
    prefills.sent("long", 5000, 5.0, 0.0)
    assert prefills.free_after_s((), 0.0) == 0
    prefills.sent("short", 1000, 1.0, 0.0)
    assert prefills.free_after_s((), 0.0) == pytest.approx(1.0)
    # The short one's worker takes up what waits, one prompt after another.
    assert prefills.free_after_s((1.0, 1.0), 0.0) == pytest.approx(3.0)
    assert prefills.free_after_s((6.0,), 0.0) == pytest.approx(5.0)


def test_each_counts_from_when_a_worker_took_it_up() -> None:
    prefills = served_by(2)
    for name in ("a", "b", "c"):
        prefills.sent(name, 3000, 3.0, 0.0)
    assert (prefills.tokens, prefills.work_s) == (9000, 9.0)
    assert prefills.free_after_s((), 2.0) == pytest.approx(1.0)
    prefills.finished("a", 3.0)
    # What was done of b does not count as undone because a has ended.
    assert prefills.free_after_s((), 3.0) == pytest.approx(0.0)
    prefills.finished("b", 3.0)
    prefills.sent("d", 1000, 1.0, 4.0)
    assert prefills.free_after_s((), 4.0) == pytest.approx(1.0)
    prefills.finished("c", 4.0)
    prefills.finished("d", 4.0)
    assert prefills.tokens == prefills.work_s == len(prefills.prompts) == 0


def test_one_that_hangs_is_not_done_with_what_lies_behind_it() -> None:
    prefills = served_by(1)
    prefills.sent("hangs", 1000, 1.0, 0.0)
    prefills.sent("behind", 500, 0.5, 0.0)
    assert prefills.free_after_s((), 1e6) == pytest.approx(0.5)


def test_a_worker_that_comes_takes_up_what_lies_there() -> None:
    prefills = served_by(1)
    for name in ("a", "b"):
        prefills.sent(name, 1000, 1.0, 0.0)
    prefills.look(capacity(2), 1.0)
    assert prefills.free_after_s((2.0,), 1.5) == pytest.approx(0.5)
    prefills.look(capacity(0), 2.0)
    assert prefills.own_s(1.0) == 1.0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.lists(st.integers(1, 3000), max_size=20), st.floats(0.0, 3.0))
def test_it_is_what_workers_do_that_take_prompts_in_turn(
    workers: int, prompts: list[int], later_s: float
) -> None:
    prefills = served_by(workers)
    ends: list[tuple[float, str]] = []
    free_at = [0.0] * workers
    for number, tokens in enumerate(prompts):
        prefills.sent(f"r{number}", tokens, tokens / 1e3, 0.0)
        end = heapq.heappop(free_at) + tokens / 1e3
        heapq.heappush(free_at, end)
        ends.append((end, f"r{number}"))
    for end, name in sorted(ends):
        if end <= later_s:
            prefills.finished(name, end)
    truly = max(0.0, free_at[0] - later_s)
    assert prefills.free_after_s((), later_s) == pytest.approx(truly, abs=1e-9)
