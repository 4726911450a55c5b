"""How many tokens of each draft a step checks: as many as bring the most tokens a second.

Each drafted token has a probability that it is kept, learned by the evidence for it and corrected
by how the sequence has done lately; each makes the step longer, by what steps have taken. Of all
drafts of a step together those tokens are taken that bring the most tokens kept for the time. Where
none do, none are taken: then one is tried now and then, for at most a hundredth of the time, since
a sequence may begin to copy. Plain Python: no clock, no I/O. Owned by the engine thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_LEVELS = 16
"""Evidence above this is all alike."""
_FIRST_GUESS = (0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85)
"""How likely a token is kept by its evidence from 1 on, until tokens have shown it."""
_GUESS_WEIGHT = 4.0
"""How many tokens the first guess counts for."""
_KEPT_TOKENS = 500.0
"""How many of the latest tokens of a level count."""
_CLASS_BOUNDS = (2, 4, 8)
"""Evidence from these on is another class of a sequence's own record."""
_LEVEL_WEIGHT = 3.0
"""How many tokens of the sequence's own the experience with all sequences counts for."""
_RECORD_DECAY = 0.9
"""Of a sequence's own record, with each draft of its."""
_SUREST = 0.98
_MIN_LIKELY = 0.02
"""A token less likely to be kept than this is not looked at."""
_GAIN_ALONE, _GAIN = 1.02, 1.1
"""Drafts must promise this many times the tokens a second of a step without: of one sequence, of
several. Of many drafts the best by noisy estimates are taken, which promise more than they keep."""
_PROBE_SHARE = 0.01
"""Of the time, for drafts that do not pay as far as is known."""
MAX_IN_A_STEP = 48
"""Drafted tokens, of all sequences together."""


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
        known, count = self._found.setdefault(_rounded(batch), {}), _rounded(drafted)
        estimate = known.get(count)
        if estimate is None:
            known[count] = _Estimate(seconds, self._step)
            return
        estimate.seconds = towards(estimate.seconds, seconds)
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


def towards(known: float | None, found: float) -> float:
    """An estimate after a measurement; None: it is the first one."""
    if known is None:
        return found
    return known + _RATE * (min(found, _MOST * known) - known)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft that a sequence has, by its measures."""

    sequence_id: int
    evidence: int
    tokens: int
    drawn: int = 0
    """So many of its first tokens are guesses of what a running step draws: right or wrong, nothing
    is gained by them."""


class DraftLength:
    """See the module's text."""

    def __init__(self, costs: DraftCosts | None = None) -> None:
        """``costs``: where they are kept, for one who looks at them too."""
        self._costs = costs or DraftCosts()
        self._levels = [_Level(_guess(level)) for level in range(_LEVELS)]
        self._records: dict[int, _Record] = {}
        self._purse = 0.0

    def choose(
        self,
        batch: int,
        rows: int,
        proposals: Sequence[Proposal],
        costs: list[float] | None = None,
    ) -> list[int]:
        """How many tokens of each proposal the next step checks.

        ``batch`` sequences decode in it, and ``rows`` tokens are computed without drafts: more than
        ``batch`` where prompts are computed beside them. Such a step is bound by arithmetic.
        ``costs``, of steps with 0, 1, … drafted tokens, stands for what was observed; then nothing
        is tried that does not pay.
        """
        lengths = [0] * len(proposals)
        likely = self._likely(proposals)[:MAX_IN_A_STEP]
        if not likely:
            return lengths
        probes = costs is None and rows == batch
        if costs is None:
            costs = self._step_costs(batch, rows, len(likely))
        if costs is None:
            return lengths
        count = best_count(batch, [chance for chance, _ in likely[: len(costs) - 1]], costs)
        if not count and probes:
            count = self._probe(costs)
        for _, index in likely[:count]:
            lengths[index] += 1
        return lengths

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """A step in which ``batch`` sequences decoded, and nothing else, took so long."""
        self._costs.observe(batch, drafted, seconds)

    def verified(self, sequence_id: int, evidence: int, drafted: int, kept: int) -> None:
        """Of a draft's tokens the first ``kept`` of ``drafted`` were right."""
        record = self._records.setdefault(sequence_id, _Record())
        record.fade()
        for place in range(min(kept + 1, drafted)):
            self._levels[_level(evidence + place)].count(place < kept)
            record.count(evidence + place, place < kept)

    def forget(self, sequence_id: int) -> None:
        """Drop what is known of a sequence."""
        self._records.pop(sequence_id, None)

    def _step_costs(self, batch: int, rows: int, most: int) -> list[float] | None:
        """In seconds, or in tokens where prompts are computed; None where nothing is known."""
        if rows > batch:
            return [float(rows + n) for n in range(most + 1)]
        return self._costs.seconds(batch, most)

    def _likely(self, proposals: Sequence[Proposal]) -> list[tuple[float, int]]:
        """The chance of each token that it is kept, and whose it is; the likeliest first.

        Of each draft there is one token at least, however unlikely: it may be tried.
        Tokens that are drawn already are not among them.
        A token's chance is none above that of the token before it, so that any number of the first
        of them are the first tokens of each draft.
        """
        found = []
        for index, proposal in enumerate(proposals):
            record = self._records.get(proposal.sequence_id)
            chance = 1.0
            for place in range(proposal.tokens):
                evidence = proposal.evidence + place
                likely = self._levels[_level(evidence)].chance
                if record is not None:
                    likely = record.corrected(evidence, likely)
                chance *= min(_SUREST, likely)
                if place and chance < _MIN_LIKELY:
                    break
                if place >= proposal.drawn:
                    found.append((chance, index))
        found.sort(key=lambda item: -item[0])
        return found

    def _probe(self, costs: list[float]) -> int:
        """1 where there is time for a token that does not pay, else 0."""
        self._purse = min(self._purse + _PROBE_SHARE * costs[0], costs[0])
        extra = max(0.0, costs[1] - costs[0])
        if self._purse < extra:
            return 0
        self._purse -= extra
        return 1


