"""What a step takes by how many sequences decode in it and how many drafted tokens it checks.

Learned from the steps themselves: a step of few rows is bound by memory, one of many by arithmetic,
and where the one becomes the other, and by what jumps, is the model's and the machine's own affair.
Plain Python: seconds in, seconds out.
"""

from __future__ import annotations

from dataclasses import dataclass

_RATE = 0.15
"""What a new step counts for beside those before it."""
_MOST = 2.0
"""A step that took more than this many times what was expected was held up: it counts so."""
_ROW_SHARE = 0.03
"""What a drafted token is taken to cost before it was tried: this part of the step without drafts.
Little, so that it is tried."""
_KEPT_STEPS = 2000
"""An estimate that no step has confirmed for so long is forgotten, so that it is tried again."""
_EXACT = 16
"""Up to so many, counts are told apart; above by fours."""


@dataclass(slots=True)
class _Estimate:
    seconds: float
    step: int


class DraftCosts:
    """See the module's text. Owned by the engine thread."""

    def __init__(self) -> None:
        self._found: dict[int, dict[int, _Estimate]] = {}
        self._step = 0

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """A step of ``batch`` sequences with ``drafted`` tokens of drafts took so long."""
        self._step += 1
        known = self._found.setdefault(_rounded(batch), {})
        estimate = known.get(_rounded(drafted))
        if estimate is None:
            known[_rounded(drafted)] = _Estimate(seconds, self._step)
            return
        estimate.seconds += _RATE * (min(seconds, _MOST * estimate.seconds) - estimate.seconds)
        estimate.step = self._step

    def seconds(self, batch: int, most: int) -> list[float] | None:
        """Of steps with 0, 1, … ``most`` drafted tokens; None before one without was seen."""
        known = self._found.get(_rounded(batch))
        if known is None or 0 not in known:
            return None
        self._drop_old(known)
        tried = sorted(known)
        costs = []
        for count in range(most + 1):
            here = _rounded(count)
            while len(tried) > 1 and tried[1] <= here:
                tried.pop(0)
            costs.append(self._between(known, tried, here))
        return costs

    def _between(self, known: dict[int, _Estimate], tried: list[int], count: int) -> float:
        """The cost of ``count``, which is not below the first of ``tried``."""
        low = known[tried[0]].seconds
        if len(tried) == 1:
            return low + (count - tried[0]) * _ROW_SHARE * known[0].seconds
        high = known[tried[1]].seconds
        return low + (high - low) * (count - tried[0]) / (tried[1] - tried[0])

    def _drop_old(self, known: dict[int, _Estimate]) -> None:
        oldest = self._step - _KEPT_STEPS
        for count in [c for c, found in known.items() if c and found.step < oldest]:
            del known[count]


def _rounded(count: int) -> int:
    return count if count <= _EXACT else (count + 2) // 4 * 4
