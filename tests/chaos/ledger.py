"""What became of every request: admitted = finished + errors, or something was lost. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.answer import AnswerSoFar


@dataclass(frozen=True, slots=True)
class Phase:
    """The time of one fault, or of several at once, in seconds of the monotonic clock."""

    kinds: tuple[str, ...]
    began: float
    ended: float
    """When the cluster was whole again."""

    def overlaps(self, began: float, ended: float) -> bool:
        """Whether a request of that time has seen some of it."""
        return began < self.ended and self.began < ended


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended, after its retry if it had one."""

    question: str
    way: str
    began: float
    ended: float
    answer: AnswerSoFar
    expected: AnswerSoFar
    error: str = ""
    """The code of a clear error; empty where the answer is whole or the request was lost."""
    text: str = ""
    lost: str = ""
    """Why neither an answer nor an error came; empty where one did."""
    retried: bool = False
    hung_up: bool = False
    """Whether the client had enough before the answer had ended."""

    @property
    def is_wrong(self) -> bool:
        """Whether the client got tokens that the undisturbed cluster would not have sent."""
        if self.error or self.lost or self.hung_up:
            return not self.answer.is_beginning_of(self.expected)
        return self.answer != self.expected


@dataclass(frozen=True, slots=True)
class Counts:
    """The sums of a run."""

    requests: int = 0
    """That wanted their whole answer."""
    finished: int = 0
    errors: int = 0
    errors_single_fault: int = 0
    """Of those, with at most one fault at their time, or none at all."""
    lost: int = 0
    wrong_tokens: int = 0
    retried: int = 0
    """Whose router went, and who were answered by another one."""
    hung_up: int = 0
    """Requests beside these, whose clients hung up in the middle."""
    errors_by_fault: dict[str, int] = field(default_factory=dict)
    """``none`` stands for requests that met no fault."""


class Ledger:
    """Keeps every ending."""

    def __init__(self) -> None:
        self.endings: list[Ending] = []
        self.phases: list[Phase] = []

    def counts(self) -> Counts:
        """The sums so far. Call it when every phase has ended."""
        waited = [ending for ending in self.endings if not ending.hung_up]
        failed = [ending for ending in waited if ending.error]
        phases = [self._phases_of(ending) for ending in failed]
        lost = sum(bool(ending.lost) for ending in waited)
        return Counts(
            requests=len(waited),
            finished=len(waited) - len(failed) - lost,
            errors=len(failed),
            errors_single_fault=sum(not _simultaneous(of_one) for of_one in phases),
            lost=lost,
            wrong_tokens=sum(ending.is_wrong for ending in self.endings),
            retried=sum(ending.retried for ending in waited),
            hung_up=len(self.endings) - len(waited),
            errors_by_fault=dict(sorted(Counter(map(_name, phases)).items())),
        )

    def troubles(self) -> list[Ending]:
        """Those that were lost, wrong, or ended in an error."""
        return [one for one in self.endings if one.error or one.lost or one.is_wrong]

    def _phases_of(self, ending: Ending) -> list[Phase]:
        return [one for one in self.phases if one.overlaps(ending.began, ending.ended)]


def _simultaneous(phases: list[Phase]) -> bool:
    return any(len(phase.kinds) > 1 for phase in phases)


def _name(phases: list[Phase]) -> str:
    return " then ".join(" and ".join(phase.kinds) for phase in phases) or "none"