def best_count(batch: int, chances: Sequence[float], costs: Sequence[float]) -> int:
    """How many of the likeliest tokens bring the most tokens for the time."""
    gain = _GAIN_ALONE if batch == 1 else _GAIN
    best, most = 0, gain * batch / costs[0]
    tokens = float(batch)
    for count, chance in enumerate(chances, 1):
        tokens += chance
        rate = tokens / costs[count]
        if rate > most:
            best, most = count, rate
    return best


def _level(evidence: int) -> int:
    return min(evidence, _LEVELS) - 1


def _guess(level: int) -> float:
    return _FIRST_GUESS[min(level, len(_FIRST_GUESS) - 1)]


class _Level:
    """How often tokens with so much evidence are kept."""

    __slots__ = ("_kept", "_seen")

    def __init__(self, guess: float) -> None:
        self._seen = _GUESS_WEIGHT
        self._kept = guess * _GUESS_WEIGHT

    @property
    def chance(self) -> float:
        return self._kept / self._seen

    def count(self, kept: bool) -> None:
        self._seen += 1.0
        self._kept += kept
        if self._seen > _KEPT_TOKENS:
            self._kept *= _KEPT_TOKENS / self._seen
            self._seen = _KEPT_TOKENS


class _Record:
    """How a sequence's own drafts have done lately, by classes of evidence."""

    __slots__ = ("_kept", "_seen")

    def __init__(self) -> None:
        self._seen = [0.0] * (len(_CLASS_BOUNDS) + 1)
        self._kept = [0.0] * (len(_CLASS_BOUNDS) + 1)

    def corrected(self, evidence: int, chance: float) -> float:
        """The chance of a token, of which sequences in general have ``chance``."""
        place = bisect_right(_CLASS_BOUNDS, evidence)
        kept = self._kept[place] + _LEVEL_WEIGHT * chance
        return kept / (self._seen[place] + _LEVEL_WEIGHT)

    def fade(self) -> None:
        """Another draft follows: those before it count for less."""
        self._seen = [_RECORD_DECAY * seen for seen in self._seen]
        self._kept = [_RECORD_DECAY * kept for kept in self._kept]

    def count(self, evidence: int, kept: bool) -> None:
        place = bisect_right(_CLASS_BOUNDS, evidence)
        self._seen[place] += 1.0
        self._kept[place] += kept
