"""What drafts cost: the steps that check them, and the drafter's own model.

Plain Python: seconds in, seconds out. Owned by the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

_RATE = 0.15
"""The weight of the newest measurement in an estimate."""
_MOST = 2.0
"""A step or draft that takes longer than this many times its estimate counts as that many times."""
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
    """What a step takes by how many sequences decode in it and how many drafted tokens it checks.

    Learned from the steps themselves: a step of few rows is bound by memory, one of many by
    arithmetic, and where the one becomes the other, and by what jumps, depends on the model and the
    machine.
    """

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


_STEP_SHARE = 0.1
"""What a step of the drafter is taken to cost until one was seen: this part of the model's."""
_TOKENS_A_STEP = 8
"""So many tokens of a backlog are taken to cost what a step does, until some were seen: a step of
few tokens is bound by memory."""


class DraftingTime:
    """What a drafter's own model takes to draft, learned from the drafts themselves.

    A draft of k tokens is k steps of a small model, one after another, of all sequences that draft.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        self._token: float | None = None

    def observe(self, sequences: int, steps: int, seconds: float) -> None:
        """``steps`` steps of so many sequences, without a backlog, took so long."""
        found = seconds / steps
        key = _power_of_two(sequences)
        self._steps[key] = _towards(self._steps.get(key), found)

    def observe_tokens(self, tokens: int, seconds: float) -> None:
        """Taking in so many tokens, of a prompt or a backlog, took so long."""
        self._token = _towards(self._token, seconds / tokens)

    def step(self, sequences: int, model_step: float) -> float:
        """Seconds of one step of so many; ``model_step`` are those of one of the model."""
        if not self._steps:
            return _STEP_SHARE * model_step
        key = min(self._steps, key=lambda known: abs(known - _power_of_two(sequences)))
        return self._steps[key]

    def backlog(self, tokens: int, model_step: float) -> float:
        """Seconds of taking in so many tokens."""
        token = self._token
        if token is None:
            token = self.step(1, model_step) / _TOKENS_A_STEP
        return tokens * token


def _towards(known: float | None, found: float) -> float:
    if known is None:
        return found
    return known + _RATE * (min(found, _MOST * known) - known)


def _power_of_two(count: int) -> int:
    """To a power of two, upwards."""
    return 1 << (count - 1).bit_length()


_FEW = 4
"""Steps without drafts must have been seen so often before drafts are compared with them."""
_BELIEVED_STEPS = 256
"""So many steps they are believed; then some are run, since what they take changes with the
sequences' lengths: at most a step in a hundred."""
_OVERLAP_REACH = 4
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
    """What drafts cost where steps overlap: a step that checks some cannot be started early.

    Without drafts a step is started while the one before it runs, so that the host's part of it
    costs nothing. Drafts need the newest tokens: the step that checks them waits for the one
    before, and the one behind it waits for what they bring. So what is compared is

        a step without drafts       from one end to the next, where steps overlap
        a step with them            from one end to the next, with the wait
        the first one of several    the same, and one wait more: that of the step after the last one
    """

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
        known.seen = _FEW - 1 if known.asked > _BELIEVED_STEPS else known.seen + 1
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
        reach = min(most, batch + _OVERLAP_REACH)
        waiting = self._waiting.seconds(batch, most, batch + _OVERLAP_REACH)
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
        return None if known.asked > _BELIEVED_STEPS else known.seconds
