"""Speculation with overlapping steps: decides when drafts are worth waiting for tokens.

While a step runs, the host does not know the tokens that it samples, and uses negative placeholders
for them. To search for drafts after such a token, the host would have to wait for it. So it
searches after the token before, which is known. The first token found there is a guess of the token
that is being sampled, and the tokens after it are the draft that waiting would allow. When the step
has ended, the guess is compared with the sampled token, whether or not the host waited. So it is
noticed without cost that a sequence begins to copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.scheduling.plan import PlanRow, RunnerSequence
from engine.speculation.length import MAX_IN_A_STEP, DraftCosts, DraftLength, Proposal, towards
from engine.speculation.speculation import (
    MAX_DRAFT_TOKENS,
    Drafter,
    Speculation,
    make_drafter,
)

_ROW_SHARE = 0.002
"""Assumed cost of verifying one more draft token on a GPU, until this cost is measured. It is a
share of the duration of a step without drafts. A GPU reads the weights for a hundred rows in the
time of one row."""


_FEW = 4
"""Minimum number of measured steps without drafts before steps with drafts are compared with
them."""
_BELIEVED_STEPS = 256
"""How often a measured duration of steps without drafts may be used. After that, some steps run
without drafts, at most one in a hundred, to measure it again: it changes with the sequences'
lengths."""
_OVERLAP_REACH = 4
"""Maximum draft tokens in the first steps that are tried, in addition to one per sequence. A step
with twice the rows takes hardly longer on a GPU, except for large batches."""


@dataclass(slots=True)
class _Plain:
    """Measured duration of steps without drafts, for one batch size."""

    seconds: float
    seen: int = 1
    asked: int = 0
    """How often this duration was used since it was last measured."""


class OverlapCosts:
    """Estimates the cost of drafts when steps overlap: a step that verifies drafts cannot be
    started early.

    Without drafts, a step is started while the previous one runs, so the host's part costs nothing.
    A step that verifies drafts needs the newest tokens, so it waits for the previous one, and the
    next step waits for its result. The comparison is between

        a step without drafts       from one end to the next, with overlap
        a step with drafts          from one end to the next, with the wait
        the first step with drafts  the same, and one more wait: that of the step after the last one
    """

    def __init__(self, waiting: DraftCosts) -> None:
        """``waiting`` has the measured durations of steps that did not overlap, with and without
        drafts.

        The caller adds further measurements to ``waiting``.
        """
        self._waiting = waiting
        self._overlapping: dict[int, _Plain] = {}
        self._wait = 0.0
        """Extra seconds of a step that waits for the previous one, at the latest batch size for
        which this was computed."""

    def observe(self, batch: int, seconds: float) -> None:
        """Record that a step without drafts ended ``seconds`` after the previous one."""
        known = self._overlapping.get(batch)
        if known is None:
            self._overlapping[batch] = _Plain(seconds)
            return
        known.seconds = towards(known.seconds, seconds)
        known.seen = _FEW - 1 if known.asked > _BELIEVED_STEPS else known.seen + 1
        known.asked = 0

    def seconds(self, batch: int, rows: int, most: int, *, first: bool) -> list[float] | None:
        """Estimate the durations with 0, 1, 2, … draft tokens, in seconds, for a step that overlaps
        if it has no drafts.

        The list ends at ``most`` draft tokens, or at the number that may be tried. ``first``: true
        if the previous step has no drafts, and the host has not waited for it yet.

        None if too little is measured, or if prompts are computed (then ``rows`` is more than
        ``batch``), because the host's part of such a step is not measured.
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
        # Waiting makes no step shorter, whatever the measurements are.
        return [plain, *(max(plain, seconds) + again for seconds in waiting[1:])]

    def _plain(self, batch: int) -> float | None:
        known = self._overlapping.get(batch)
        if known is None or known.seen < _FEW:
            return None
        known.asked += 1
        return None if known.asked > _BELIEVED_STEPS else known.seconds


@dataclass(frozen=True, slots=True)
class _Guess:
    """A guess of the token that a running step samples for a sequence."""

    place: int
    """Index of the guessed token in the sequence."""
    token: int
    evidence: int


