"""Which requests count as poison, how long they are kept out, and how many may be moved."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import PoisonRequest
from router.dispatch import retry_limits
from router.dispatch.retry_limits import PROGRESS_TOKENS, FailedWorkers, Quarantine, RetryBudget


def failed(*places: tuple[str, int]) -> FailedWorkers:
    """Workers that say that they failed, each when the answer had that number of tokens."""
    found = FailedWorkers()
    for worker, place in places:
        found.note(worker, place, proved=True)
    return found


def test_two_workers_at_one_place_are_no_chance() -> None:
    assert not failed(("a", 5)).are_proof
    assert not failed(("a", 5), ("a", 5)).are_proof, "it is the same worker"
    assert failed(("a", 5), ("b", 5 + PROGRESS_TOKENS - 1)).are_proof


def test_a_request_that_continues_after_its_move_has_not_killed() -> None:
    places = [(f"worker-{number}", number * PROGRESS_TOKENS) for number in range(5)]
    assert not failed(*places).are_proof
    assert failed(*places, ("another", 4 * PROGRESS_TOKENS + 1)).are_proof


def test_a_lost_worker_is_evidence_once_it_is_dead() -> None:
    found = failed(("a", 5))
    found.note("b", 5, proved=False)
    assert found.may_be_proof
    found.learn(lambda worker: None)
    assert found.may_be_proof
    assert not found.are_proof
    found.learn(lambda worker: True)
    assert found.are_proof


def test_a_worker_that_speaks_again_is_none() -> None:
    found = failed(("a", 5))
    found.note("b", 5, proved=False)
    found.learn(lambda worker: False)
    assert not found.may_be_proof
    found.note("a", 5, proved=False)
    found.learn(lambda worker: False)
    found.note("b", 5, proved=True)
    assert found.are_proof, "what a worker has said of itself stays"


def left_s(quarantine: Quarantine, prompt: Sequence[int], now: float, salt: bytes = b"") -> float:
    """Seconds for which a prompt is kept out."""
    try:
        quarantine.check(prompt, salt, now)
    except PoisonRequest as error:
        return error.retry_after or 0.0
    return 0.0


def test_a_prompt_is_kept_out_for_a_while() -> None:
    quarantine = Quarantine(60.0)
    one, other = (1, 2, 3), (1, 2)
    assert not quarantine
    quarantine.add(one, b"", 100.0)
    assert quarantine
    assert left_s(quarantine, one, 130.0) == 30.0
    assert left_s(quarantine, other, 130.0) == 0.0
    quarantine.add(one, b"", 140.0)
    assert left_s(quarantine, one, 170.0) == 30.0
    assert left_s(quarantine, one, 200.0) == 0.0
    assert not quarantine


def test_tenants_are_not_kept_out_for_each_other() -> None:
    quarantine = Quarantine(60.0)
    quarantine.add((1, 2, 3), b"one", 0.0)
    assert left_s(quarantine, (1, 2, 3), 1.0, b"one") > 0
    assert left_s(quarantine, (1, 2, 3), 1.0, b"two") == 0


def test_it_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_limits, "_MAX_PROMPTS", 2)
    quarantine = Quarantine(60.0)
    for number in range(3):
        quarantine.add((number,), b"", float(number))
    assert [left_s(quarantine, (n,), 3.0) > 0 for n in range(3)] == [False, True, True]


def test_a_burst_then_a_fraction_of_the_traffic() -> None:
    budget = RetryBudget(0.2, 3, 0.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(5):
        budget.admitted()
    assert [budget.take(9.0) for _ in range(2)] == [True, False]


def test_time_fills_it_up_to_the_burst() -> None:
    budget = RetryBudget(0.0, 2, 0.5)
    assert [budget.take(10.0) for _ in range(3)] == [True, True, False]
    assert not budget.take(11.0)
    assert budget.take(12.0)
    assert [budget.take(1000.0) for _ in range(3)] == [True, True, False]
    assert not budget.take(5.0), "a clock that goes back gives nothing"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.floats(0, 1),
    st.integers(1, 20),
    st.lists(st.one_of(st.just(None), st.floats(0, 5)), max_size=200),
)
def test_never_more_than_was_earned(ratio: float, burst: int, events: list[float | None]) -> None:
    """None is a request, a number the seconds until the next move is wanted."""
    budget = RetryBudget(ratio, burst, 0.1)
    now = taken = requests = 0.0
    for event in events:
        if event is None:
            requests += 1
            budget.admitted()
        else:
            now += event
            taken += budget.take(now)
        assert 0.0 <= budget._level <= burst
    assert taken <= burst + ratio * requests + 0.1 * now + 1e-6
