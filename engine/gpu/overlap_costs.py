"""What drafts cost where steps overlap: a step that checks some cannot be started early.

Without drafts a step is started while the one before it runs, so that the host's part of it costs
nothing. Drafts need the newest tokens: the step that checks them waits for the one before, and the
one behind it waits for what they bring. So what is compared is

    a step without drafts       from one end to the next, where steps overlap
    a step with them            from one end to the next, with the wait
    the first one of several    the same, and one wait more: that of the step behind the last one

Plain Python: seconds in, seconds out. Owned by the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.speculation.draft_costs import DraftCosts

_RATE = 0.15
"""What a new step counts for beside those before it."""
_MOST = 2.0
"""A step that took more than this many times what was expected was held up: it counts so."""
_FEW = 4
"""Steps without drafts must have been seen so often before drafts are compared with them."""
_KEPT_STEPS = 256
"""So many steps they are believed; then some are run, since what they take changes with the
sequences' lengths: at most a step in a hundred."""
_FIRST_REACH = 4
"""Of as many drafted tokens as there are sequences, and so many more, are steps tried first: a
GPU's step of twice the rows takes hardly longer, but for large batches."""


@dataclass(slots=True)
class _Plain:
    """Steps of one batch without drafts."""

    seconds: float
    seen: int = 1
    asked: int = 0
    """How often they were asked for since one was seen."""


class OverlapCosts:
    """See the module's text."""

    def __init__(self, waiting: DraftCosts) -> None:
        """``waiting`` learns, from whoever owns it, of steps that did not overlap: of those

        without drafts, too.
        """
        self._waiting = waiting
        self._overlapping: dict[int, _Plain] = {}
        self._wait = 0.0
        """Of the batch that was last asked for, of which both kinds of steps were seen."""

    def observe(self, batch: int, seconds: float) -> None:
        """A step of ``batch`` sequences without drafts ended so long after the one before it."""
        known = self._overlapping.get(batch)
        if known is None:
            self._overlapping[batch] = _Plain(seconds)
            return
        known.seconds += _RATE * (min(seconds, _MOST * known.seconds) - known.seconds)
        known.seen = _FEW - 1 if known.asked > _KEPT_STEPS else known.seen + 1
        known.asked = 0

    def seconds(self, batch: int, rows: int, most: int, *, first: bool) -> list[float] | None:
        """Of a step that would overlap without drafts, and of the same with 1, 2, … drafted tokens,

        to ``most`` or as far as they may be tried. ``first``: the step before has no drafts, and is
        not waited for yet.

        None where too little is known, and where prompts are computed: where ``rows`` tokens are
        more than ``batch``. How much of such a step the host takes is not learned.
        """
        plain = self._plain(batch)
        if plain is None or rows > batch:
            return None
        reach = min(most, batch + _FIRST_REACH)
        waiting = self._waiting.seconds(batch, most, batch + _FIRST_REACH)
        if waiting is None:
            waiting = [plain + self._wait] * (reach + 1)
        self._wait = max(0.0, waiting[0] - plain)
        again = self._wait if first else 0.0
        # Waiting makes no step shorter, whatever was measured, and when.
        return [plain, *(max(plain, seconds) + again for seconds in waiting[1:])]

    def _plain(self, batch: int) -> float | None:
        known = self._overlapping.get(batch)
        if known is None or known.seen < _FEW:
            return None
        known.asked += 1
        return None if known.asked > _KEPT_STEPS else known.seconds
