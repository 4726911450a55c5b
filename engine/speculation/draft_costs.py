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
"""What a drafted token is taken to cost where nothing is known: this part of the step without
drafts, on a CPU. Little, so that it is tried."""
_SLOPE_SHARE = 0.5
"""Where steps of fewer and of more sequences are known: this part of what one costs between them.
Not all of it: rows may be cheap up to some number, and dear behind it."""
_KEPT_STEPS = 200
"""For so many steps each time that it was seen, up to ``_MAX_SEEN``, an estimate is believed; then
it is forgotten, so that what was measured at a bad moment is tried again."""
_MAX_SEEN = 10
_FIRST_REACH = 4
"""How many tokens are tried first; then at most twice as many as were tried, and so many more."""
_EXACT = 16
"""Up to so many, counts are told apart; above by fours."""


@dataclass(slots=True)
class _Estimate:
    seconds: float
    step: int
    seen: int = 1


class DraftCosts:
    """See the module's text. Owned by the engine thread."""

    def __init__(self, row_share: float = _ROW_SHARE) -> None:
        """``row_share`` stands for that of a CPU."""
        self._row_share = row_share
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
        bounded = min(seconds, _MOST * estimate.seconds)
        estimate.seconds += _RATE * (bounded - estimate.seconds)
        estimate.step = self._step
        estimate.seen = min(estimate.seen + 1, _MAX_SEEN)

    def seconds(self, batch: int, most: int, first_reach: int = _FIRST_REACH) -> list[float] | None:
        """Of steps with 0, 1, … drafted tokens, to ``most`` or as far as they may be tried:

        ``first_reach`` where none was. None before one without was seen.
        """
        known = self._found.get(_rounded(batch))
        if known is None or 0 not in known:
            return None
        self._forget_old(known)
        reach = first_reach + 2 * max(known)
        costs: list[float] = []
        least = self._row_share * known[0].seconds
        for count in range(min(most, reach) + 1):
            found = known.get(_rounded(count))
            # What lies behind one that was tried may be cheap: it is to be tried too.
            costs.append(
                costs[-1] + max(least, _SLOPE_SHARE * self._slope(batch + count))
                if found is None
                else found.seconds
            )
        return costs

    def _slope(self, rows: int) -> float:
        """What one sequence more costs around that many; 0 where that is not known."""
        batches = [batch for batch, known in self._found.items() if 0 in known]
        below = max((batch for batch in batches if batch < rows), default=0)
        above = min((batch for batch in batches if batch >= rows), default=0)
        if not below or not above:
            return 0.0
        seconds = self._found[above][0].seconds - self._found[below][0].seconds
        return seconds / (above - below)

    def _forget_old(self, known: dict[int, _Estimate]) -> None:
        old = [
            count
            for count, found in known.items()
            if count and self._step - found.step > found.seen * _KEPT_STEPS
        ]
        for count in old:
            del known[count]


def _rounded(count: int) -> int:
    return count if count <= _EXACT else (count + 2) // 4 * 4
