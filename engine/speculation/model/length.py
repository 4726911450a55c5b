"""Chooses how many tokens a drafter with its own model drafts. The choice is made before drafting,
because drafting costs time.

The probability of acceptance is estimated from a token's position in its draft, and from the
sequence's recent drafts. Plain Python: no clock, no I/O. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.length import MAX_IN_A_STEP, DraftLength, Proposal, best_count, towards

EVIDENCE = 4
"""Evidence of the first token of a model's draft, on the scale of ``DraftLength``: a model guesses
better than an n-gram match of one token."""
PIECE = 64
"""Maximum backlog tokens that the drafter processes per step, because other sequences wait for the
step."""
_SPREAD_STEPS = 32
"""Number of steps over which the cost of processing a backlog is spread."""
_RATE = 0.05
"""Weight of the latest step in the average of whether drafts were expected to pay."""
_MIN_PAYING = 0.25
"""Minimum share of the latest steps in which drafts were expected to pay. Below this share,
drafting does not count as worthwhile."""
_TRIALS = 16
"""Number of initial drafts that are made in any case, to measure the drafter's cost and
acceptance."""
_LONGEST_TRIAL_STEPS = 20.0
"""Maximum time to process a backlog for a trial draft, as a multiple of the duration of a step."""
_PROBE_SHARE = 0.02
"""Share of the time that may be spent on drafts that are not expected to pay. A part of it is spent
on the drafter's backlog."""
_IDLE_STEPS, _LOOK_EVERY = 32, 8
"""After ``_IDLE_STEPS`` steps without a draft, drafting is considered only in one of
``_LOOK_EVERY`` steps, because considering it takes time as well."""
_PROMPT_EVERY = 15
"""If drafts do not pay, the drafter still processes one of this number of prompts, to find out
whether drafts would pay for it. The number is odd, because a prompt that is computed on another
worker counts twice: when blocks are reserved, and when they have arrived."""


_STEP_SHARE = 0.1
"""Assumed duration of a drafter's step, as a share of the duration of a target's step. It is used
until the drafter's step is measured."""
_TOKENS_A_STEP = 8
"""Assumed number of backlog tokens that take as long as one step of the drafter, until it is
measured: a step of few tokens is bound by memory."""


class DraftingTime:
    """Measured durations of drafting with a drafter's own model.

    A draft of k tokens takes k steps of a small model, one after another, for all sequences that
    draft.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        self._token: float | None = None

    def observe(self, sequences: int, steps: int, seconds: float) -> None:
        """Record how long draft steps took; ``steps`` is the number of draft steps, and
        ``sequences`` is the number of sequences. None of them had a backlog."""
        found = seconds / steps
        key = _power_of_two(sequences)
        self._steps[key] = towards(self._steps.get(key), found)

    def observe_tokens(self, tokens: int, seconds: float) -> None:
        """Record how long the drafter's model took to process prompt or backlog tokens; ``tokens``
        is the number of these tokens."""
        self._token = towards(self._token, seconds / tokens)

    def step(self, sequences: int, model_step: float) -> float:
        """Estimate the seconds of one draft step; ``sequences`` is the number of sequences that
        draft, and ``model_step`` is the duration of a step of the target."""
        if not self._steps:
            return _STEP_SHARE * model_step
        key = min(self._steps, key=lambda known: abs(known - _power_of_two(sequences)))
        return self._steps[key]

    def backlog(self, tokens: int, model_step: float) -> float:
        """Estimate the seconds to process a backlog; ``tokens`` is its number of tokens, and
        ``model_step`` is the duration of a step of the target."""
        token = self._token
        if token is None:
            token = self.step(1, model_step) / _TOKENS_A_STEP
        return tokens * token


def _power_of_two(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that may draft, with the maximum length of its draft and the length of its
    backlog, both in tokens."""

    sequence_id: int
    most: int
    backlog: int


