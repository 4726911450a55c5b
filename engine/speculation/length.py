"""How many tokens of each draft a step checks: the number that maximizes tokens per second.

Each drafted token has a probability of being kept. It is learned by the token's evidence, and
corrected by the sequence's recent drafts. Each token also makes the step longer, as measured. From
all drafts of a step together, those tokens are taken that maximize kept tokens per second. If no
draft pays, one is still tried sometimes, for at most a hundredth of the time, since a sequence may
begin to copy. Plain Python: no clock, no I/O. Owned by the engine thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_LEVELS = 16
"""Number of evidence levels; higher evidence counts as the highest level."""
_FIRST_GUESS = (0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85)
"""Assumed probability that a token is kept, by its evidence from 1 on, until it is measured."""
_GUESS_WEIGHT = 4.0
"""Weight of the assumed probabilities, in tokens."""
_KEPT_TOKENS = 500.0
"""Number of the latest tokens of a level that count."""
_CLASS_BOUNDS = (2, 4, 8)
"""Lower bounds of the evidence classes in a sequence's own record."""
_LEVEL_WEIGHT = 3.0
"""Weight of the experience with all sequences, in tokens of the sequence's own record."""
_RECORD_DECAY = 0.9
"""Decay of a sequence's own record with each of its drafts."""
_SUREST = 0.98
_MIN_LIKELY = 0.02
"""Minimum probability for a token to be considered."""
_GAIN_ALONE, _GAIN = 1.02, 1.1
"""Minimum gain in tokens per second over a step without drafts: for one sequence, and for several.
With many drafts, the best of noisy estimates are selected, which promise more than they keep."""
_PROBE_SHARE = 0.01
"""Share of the time for drafts that are not expected to pay."""
MAX_IN_A_STEP = 48
"""Maximum drafted tokens of all sequences in a step."""


_RATE = 0.15
"""Weight of the newest measurement in an estimate."""
_MOST = 2.0
"""Maximum ratio of a measurement to its estimate; longer times are cut to it."""
_ROW_SHARE = 0.03
"""Assumed cost of a drafted token on a CPU until it is measured, as a share of the step without
drafts. It is low, so that drafts are tried."""
_SLOPE_SHARE = 0.5
"""If steps of fewer and of more sequences are measured: assumed cost of a drafted token, as a
share of the cost of a sequence between them. Rows may be cheap up to some number and expensive
after it."""
_KEPT_STEPS = 200
"""An estimate is valid for this number of steps per observation, up to ``_MAX_SEEN`` observations.
Then it is dropped, so that a measurement from a bad moment is repeated."""
_MAX_SEEN = 10
_FIRST_REACH = 4
"""Maximum tokens of the first draft that is tried. Later maximum: twice the number that was tried,
or this many more."""
_EXACT = 16
"""Counts up to this number are distinguished; larger ones are grouped by fours."""


@dataclass(slots=True)
class _Estimate:
    seconds: float
    step: int
    seen: int = 1


