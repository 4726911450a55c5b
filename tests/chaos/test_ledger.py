from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.load.answer import AnswerSoFar, ChoiceSoFar
from tests.chaos.load.ledger import Ending, Ledger, Phase


def answer(*tokens: int, ended: bool = True, text: str = "") -> AnswerSoFar:
    return AnswerSoFar([ChoiceSoFar(list(tokens), text, "", "length" if ended else "")])


WHOLE = answer(1, 2, 3)
FINISHED = Ending("greedy", "http", 10.0, 12.0, WHOLE, WHOLE)
FAILED = replace(FINISHED, answer=answer(1, 2, ended=False), error="worker_failed")
LOST = replace(FINISHED, answer=answer(1, ended=False), lost="no_end")


def counts_of(*endings: Ending, phases: tuple[Phase, ...] = ()) -> tuple[int, ...]:
    ledger = Ledger()
    ledger.endings += endings
    ledger.phases += phases
    counts = ledger.counts()
    assert counts.requests == counts.finished + counts.errors + counts.lost
    return counts.finished, counts.errors, counts.lost, counts.wrong_tokens


def test_what_was_admitted_has_finished_or_failed_or_is_lost() -> None:
    assert counts_of() == (0, 0, 0, 0)
    assert counts_of(FINISHED, FINISHED, FAILED, LOST) == (2, 1, 1, 0)


@pytest.mark.parametrize(
    "got",
    [
        answer(1, 2, 2, 3),
        answer(1, 2),
        answer(1, 3),
        answer(1, 2, 3, text="more"),
        answer(1, 2, 3, ended=False),
    ],
    ids=["duplicate", "short", "gap", "text", "no end"],
)
def test_an_answer_that_is_not_the_reference_is_wrong(got: AnswerSoFar) -> None:
    assert counts_of(replace(FINISHED, answer=got)) == (1, 0, 0, 1)


@pytest.mark.parametrize("ending", [FAILED, LOST], ids=["failed", "lost"])
def test_the_beginning_of_an_interrupted_answer_must_be_right(ending: Ending) -> None:
    assert not ending.is_wrong
    for got in (answer(2, ended=False), answer(1, 1, ended=False), answer(1, 2, 3, 4, ended=False)):
        assert replace(ending, answer=got).is_wrong


def test_who_hangs_up_is_counted_apart() -> None:
    left = replace(FINISHED, answer=answer(1, 2, ended=False), hung_up=True)
    assert counts_of(FINISHED, left, replace(left, error="worker_failed")) == (1, 0, 0, 0)
    assert counts_of(replace(left, answer=answer(2, ended=False))) == (0, 0, 0, 1)


def test_errors_of_several_faults_at_once_are_counted_apart() -> None:
    single = Phase(("decode killed",), 11.0, 15.0)
    double = Phase(("store full", "decode killed"), 11.5, 15.0)
    elsewhere = Phase(("a", "b"), 13.0, 15.0)
    ledger = Ledger()
    ledger.endings.append(FAILED)
    for phases, count, name in (
        ([], 1, "none"),
        ([single], 1, "decode killed"),
        ([double], 0, "store full and decode killed"),
        ([single, double], 0, "decode killed then store full and decode killed"),
        ([elsewhere], 1, "none"),
    ):
        ledger.phases = phases
        counts = ledger.counts()
        assert counts.errors == 1
        assert counts.errors_single_fault == count
        assert counts.errors_by_fault == {name: 1}


ROUTER = Phase(("router killed",), 9.0, 20.0, may_reset=True)


@pytest.mark.parametrize(
    ("phases", "reset_at", "is_explained"),
    [
        ((ROUTER,), 11.0, True),
        ((ROUTER,), 8.9, False),
        ((ROUTER,), 20.1, False),
        ((Phase(("decode killed",), 9.0, 20.0),), 11.0, False),
        ((Phase(("decode killed",), 9.0, 10.0), ROUTER), 11.0, True),
        ((), 11.0, False),
    ],
    ids=["router", "before", "after", "worker", "one of two", "no fault"],
)
@pytest.mark.parametrize("hung_up", [False, True])
def test_a_reset_needs_a_fault_that_ends_a_router(
    phases: tuple[Phase, ...], reset_at: float, is_explained: bool, hung_up: bool
) -> None:
    ledger = Ledger()
    reset = replace(FINISHED, reset_at=reset_at, hung_up=hung_up)
    ledger.endings += [FINISHED, reset]
    ledger.phases += phases
    counts = ledger.counts()
    assert counts.retried == (not hung_up)
    assert counts.resets_unexplained == (not is_explained)
    assert ledger.troubles() == ([] if is_explained else [reset])


GONE = Phase(("decode pool gone",), 9.0, 20.0, struck=10.0, has_spare=False)
REFUSED = replace(FAILED, began=11.0, ended=11.1, answer=answer(ended=False), error="unavailable")


@pytest.mark.parametrize(
    ("ending", "is_right"),
    [
        (REFUSED, True),
        (replace(FAILED, began=9.5, ended=10.2), True),
        # No worker can serve: then no request may wait, nor lack a Retry-After.
        (replace(REFUSED, ended=18.0), False),
        (replace(REFUSED, says_when=False), False),
        (replace(REFUSED, error="internal_error"), False),
        (replace(REFUSED, error="poison_request"), False),
        (replace(REFUSED, began=20.5, ended=20.6), False),
    ],
    ids=["refused", "broken off", "late", "without a time", "not clear", "poison", "afterwards"],
)
def test_without_workers_left_requests_are_refused_at_once(ending: Ending, is_right: bool) -> None:
    ledger = Ledger()
    ledger.endings += [FINISHED, ending]
    ledger.phases.append(GONE)
    counts = ledger.counts()
    assert (counts.requests, counts.errors) == (2, 1)
    assert counts.errors_without_spare == is_right
    assert counts.errors_single_fault == (not is_right)


def test_an_error_is_counted_apart_once() -> None:
    ledger = Ledger()
    ledger.endings += [REFUSED, replace(REFUSED, ended=18.0)]
    ledger.phases.append(replace(GONE, kinds=("store full", "decode pool gone")))
    counts = ledger.counts()
    assert (counts.errors, counts.errors_without_spare, counts.errors_single_fault) == (2, 1, 0)
