"""Chooses how many draft tokens of each sequence a step verifies: the number that maximizes tokens
per second.

Each draft token has a probability of being accepted. It is estimated from earlier tokens with the
same evidence, and corrected by the sequence's recent drafts. Each token also makes the step longer,
as measured. Of all drafts of a step together, those tokens are verified that maximize accepted
tokens per second. If no draft is expected to pay, one is still tried sometimes, for at most a
hundredth of the time, since a sequence may begin to copy. Plain Python: no clock, no I/O. Owned by
the engine thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_LEVELS = 16
"""Number of evidence levels. Evidence above the highest level counts as the highest level."""
_FIRST_GUESS = (0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85)
"""Assumed probability that a draft token of evidence 1, 2, … is accepted, until it is measured."""
_GUESS_WEIGHT = 4.0
"""Weight of the assumed probabilities, as a number of measured tokens."""
_KEPT_TOKENS = 500.0
"""Number of latest draft tokens over which the acceptance rate of an evidence level is averaged."""
_CLASS_BOUNDS = (2, 4, 8)
"""Lower bounds of the classes of evidence. For each sequence, an acceptance rate is kept for each
class."""
_LEVEL_WEIGHT = 3.0
"""Weight of the acceptance rate of all sequences, as a number of tokens of the sequence's own
record."""
_RECORD_DECAY = 0.9
"""Factor by which the weight of a sequence's earlier drafts falls with each new draft."""
_SUREST = 0.98
_MIN_LIKELY = 0.02
"""Minimum probability of acceptance for a draft token after the first to be considered."""
_GAIN_ALONE, _GAIN = 1.02, 1.1
"""Minimum gain in tokens per second over a step without drafts, if one sequence drafts and if
several do. Among many drafts, the selected ones often have overestimated gains, so the required
gain is higher."""
_PROBE_SHARE = 0.01
"""Share of the time that may be spent on drafts that are not expected to pay."""
MAX_IN_A_STEP = 48
"""Maximum draft tokens that one step verifies, over all sequences."""


_RATE = 0.15
"""Weight of the newest measurement in the estimate of a step's duration."""
_MOST = 2.0
"""Maximum ratio of a measured duration to the estimated duration. A longer measurement is reduced
to this ratio."""
_ROW_SHARE = 0.03
"""Assumed cost on a CPU of verifying one more draft token, until this cost is measured. It is a
share of the duration of a step without drafts. It is low, so that drafts are tried."""
_SLOPE_SHARE = 0.5
"""Assumed cost of a draft token, as a share of the cost of one more sequence in the step. It is
used if steps with fewer and with more sequences were measured. Up to some number, additional rows
may be cheap, and beyond it expensive."""
_KEPT_STEPS = 200
"""Number of steps for which each observation keeps an estimate valid; at most ``_MAX_SEEN``
observations count. Older estimates are dropped, so that a measurement from a bad moment is
repeated."""
_MAX_SEEN = 10
_FIRST_REACH = 4
"""Maximum draft tokens of a step until steps with drafts were measured. Afterwards, the maximum is
twice the largest measured number plus this many."""
_EXACT = 16
"""Each number of sequences or draft tokens up to this one has its own estimate. Larger numbers are
rounded to multiples of four, which share one."""


@dataclass(slots=True)
class _Estimate:
    seconds: float
    step: int
    seen: int = 1


