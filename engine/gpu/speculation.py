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
from dataclasses import dataclass, replace

from engine.scheduling.plan import KnownSequence, PlanRow
from engine.speculation.length import MAX_IN_A_STEP, DraftCosts, DraftLength, Proposal, towards
from engine.speculation.speculation import (
    MAX_DRAFT_TOKENS,
    Drafter,
    Speculation,
    make_drafter,
)

_ROW_SHARE = 0.002
"""What a drafted token is taken to cost where nothing is known: this part of a step without. A GPU
reads the weights for a hundred rows in the time that it takes for one."""


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
        known.seconds = towards(known.seconds, seconds)
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

    def promises(self, rows: Sequence[PlanRow], known: Mapping[int, KnownSequence]) -> bool:
        """Whether drafts for these rows may be worth the wait for the step that runs.

        A sequence's last token may be a name.
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
        self, rows: Sequence[PlanRow], known: Mapping[int, KnownSequence]
    ) -> list[PlanRow]:
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


def verification_rows(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """The rows as a GPU computes them: a sequence with k drafted tokens is k + 1 rows of one token.

    All of them have its block table, and lengths that grow. Each layer stores the keys and values
    of all rows before any of them attends, so that each row sees those before it. So a step with
    drafts takes the kernels and the captured sizes of one without: a row's bits are the same.
    """
    return tuple(part for row in rows for part in _parts(row))


def _parts(row: PlanRow) -> list[PlanRow]:
    if not row.draft:
        return [row]
    places = range(row.start, row.start + row.count)
    return [replace(row, start=place, count=1, draft=()) for place in places]


def _sizes(rows: Sequence[PlanRow]) -> tuple[int, int]:
    """How many sequences draw, and how many tokens are computed."""
    return sum(row.sample for row in rows), sum(row.count for row in rows)