class ModelDraftLength(DraftLength):
    """Chooses how many tokens a drafter with its own model drafts for each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.time = DraftingTime()
        self._paying = 1.0
        self._trials = 0
        self._probing: int | None = None
        """Id of the sequence for which a trial draft is in preparation, until it has drafted; None
        if there is none."""
        self._prompts = 0
        self._rows = 0
        self._idle = 0
        """Number of consecutive steps of ``_rows`` rows in which no sequence drafted."""
        self._unpaid = 0
        """Number of recent steps that have not yet been counted in the saved-up time for trial
        drafts."""

    @property
    def pays(self) -> bool:
        """Whether drafts were expected to pay in enough of the recent steps."""
        return self._paying >= _MIN_PAYING

    def takes_prompt(self) -> bool:
        """Whether the drafter should process a new sequence's prompt while the target model
        computes that prompt."""
        self._prompts += 1
        return self.pays or self._prompts % _PROMPT_EVERY == 0

    def looks(self, rows: int) -> bool:
        """Whether the caller should consider drafts for a step of ``rows`` rows, and call
        ``wanted``. ``looks`` must be called once before every step."""
        if rows != self._rows:
            self._rows, self._idle = rows, 0
        self._idle += 1
        self._unpaid += 1
        return self._idle < _IDLE_STEPS or self._idle % _LOOK_EVERY == 0

    def wanted(self, batch: int, candidates: Sequence[Candidate]) -> list[int]:
        """Choose how many tokens each candidate drafts in a step in which ``batch`` sequences
        decode."""
        lengths = self._lengths(batch, candidates)
        if any(lengths):
            self._idle = 0
        return lengths

    def _lengths(self, batch: int, candidates: Sequence[Candidate]) -> list[int]:
        proposals = [Proposal(c.sequence_id, EVIDENCE, c.most) for c in candidates]
        likely = self._likely(proposals)[:MAX_IN_A_STEP]
        lengths = [0] * len(candidates)
        checking = self._costs.seconds(batch, len(likely))
        if checking is None or not likely:
            return lengths
        likely = likely[: len(checking) - 1]
        costs = self._with_drafting(checking, [candidates[index] for _, index in likely])
        count = best_count(batch, [chance for chance, _ in likely], costs)
        for _, index in likely[:count]:
            lengths[index] += 1
        if not count and self._trials < _TRIALS:
            self._try(lengths, candidates, checking[0])
            if any(lengths):
                return lengths
        self._paying += _RATE * ((count > 0) - self._paying)
        probed = None if count else self._probed(checking, candidates)
        if probed is not None:
            lengths[probed] = 1
        return lengths

    def verified(self, sequence_id: int, evidence: int, drafted: int, kept: int) -> None:
        """Record that a step accepted the first ``kept`` of a draft's ``drafted`` tokens."""
        super().verified(sequence_id, evidence, drafted, kept)
        self._trials += 1
        self._idle = 0
        if sequence_id == self._probing:
            self._probing = None

    def forget(self, sequence_id: int) -> None:
        """Drop the record of a sequence that has ended."""
        super().forget(sequence_id)
        if sequence_id == self._probing:
            self._probing = None

    def _try(self, lengths: list[int], candidates: Sequence[Candidate], plain: float) -> None:
        """Set the length to two draft tokens for every candidate without a long backlog; ``plain``
        is the duration of a step without drafts."""
        for index, candidate in enumerate(candidates):
            if self.time.backlog(candidate.backlog, plain) < _LONGEST_TRIAL_STEPS * plain:
                lengths[index] = min(2, candidate.most)

    def _with_drafting(self, checking: list[float], drafting: list[Candidate]) -> list[float]:
        """Add the drafter's time to the durations of steps with 0, 1, … draft tokens; ``drafting``
        has the candidate of each draft token."""
        costs = checking[:1]
        lengths: dict[int, int] = {}
        deepest, late = 0, 0.0
        for seconds, candidate in zip(checking[1:], drafting, strict=True):
            length = lengths[candidate.sequence_id] = lengths.get(candidate.sequence_id, 0) + 1
            deepest = max(deepest, length)
            if length == 1:
                late += self.time.backlog(candidate.backlog, checking[0]) / _SPREAD_STEPS
            step = self.time.step(len(lengths), checking[0])
            costs.append(seconds + deepest * step + late)
        return costs

    def _probed(self, checking: list[float], candidates: Sequence[Candidate]) -> int | None:
        """Index of the candidate with the smallest backlog, if there is enough saved-up time for a
        trial draft; else None.

        A trial that has begun continues, because processing its backlog may take several steps.
        """
        index = min(
            range(len(candidates)),
            key=lambda n: (candidates[n].sequence_id != self._probing, candidates[n].backlog),
        )
        if candidates[index].sequence_id == self._probing:
            return index
        plain = checking[0]
        extra = max(0.0, checking[1] - plain) + self.time.step(1, plain)
        extra += self.time.backlog(candidates[index].backlog, plain)
        share = _PROBE_SHARE * plain * self._unpaid
        self._unpaid = 0
        self._purse = min(self._purse + share, max(plain, extra))
        if self._purse < extra:
            return None
        self._purse -= extra
        self._probing = candidates[index].sequence_id
        return index
