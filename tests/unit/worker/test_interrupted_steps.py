"""An exception in any call of scheduler or runner ends the sequences of its step, and nothing else.

Where a step is planned not even these. The next step runs, no block is lost, engine and scheduler
know the same sequences, and all other answers are what they would have been.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution import runner
from engine.gpu import runner as gpu_runner
from tests.support.worker.interrupted_worker import (
    VOCAB,
    Faults,
    History,
    Job,
    calls_of,
    run,
    undisturbed,
)

REPEATS = (1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2)
LONG = tuple(n % 11 for n in range(18))
HISTORIES = {
    "choices, a grammar and drafts": History(
        (
            Job(0, LONG[:10], 4, choices=3),
            Job(1, LONG[:10], 3, seed=3),
            Job(1, REPEATS, 5, grammar=True),
            Job(2, (5,), 8, aborted=5),
        ),
        drafts=True,
    ),
    "preemption and tiers": History(
        (
            Job(0, LONG, 12),
            Job(0, LONG[1:10], 12, hand_back=True),
            Job(1, LONG[:9], 9, choices=2),
            Job(12, LONG, 3),
        ),
        blocks=10,
        chunk_tokens=8,
        tiers=True,
    ),
    "overlapping steps": History(
        (
            Job(0, LONG[:10], 6, choices=2),
            Job(1, REPEATS, 8),
            Job(2, LONG[:5], 5, grammar=True),
            Job(3, LONG[:9], 4, seed=5),
        ),
        drafts=True,
        overlaps=True,
    ),
}


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How much is drafted depends on what steps take; and each failure would be logged."""
    clock = itertools.count()
    for module in (runner, gpu_runner):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(history: History, *at: int, error: type[Exception] = MemoryError) -> None:
    """Run a history in which these calls raise, and check what became of it."""
    expected = undisturbed(history)
    world = run(history, Faults(at, error))
    try:
        world.check(expected)
    except AssertionError as failure:
        failure.add_note(f"raised in {world.faults.raised}")
        raise


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_each_function_may_raise(history: History) -> None:
    """The first time that it is called."""
    calls = calls_of(history)
    assert len(set(calls)) > 100
    for at in [calls.index(code) for code in set(calls)]:
        check(history, at)


@pytest.mark.long
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_each_call_may_raise(history: History) -> None:
    for at in range(len(calls_of(history))):
        check(history, at)


JOBS = st.builds(
    Job,
    st.integers(0, 8),
    st.one_of(
        st.sampled_from((REPEATS, LONG[:9], LONG, LONG[1:14])),
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14).map(tuple),
    ),
    st.integers(1, 9),
    choices=st.sampled_from((1, 1, 2, 3)),
    grammar=st.booleans(),
    seed=st.none() | st.integers(0, 3),
    hand_back=st.booleans(),
    aborted=st.none() | st.integers(1, 15),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.builds(
        History,
        st.lists(JOBS, min_size=1, max_size=5).map(tuple),
        blocks=st.integers(10, 20),
        max_sequences=st.integers(1, 4),
        chunk_tokens=st.integers(3, 16),
        drafts=st.booleans(),
        tiers=st.booleans(),
        overlaps=st.booleans(),
    ),
    st.floats(0, 1, exclude_max=True),
    st.none() | st.integers(1, 400),
    st.sampled_from((MemoryError, RuntimeError)),
)
def test_any_call_of_any_history_may_raise(
    history: History, share: float, again: int | None, error: type[Exception]
) -> None:
    """Once or twice: the second time perhaps while the first failure is dealt with."""
    at = int(share * len(calls_of(history)))
    check(history, *(at,) if again is None else (at, at + again), error=error)
