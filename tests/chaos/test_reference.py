"""Which answer is the right one, where a cluster may serve several fingerprints."""

from __future__ import annotations

import pytest

from tests.chaos.load.answer import AnswerSoFar, ChoiceSoFar
from tests.chaos.load.call import Call
from tests.chaos.load.questions import questions
from tests.chaos.load.reference import Reference

QUESTION = questions(0)[0]


def answer(*tokens: int, ended: bool = True) -> AnswerSoFar:
    return AnswerSoFar([ChoiceSoFar(list(tokens), finish_reason="length" if ended else "")])


FIRST, SECOND = answer(1, 2, 3), answer(1, 5, 6)
ASKED = QUESTION.name, "http"
REFERENCE = Reference({"a": {ASKED: FIRST}, "b": {ASKED: SECOND}})  # type: ignore[dict-item]


def call(got: AnswerSoFar, fingerprint: str = "") -> Call:
    got.fingerprint = fingerprint
    return Call(QUESTION, "http", got)


@pytest.mark.parametrize(("name", "expected"), [("a", FIRST), ("b", SECOND)])
def test_an_answer_must_be_that_of_the_fingerprint_it_names(
    name: str, expected: AnswerSoFar
) -> None:
    assert REFERENCE.expected(call(answer(1, 2, 3), name)) is expected


@pytest.mark.parametrize("name", ["", "c", "a and b"])
def test_an_answer_that_names_no_known_fingerprint_is_never_right(name: str) -> None:
    got = call(answer(1, 2, 3), name)
    assert REFERENCE.expected(got) != got.answer


def test_an_answer_whose_pieces_name_two_fingerprints_names_both() -> None:
    got = call(answer(1))
    for name in (None, "a", "a", "b"):
        got._name(name)
    assert got.answer.fingerprint == "a and b"