class DraftCosts:
    """Learned durations of steps, by the number of sequences that decode and the number of draft
    tokens that are verified.

    It is learned from measured steps. A step of few rows is bound by memory, and one of many by
    arithmetic. Where one becomes the other, and how abruptly, depends on the model and the machine.
    """

    def __init__(self, row_share: float = _ROW_SHARE) -> None:
        """``row_share`` is the assumed cost of a draft token until it is measured; the default is
        for a CPU."""
        self._row_share = row_share
        self._found: dict[int, dict[int, _Estimate]] = {}
        self._step = 0

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step. ``batch`` is the number of sequences that it decoded, and
        ``drafted`` is the number of draft tokens that it verified."""
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
        """Estimate the durations of steps with 0, 1, … draft tokens, in seconds.

        The list ends at ``most`` draft tokens, or at the number that may be tried, which is
        ``first_reach`` if none was tried before. Returns None until a step without drafts was
        measured.
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
        """Estimate the cost of one more sequence in a step of about ``rows`` sequences, in seconds;
        0 if it is not known."""
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
    """Move the estimate ``known`` toward the measurement ``found``. ``known`` is None if ``found``
    is the first measurement."""
    if known is None:
        return found
    return known + _RATE * (min(found, _MOST * known) - known)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A sequence's draft, reduced to what ``DraftLength`` needs: the number of tokens and their
    evidence."""

    sequence_id: int
    evidence: int
    tokens: int
    drawn: int = 0
    """Number of leading draft tokens that only guess what a step in flight samples. They bring no
    gain, even if they are right."""


class DraftLength:
    """Chooses how many tokens of each draft a step verifies."""

    def __init__(self, costs: DraftCosts | None = None) -> None:
        """``costs`` holds the measured step durations. Pass an existing object to share its
        measurements."""
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
        """Choose how many tokens of each proposal the next step verifies.

        ``batch`` sequences decode in the step, and ``rows`` tokens are computed without drafts.
        ``rows`` is more than ``batch`` if prompts are computed, too. Such a step is bound by
        arithmetic. ``costs`` replaces the measured durations of steps with 0, 1, … draft tokens;
        then no draft is tried that is not expected to pay.
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
        """Record the duration of a step that computed no prompt. ``batch`` is the number of
        sequences that it decoded."""
        self._costs.observe(batch, drafted, seconds)

    def verified(self, sequence_id: int, evidence: int, drafted: int, kept: int) -> None:
        """Record that a step accepted the first ``kept`` of a draft's ``drafted`` tokens."""
        record = self._records.setdefault(sequence_id, _Record())
        record.fade()
        for place in range(min(kept + 1, drafted)):
            self._levels[_level(evidence + place)].count(place < kept)
            record.count(evidence + place, place < kept)

    def forget(self, sequence_id: int) -> None:
        """Drop the record of a sequence that has ended."""
        self._records.pop(sequence_id, None)

    def _step_costs(self, batch: int, rows: int, most: int) -> list[float] | None:
        """Estimate the costs of steps with 0, 1, … draft tokens: seconds, or tokens if prompts are
        computed. None if nothing was measured."""
        if rows > batch:
            return [float(rows + n) for n in range(most + 1)]
        return self._costs.seconds(batch, most)

    def _likely(self, proposals: Sequence[Proposal]) -> list[tuple[float, int]]:
        """List the draft tokens as (probability of acceptance, index of the proposal), the most
        likely first.

        Each draft has at least one token, however unlikely, because it may be tried. Tokens that
        only guess a token in flight are left out. A token's probability is at most that of the
        token before it. So the first entries, however many, are always leading tokens of each
        draft.
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
        """Number of draft tokens to try although they are not expected to pay: 1 if the saved-up
        time is enough, else 0."""
        self._purse = min(self._purse + _PROBE_SHARE * costs[0], costs[0])
        extra = max(0.0, costs[1] - costs[0])
        if self._purse < extra:
            return 0
        self._purse -= extra
        return 1


def best_count(batch: int, chances: Sequence[float], costs: Sequence[float]) -> int:
    """Return how many of the most likely draft tokens to verify for the maximum of tokens per
    second.

    ``chances`` are the tokens' probabilities, in descending order. ``costs`` are the durations of
    steps with 0, 1, … draft tokens.
    """
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
    """Acceptance rate of draft tokens of one evidence level, over all sequences."""

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
    """Acceptance rates in one sequence's recent drafts, by classes of evidence."""

    __slots__ = ("_kept", "_seen")

    def __init__(self) -> None:
        self._seen = [0.0] * (len(_CLASS_BOUNDS) + 1)
        self._kept = [0.0] * (len(_CLASS_BOUNDS) + 1)

    def corrected(self, evidence: int, chance: float) -> float:
        """Correct the probability ``chance`` of a token by the results of this sequence's own
        drafts."""
        place = bisect_right(_CLASS_BOUNDS, evidence)
        kept = self._kept[place] + _LEVEL_WEIGHT * chance
        return kept / (self._seen[place] + _LEVEL_WEIGHT)

    def fade(self) -> None:
        """Reduce the weight of earlier drafts; called before the result of a new draft is added."""
        self._seen = [_RECORD_DECAY * seen for seen in self._seen]
        self._kept = [_RECORD_DECAY * kept for kept in self._kept]

    def count(self, evidence: int, kept: bool) -> None:
        place = bisect_right(_CLASS_BOUNDS, evidence)
        self._seen[place] += 1.0
        self._kept[place] += kept
