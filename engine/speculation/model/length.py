"""How many tokens a drafter with a model of its own is asked for: before it drafts, by what it

takes. Chances are learned by a token's place in its draft, and by how the sequence has done lately.
Plain Python: no clock, no I/O. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.length import MAX_IN_A_STEP, DraftLength, Proposal, best_count, towards

EVIDENCE = 4
"""Of a draft's first token, in the measure of ``DraftLength``: a model guesses better than a single
token that occurred before."""
PIECE = 64
"""Most tokens of a backlog that a sequence takes in beside a step: others wait for it."""
_SPREAD_STEPS = 32
"""A backlog is paid by so many of the steps that follow."""
_RATE = 0.05
"""What a step counts for in whether drafts pay lately."""
_MIN_PAYING = 0.25
"""Drafts pay if so much of the latest steps were expected to gain by them."""
_TRIALS = 16
"""So many drafts are made whatever they promise, to see what the drafter takes and is worth."""
_LONGEST_TRIAL_STEPS = 20.0
"""No backlog is taken in for one that takes as long as so many steps."""
_PROBE_SHARE = 0.02
"""Of the time, for drafts that do not pay as far as is known: a part of it goes into what the
drafter has missed meanwhile."""
_IDLE_STEPS, _LOOK_EVERY = 32, 8
"""After so many steps in which nothing was drafted, only one of so many is looked at: to look takes
time as well."""
_PROMPT_EVERY = 15
"""Of so many prompts one is taken in where drafts do not pay, to see whether they would. An odd
number: for a prompt that is computed elsewhere it is asked twice, when blocks are promised, and
when they have come."""


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
        self._steps[key] = towards(self._steps.get(key), found)

    def observe_tokens(self, tokens: int, seconds: float) -> None:
        """Taking in so many tokens, of a prompt or a backlog, took so long."""
        self._token = towards(self._token, seconds / tokens)

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


def _power_of_two(count: int) -> int:
    """To a power of two, upwards."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that may draft, and what it must take in before."""

    sequence_id: int
    most: int
    backlog: int


class ModelDraftLength(DraftLength):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.time = DraftingTime()
        self._paying = 1.0
        self._trials = 0
        self._probing: int | None = None
        """The sequence that is tried, from the purse, until it has drafted."""
        self._prompts = 0
        self._rows = 0
        self._idle = 0
        """Steps of so many rows in a row in which nothing was drafted."""
        self._unpaid = 0
        """Steps of which the purse has not got its share."""

    @property
    def pays(self) -> bool:
        """Whether drafts have paid lately."""
        return self._paying >= _MIN_PAYING

    def takes_prompt(self) -> bool:
        """Whether the drafter is to take in a new sequence's prompt as it is computed."""
        self._prompts += 1
        return self.pays or self._prompts % _PROMPT_EVERY == 0

    def looks(self, rows: int) -> bool:
        """Whether to ask ``wanted`` before a step of so many rows. Called for every step."""
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
        """Two tokens of every candidate that is not far behind."""
        for index, candidate in enumerate(candidates):
            if self.time.backlog(candidate.backlog, plain) < _LONGEST_TRIAL_STEPS * plain:
                lengths[index] = min(2, candidate.most)

    def _with_drafting(self, checking: list[float], drafting: list[Candidate]) -> list[float]:
        """What steps take with drafts: ``drafting`` says whose token each one is."""
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
        """The candidate with the least backlog, where there is time to try it.

        Once begun it goes on: its backlog may take several steps.
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
