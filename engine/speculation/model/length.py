"""How many tokens a drafter with its own model drafts, chosen from its costs before it drafts.

Probabilities are learned by a token's place in its draft, and by the sequence's recent drafts.
Plain Python: no clock, no I/O. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.length import MAX_IN_A_STEP, DraftLength, Proposal, best_count, towards

EVIDENCE = 4
"""Evidence of a draft's first token, in the measure of ``DraftLength``: a model guesses better than
a single token that occurred before."""
PIECE = 64
"""Maximum tokens of a backlog that are processed with one step, because other sequences wait for
it."""
_SPREAD_STEPS = 32
"""Number of later steps over which the cost of a backlog is spread."""
_RATE = 0.05
"""Weight of a step in the average of whether drafts pay."""
_MIN_PAYING = 0.25
"""Minimum share of the latest steps that were expected to gain, for drafts to count as paying."""
_TRIALS = 16
"""Number of initial drafts that are made in any case, to measure the drafter's cost and value."""
_LONGEST_TRIAL_STEPS = 20.0
"""Maximum duration of a backlog for a trial, in steps."""
_PROBE_SHARE = 0.02
"""Share of the time for drafts that are not expected to pay. A part of it is spent on the drafter's
backlog."""
_IDLE_STEPS, _LOOK_EVERY = 32, 8
"""After the first number of steps without a draft, only one of the second number of steps is
considered: considering a step takes time as well."""
_PROMPT_EVERY = 15
"""If drafts do not pay, one of this number of prompts is processed, to see whether they would. The
number is odd, because a prompt that is computed elsewhere counts twice: when blocks are promised,
and when they have arrived."""


_STEP_SHARE = 0.1
"""Assumed cost of a drafter's step until it is measured, as a share of the model's step."""
_TOKENS_A_STEP = 8
"""Assumed number of backlog tokens that cost the same as a step, until it is measured: a step of
few tokens is bound by memory."""


class DraftingTime:
    """Learned duration of drafting with the drafter's own model.

    A draft of k tokens takes k steps of a small model, one after another, for all sequences that
    draft.
    """

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        self._token: float | None = None

    def observe(self, sequences: int, steps: int, seconds: float) -> None:
        """Record the duration of ``steps`` steps of ``sequences`` sequences, without a backlog."""
        found = seconds / steps
        key = _power_of_two(sequences)
        self._steps[key] = towards(self._steps.get(key), found)

    def observe_tokens(self, tokens: int, seconds: float) -> None:
        """Record the duration of processing ``tokens`` tokens of a prompt or a backlog."""
        self._token = towards(self._token, seconds / tokens)

    def step(self, sequences: int, model_step: float) -> float:
        """Seconds of one step of ``sequences`` sequences; ``model_step`` is a step of the model."""
        if not self._steps:
            return _STEP_SHARE * model_step
        key = min(self._steps, key=lambda known: abs(known - _power_of_two(sequences)))
        return self._steps[key]

    def backlog(self, tokens: int, model_step: float) -> float:
        """Seconds to process ``tokens`` tokens."""
        token = self._token
        if token is None:
            token = self.step(1, model_step) / _TOKENS_A_STEP
        return tokens * token


def _power_of_two(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that may draft, and its backlog in tokens."""

    sequence_id: int
    most: int
    backlog: int


class ModelDraftLength(DraftLength):
    """Chooses how many tokens each sequence drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.time = DraftingTime()
        self._paying = 1.0
        self._trials = 0
        self._probing: int | None = None
        """The sequence that is tried with saved-up time, until it has drafted."""
        self._prompts = 0
        self._rows = 0
        self._idle = 0
        """Number of consecutive steps with ``_rows`` rows in which nothing was drafted."""
        self._unpaid = 0
        """Number of steps whose share was not yet added to the saved-up time."""

    @property
    def pays(self) -> bool:
        """Whether recent drafts have paid."""
        return self._paying >= _MIN_PAYING

    def takes_prompt(self) -> bool:
        """Whether the drafter should process a new sequence's prompt while it is computed."""
        self._prompts += 1
        return self.pays or self._prompts % _PROMPT_EVERY == 0

    def looks(self, rows: int) -> bool:
        """Whether to call ``wanted`` before a step of ``rows`` rows. Call it for every step."""
        if rows != self._rows:
            self._rows, self._idle = rows, 0
        self._idle += 1
        self._unpaid += 1
        return self._idle < _IDLE_STEPS or self._idle % _LOOK_EVERY == 0

    def wanted(self, batch: int, candidates: Sequence[Candidate]) -> list[int]:
        """How many tokens each candidate drafts in a step in which ``batch`` sequences decode."""
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
        """See ``DraftLength``."""
        super().verified(sequence_id, evidence, drafted, kept)
        self._trials += 1
        self._idle = 0
        if sequence_id == self._probing:
            self._probing = None

    def forget(self, sequence_id: int) -> None:
        """See ``DraftLength``."""
        super().forget(sequence_id)
        if sequence_id == self._probing:
            self._probing = None

    def _try(self, lengths: list[int], candidates: Sequence[Candidate], plain: float) -> None:
        """Draft two tokens for every candidate without a long backlog."""
        for index, candidate in enumerate(candidates):
            if self.time.backlog(candidate.backlog, plain) < _LONGEST_TRIAL_STEPS * plain:
                lengths[index] = min(2, candidate.most)

    def _with_drafting(self, checking: list[float], drafting: list[Candidate]) -> list[float]:
        """Durations of steps with drafts; ``drafting`` has the candidate of each drafted token."""
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
        """The candidate with the least backlog, if there is time to try it.

        A trial that has begun continues, because its backlog may take several steps.
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