class DraftCosts:
    """Duration of a step by its decoding sequences and the drafted tokens that it checks.

    It is learned from the steps. A step of few rows is bound by memory, and one of many by
    arithmetic. Where one becomes the other, and how abruptly, depends on the model and the machine.
    """

    def __init__(self, row_share: float = _ROW_SHARE) -> None:
        """``row_share`` replaces the assumed cost on a CPU."""
        self._row_share = row_share
        self._found: dict[int, dict[int, _Estimate]] = {}
        self._step = 0

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step of ``batch`` sequences with ``drafted`` drafted tokens."""
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
        """Durations of steps with 0, 1, … drafted tokens, in seconds.

        The list ends at ``most``, or at the number that may be tried, which is ``first_reach`` if
        none was tried before. None before a step without drafts was measured.
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
            # A number beyond those that were tried may be cheap, so it is tried too.
            costs.append(
                costs[-1] + max(least, _SLOPE_SHARE * self._slope(batch + count))
                if found is None
                else found.seconds
            )
        return costs

    def _slope(self, rows: int) -> float:
        """Cost of one more sequence around ``rows`` sequences, in seconds; 0 if it is not known."""
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
    """Update an estimate with a measurement; None means that it is the first one."""
    if known is None:
        return found
    return known + _RATE * (min(found, _MOST * known) - known)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft of a sequence, described by its numbers."""

    sequence_id: int
    evidence: int
    tokens: int
    drawn: int = 0
    """Number of leading tokens that only guess what a running step draws. They gain nothing,
    whether right or wrong."""


class DraftLength:
    """Chooses how many tokens of each draft a step checks."""

    def __init__(self, costs: DraftCosts | None = None) -> None:
        """``costs`` holds the measured costs; pass it to share it."""
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
        """Choose how many tokens of each proposal the next step checks.

        ``batch`` sequences decode in the step, and ``rows`` tokens are computed without drafts.
        That is more than ``batch`` if prompts are computed too. Such a step is bound by arithmetic.
        ``costs``, for steps with 0, 1, … drafted tokens, replaces the measured costs; then no draft
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
        """Record the duration of a step in which ``batch`` sequences decoded, and nothing else."""
        self._costs.observe(batch, drafted, seconds)

    def verified(self, sequence_id: int, evidence: int, drafted: int, kept: int) -> None:
        """Record that the first ``kept`` of a draft's ``drafted`` tokens were right."""
        record = self._records.setdefault(sequence_id, _Record())
        record.fade()
        for place in range(min(kept + 1, drafted)):
            self._levels[_level(evidence + place)].count(place < kept)
            record.count(evidence + place, place < kept)

    def forget(self, sequence_id: int) -> None:
        """Drop the record of a sequence."""
        self._records.pop(sequence_id, None)

    def _step_costs(self, batch: int, rows: int, most: int) -> list[float] | None:
        """Costs in seconds, or in tokens if prompts are computed; None if they are not known."""
        if rows > batch:
            return [float(rows + n) for n in range(most + 1)]
        return self._costs.seconds(batch, most)

    def _likely(self, proposals: Sequence[Proposal]) -> list[tuple[float, int]]:
        """The probability of each token, and the index of its proposal; the most likely first.

        Each draft has at least one token, however unlikely, because it may be tried. Tokens that
        are drawn already are left out. A token's probability is at most that of the token before
        it. So any number of the first entries are the first tokens of each draft.
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
        """1 if there is time for a token that does not pay, else 0."""
        self._purse = min(self._purse + _PROBE_SHARE * costs[0], costs[0])
        extra = max(0.0, costs[1] - costs[0])
        if self._purse < extra:
            return 0
        self._purse -= extra
        return 1


def best_count(batch: int, chances: Sequence[float], costs: Sequence[float]) -> int:
    """How many of the most likely tokens maximize tokens per second."""
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
    """How often tokens of one evidence level are kept."""

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
    """Results of a sequence's own recent drafts, by classes of evidence."""

    __slots__ = ("_kept", "_seen")

    def __init__(self) -> None:
        self._seen = [0.0] * (len(_CLASS_BOUNDS) + 1)
        self._kept = [0.0] * (len(_CLASS_BOUNDS) + 1)

    def corrected(self, evidence: int, chance: float) -> float:
        """The probability of a token, given the general ``chance``."""
        place = bisect_right(_CLASS_BOUNDS, evidence)
        kept = self._kept[place] + _LEVEL_WEIGHT * chance
        return kept / (self._seen[place] + _LEVEL_WEIGHT)

    def fade(self) -> None:
        """Reduce the weight of earlier drafts, because another one follows."""
        self._seen = [_RECORD_DECAY * seen for seen in self._seen]
        self._kept = [_RECORD_DECAY * kept for kept in self._kept]

    def count(self, evidence: int, kept: bool) -> None:
        place = bisect_right(_CLASS_BOUNDS, evidence)
        self._seen[place] += 1.0
        self._kept[place] += kept