class OverlapSpeculation(Speculation):
    """Drafts from a sequence's tokens on a GPU whose steps overlap. Owned by the engine thread."""

    def __init__(
        self,
        drafter: Drafter,
        length: DraftLength | None = None,
        costs: OverlapCosts | None = None,
    ) -> None:
        """``length`` and ``costs`` are for tests; by default, both use measured durations."""
        waiting = DraftCosts(_ROW_SHARE)
        super().__init__(drafter, length or DraftLength(waiting))
        self._costs = costs or OverlapCosts(waiting)
        self._guesses: dict[int, _Guess] = {}

    def promises(self, rows: Sequence[PlanRow], known: Mapping[int, RunnerSequence]) -> bool:
        """Whether drafts for these rows are expected to gain more than the wait for the running
        step costs.

        The last token of a sequence may be a placeholder.
        """
        proposals = [
            proposal
            for row in rows
            if row.limit and (proposal := self._guess(row, known[row.sequence_id].token_ids))
        ]
        if not proposals:
            return False
        batch, total = _sizes(rows)
        most = min(MAX_IN_A_STEP, sum(proposal.tokens for proposal in proposals))
        costs = self._costs.seconds(batch, total, most, first=True)
        return costs is not None and any(self._length.choose(batch, total, proposals, costs))

    def extend_overlapping(
        self, rows: Sequence[PlanRow], known: Mapping[int, RunnerSequence]
    ) -> list[PlanRow]:
        """Add to a step's rows the drafts that are expected to pay. Without drafts, the step would
        overlap the previous one. No token may be a placeholder."""
        return self.extend(rows, known, self._step_costs)

    def observe_overlapping(self, batch: int, seconds: float) -> None:
        """Record that a step without drafts ended ``seconds`` after the end of the previous step,
        which it overlapped."""
        self._costs.observe(batch, seconds)

    def forget(self, sequence_id: int) -> None:
        super().forget(sequence_id)
        self._guesses.pop(sequence_id, None)

    def _step_costs(self, batch: int, rows: int, most: int) -> list[float] | None:
        return self._costs.seconds(batch, rows, most, first=False)

    def _guess(self, row: PlanRow, token_ids: list[int]) -> Proposal | None:
        """Search for a draft after a sequence's last known token. If a placeholder follows that
        token, the draft's first token is kept as a guess of the placeholder's token."""
        self._compare(row.sequence_id, token_ids)
        most = row.limit - len(token_ids) - 1
        if most <= 0:
            return None
        names = [token_ids.pop()] if token_ids[-1] < 0 else []
        try:
            draft = self._drafter.propose(
                row.sequence_id, token_ids, min(MAX_DRAFT_TOKENS, most + len(names))
            )
        finally:
            token_ids += names
        if draft is None:
            return None
        if names:
            place = len(token_ids) - 1
            self._guesses[row.sequence_id] = _Guess(place, draft.token_ids[0], draft.evidence)
        return Proposal(row.sequence_id, draft.evidence, len(draft.token_ids), len(names))

    def _compare(self, sequence_id: int, token_ids: list[int]) -> None:
        """Compare the sequence's guess with the token that was sampled, which is known by now, and
        record the result."""
        guess = self._guesses.pop(sequence_id, None)
        if guess is not None and guess.place < len(token_ids):
            kept = token_ids[guess.place] == guess.token
            self._length.verified(sequence_id, guess.evidence, 1, int(kept))


def make_overlap_speculation(name: str) -> OverlapSpeculation | None:
    """Make the overlapping speculation for a method that uses only a sequence's tokens, by name;
    None for ``none``.

    Raises ValueError for another name.
    """
    drafter = make_drafter(name)
    return None if drafter is None else OverlapSpeculation(drafter)


def verification_rows(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Split rows with drafts for a GPU: a row with k draft tokens becomes k + 1 rows of one token.

    These rows all have the sequence's block table, and each is one token longer than the row
    before. Each layer stores the keys and values of all rows before any row attends, so each row
    sees those before it. So a step with drafts uses the kernels and the captured sizes of a step
    without: a row's bits are the same.
    """
    return tuple(part for row in rows for part in _parts(row))


def _parts(row: PlanRow) -> list[PlanRow]:
    if not row.draft:
        return [row]
    places = range(row.start, row.start + row.count)
    return [replace(row, start=place, count=1, draft=()) for place in places]


def _sizes(rows: Sequence[PlanRow]) -> tuple[int, int]:
    """Count the sequences that sample, and the tokens that are computed."""
    return sum(row.sample for row in rows), sum(row.count for row in rows)
