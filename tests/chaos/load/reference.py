"""The right answers: those of the cluster before anything was done to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.chaos.load.answer import AnswerSoFar
from tests.chaos.load.call import Call, Fronts
from tests.chaos.load.questions import WAYS, Question, Way

Reference = Mapping[tuple[str, Way], AnswerSoFar]
"""By a question's name and the way it was asked: finish reasons have other names over gRPC."""


class Unsteady(Exception):
    """The undisturbed cluster fails, or answers one question in two ways: nothing can be judged."""


async def take_reference(fronts: Fronts, questions: Sequence[Question]) -> Reference:
    """Each question is asked alone, over both ways, which must agree. Raises Unsteady."""
    answers: dict[tuple[str, Way], AnswerSoFar] = {}
    for question in questions:
        for way in WAYS:
            answers[question.name, way] = await _ask(fronts, Call.of(question, way))
        first, second = (answers[question.name, way] for way in WAYS)
        if not (first.is_beginning_of(second) and second.is_beginning_of(first)):
            raise Unsteady(f"{question.name}: one way has {first}, the other {second}")
    return answers


async def _ask(fronts: Fronts, call: Call) -> AnswerSoFar:
    await call.run(fronts)
    if call.error:
        raise Unsteady(f"{call.question.name} over {call.way}: {call.error}: {call.error_text}")
    return call.answer
