from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.answer import AnswerSoFar, ChoiceSoFar
from tests.chaos.ledger import Ending, Ledger, Phase


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
def test_of_an_answer_that_broke_off_the_beginning_must_be_right(ending: Ending) -> None:
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
