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

from engine.draft_costs import DraftCosts

_FIRST_REACH = 4
"""Drafted tokens that are tried first where no step that waits was seen."""


class OverlapCosts:
    """See the module's text."""

    def __init__(self, waiting: DraftCosts) -> None:
        """``waiting`` learns, from whoever owns it, of steps that did not overlap: of those

        without drafts, too.
        """
        self._waiting = waiting
        self._overlapping = DraftCosts()
        self._wait = 0.0
        """Of the batch that was last asked for, of which both kinds of steps were seen."""

    def observe(self, batch: int, seconds: float) -> None:
        """A step of ``batch`` sequences without drafts ended so long after the one before it."""
        self._overlapping.observe(batch, 0, seconds)

    def seconds(self, batch: int, rows: int, most: int, *, first: bool) -> list[float] | None:
        """Of a step that would overlap without drafts, and of the same with 1, 2, … drafted tokens,

        to ``most`` or as far as they may be tried. ``first``: the step before has no drafts, and is
        not waited for yet.

        None where nothing is known, and where prompts are computed: where ``rows`` tokens are more
        than ``batch``. How much of such a step the host takes is not learned.
        """
        if rows > batch:
            return None
        overlapping = self._overlapping.seconds(batch, 0)
        waiting = self._waiting.seconds(batch, most)
        if overlapping is None:
            # So many have not overlapped yet: each step waited.
            return waiting
        plain = overlapping[0]
        if waiting is None:
            waiting = [plain + self._wait] * (min(most, _FIRST_REACH) + 1)
        self._wait = max(0.0, waiting[0] - plain)
        again = self._wait if first else 0.0
        # Waiting makes no step shorter, whatever was measured, and when.
        return [plain, *(max(plain, seconds) + again for seconds in waiting[1:])]
