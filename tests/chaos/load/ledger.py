"""What became of every request: admitted = finished + errors, or something was lost. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.errors import Unavailable, classes_by_code
from tests.chaos.load.answer import AnswerSoFar

_AT_ONCE_S = 5.0
"""Generous: a machine that is busy killing and starting processes is slow to say anything."""
_ERRORS = classes_by_code()


@dataclass(frozen=True, slots=True)
class Phase:
    """The time of one fault, or of several at once, in seconds of the monotonic clock."""

    kinds: tuple[str, ...]
    began: float
    ended: float
    """When the cluster was whole again."""
    struck: float = 0.0
    """When the fault was complete."""
    has_spare: bool = True
    """Whether another process was left that could do the victims' work."""
    may_reset: bool = False
    """Whether connections of clients may have broken by it."""

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
    says_when: bool = True
    """Whether the error said when to come back, where it could."""
    lost: str = ""
    """Why neither an answer nor an error came; empty where one did."""
    reset_at: float | None = None
    """When its connection broke, after which it was tried again; None where that did not happen."""
    hung_up: bool = False
    """Whether the client had enough before the answer had ended."""

    @property
    def is_wrong(self) -> bool:
        """Whether the client got tokens that the undisturbed cluster would not have sent."""
        if self.error or self.lost or self.hung_up:
            return not self.answer.is_beginning_of(self.expected)
        return self.answer != self.expected

    def is_refused_at_once(self, struck: float) -> bool:
        """Whether the error is the expected one while no worker can serve, since ``struck``."""
        kind = _ERRORS.get(self.error)
        waited = self.ended - max(self.began, struck)
        is_known = kind is not None and issubclass(kind, Unavailable)
        return is_known and self.says_when and waited < _AT_ONCE_S


@dataclass(frozen=True, slots=True)
class Counts:
    """The sums of a run."""

    requests: int = 0
    """That wanted their whole answer."""
    finished: int = 0
    errors: int = 0
    errors_single_fault: int = 0
    """Errors with at most one fault at their time, or none at all; except for the next ones."""
    errors_without_spare: int = 0
    """Errors at the time of a fault that leaves no worker to serve: reported at once, and
    when to come back."""
    lost: int = 0
    wrong_tokens: int = 0
    retried: int = 0
    """Whose connection broke, and who asked again."""
    resets_unexplained: int = 0
    """Of those, and of clients that hung up, whose connection broke when no fault that ends routers
    was in flight."""
    hung_up: int = 0
    """Further requests, whose clients disconnected in the middle."""
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
        excused = sum(map(_has_no_spare, failed, phases))
        simultaneous = sum(map(_simultaneous, failed, phases))
        lost = sum(bool(ending.lost) for ending in waited)
        return Counts(
            requests=len(waited),
            finished=len(waited) - len(failed) - lost,
            errors=len(failed),
            errors_single_fault=len(failed) - excused - simultaneous,
            errors_without_spare=excused,
            lost=lost,
            wrong_tokens=sum(ending.is_wrong for ending in self.endings),
            retried=sum(ending.reset_at is not None for ending in waited),
            resets_unexplained=sum(map(self._is_unexplained, self.endings)),
            hung_up=len(self.endings) - len(waited),
            errors_by_fault=dict(sorted(Counter(map(_name, phases)).items())),
        )

    def troubles(self) -> list[Ending]:
        """Those that were lost, wrong, or ended in an error, or that nothing should have reset."""
        return [
            one
            for one in self.endings
            if one.error or one.lost or one.is_wrong or self._is_unexplained(one)
        ]

    def _is_unexplained(self, ending: Ending) -> bool:
        at = ending.reset_at
        return at is not None and not any(
            one.may_reset and one.began <= at <= one.ended for one in self.phases
        )

    def _phases_of(self, ending: Ending) -> list[Phase]:
        return [one for one in self.phases if one.overlaps(ending.began, ending.ended)]


def _has_no_spare(ending: Ending, phases: list[Phase]) -> bool:
    return any(not phase.has_spare and ending.is_refused_at_once(phase.struck) for phase in phases)


def _simultaneous(ending: Ending, phases: list[Phase]) -> bool:
    return not _has_no_spare(ending, phases) and any(len(phase.kinds) > 1 for phase in phases)


def _name(phases: list[Phase]) -> str:
    return " then ".join(" and ".join(phase.kinds) for phase in phases) or "none"
