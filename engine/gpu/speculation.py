"""Drafts where steps overlap: when it pays to wait for a step's tokens, and how drafts are checked.

While a step runs, the host does not know the token that it draws for a sequence: it has a name for
it, a negative number. Looking for drafts behind that token costs the wait for it. So it is looked
for behind the token before, which is known: the first token found there is a guess of the one that
is being drawn, and those behind it are what waiting promises. Whether such guesses come true is
seen when the step has ended, waited for or not, so that a sequence that begins to copy is noticed
at no cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.scheduling.plan import KnownSequence, PlanRow
from engine.speculation.costs import DraftCosts, OverlapCosts
from engine.speculation.drafter import Drafter
from engine.speculation.length import MAX_IN_A_STEP, DraftLength, Proposal
from engine.speculation.speculation import (
    MAX_DRAFT_TOKENS,
    DraftedRow,
    Speculation,
    make_drafter,
    with_place,
)

_ROW_SHARE = 0.002
"""What a drafted token is taken to cost where nothing is known: this part of a step without. A GPU
reads the weights for a hundred rows in the time that it takes for one."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """What was thought that a running step draws for a sequence."""

    place: int
    """Of the token in the sequence."""
    token: int
    evidence: int


class OverlapSpeculation(Speculation):
    """See the module's text. Owned by the engine thread."""

    def __init__(
        self,
        drafter: Drafter,
        length: DraftLength | None = None,
        costs: OverlapCosts | None = None,
    ) -> None:
        """``length`` and ``costs`` are for tests: without them what is measured decides."""
        waiting = DraftCosts(_ROW_SHARE)
        super().__init__(drafter, length or DraftLength(waiting))
        self._costs = costs or OverlapCosts(waiting)
        self._guesses: dict[int, _Guess] = {}

    def promises(self, rows: Sequence[DraftedRow], known: Mapping[int, KnownSequence]) -> bool:
        """Whether drafts for these rows may be worth the wait for the step that runs.

        A sequence's last token may be a name.
        """
        proposals = [
            proposal
            for drafted in rows
            if drafted.row.limit
            and (proposal := self._guess(drafted.row, known[drafted.row.sequence_id].token_ids))
        ]
        if not proposals:
            return False
        batch, total = _sizes(rows)
        most = min(MAX_IN_A_STEP, sum(proposal.tokens for proposal in proposals))
        costs = self._costs.seconds(batch, total, most, first=True)
        return costs is not None and any(self._length.choose(batch, total, proposals, costs))

    def extend_overlapping(
        self, rows: Sequence[DraftedRow], known: Mapping[int, KnownSequence]
    ) -> list[DraftedRow]:
        """The rows of a step that would overlap, with the drafts that pay; no token is a name."""
        return self.extend(rows, known, self._step_costs)

    def observe_overlapping(self, batch: int, seconds: float) -> None:
        """See ``OverlapCosts.observe``."""
        self._costs.observe(batch, seconds)

    def forget(self, sequence_id: int) -> None:
        super().forget(sequence_id)
        self._guesses.pop(sequence_id, None)

    def _step_costs(self, batch: int, rows: int, most: int) -> list[float] | None:
        return self._costs.seconds(batch, rows, most, first=False)

    def _guess(self, row: PlanRow, token_ids: list[int]) -> Proposal | None:
        """What the sequence has behind its last known token."""
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
        """A guess with what was drawn, which is known by now."""
        guess = self._guesses.pop(sequence_id, None)
        if guess is not None and guess.place < len(token_ids):
            kept = token_ids[guess.place] == guess.token
            self._length.verified(sequence_id, guess.evidence, 1, int(kept))


def make_overlap_speculation(name: str) -> OverlapSpeculation | None:
    """By the name of the drafter; None for ``none``. Raises ValueError for another name."""
    drafter = make_drafter(name)
    return None if drafter is None else OverlapSpeculation(drafter)


def verification_rows(rows: Sequence[DraftedRow]) -> tuple[PlanRow, ...]:
    """The rows as a GPU computes them: a sequence with k drafted tokens is k + 1 rows of one token.

    All of them have its block table, and lengths that grow. Each layer stores the keys and values
    of all rows before any of them attends, so that each row sees those before it. So a step with
    drafts takes the kernels and the captured sizes of one without: a row's bits are the same.
    """
    return tuple(part for drafted in rows for part in _parts(drafted))


def _parts(drafted: DraftedRow) -> list[PlanRow]:
    row = drafted.row
    if not drafted.draft:
        return [row]
    return [with_place(row, row.start + place, 1) for place in range(row.count)]


def _sizes(rows: Sequence[DraftedRow]) -> tuple[int, int]:
    """How many sequences draw, and how many tokens are computed."""
    return sum(each.row.sample for each in rows), sum(each.row.count for each in rows)
