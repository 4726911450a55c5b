"""Drafts in a step: which sequences check how many tokens, and what of them is kept.

``Speculation`` drafts from the tokens, ``engine.speculation.model.speculation`` with a
model. The engine
drafts, not the scheduler: while two plans are in flight it alone has the newest tokens.
A plan says how far a sequence may go; see ``PlanRow.limit``. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.scheduling.plan import KnownSequence, PlanRow
from engine.speculation.drafter import Draft, Drafter, NgramDrafter
from engine.speculation.length import MAX_IN_A_STEP, DraftLength, Proposal
from engine.speculation.model_drafter import ComputedRow
from engine.step.step import CoreShare

DRAFTERS = ("none", "ngram", "draft", "eagle", "medusa")
"""By the names that the configuration takes."""
TOKEN_DRAFTERS = ("none", "ngram")
"""Those of them that look at tokens alone."""
MAX_DRAFT_TOKENS = 13
"""Of one sequence in one step: with its own token a pass of linear.h."""

CostsOf = Callable[[int, int, int], list[float] | None]
"""What steps with 0, 1, … drafted tokens take; see ``DraftLength.choose``. Asked with the sequences
that decode, the tokens without drafts, and the most drafted tokens. None: none is to be checked."""


@dataclass(frozen=True, slots=True)
class DraftedRow:
    """A row as it is computed: behind its own tokens come those of a draft."""

    row: PlanRow
    """Its ``count`` has the drafted tokens in it."""
    draft: tuple[int, ...]


class StepSpeculation(Protocol):
    """What the runner asks, step by step; see the module's text."""

    @property
    def drafter(self) -> str:
        """Its name."""

    @property
    def watches(self) -> bool:
        """Whether ``computed`` is to be called."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What ``computed`` is to be given of the model; see ``StepInput.hidden_layers``."""

    def extend(
        self, rows: Sequence[DraftedRow], known: Mapping[int, KnownSequence]
    ) -> list[DraftedRow]:
        """The rows with the drafts that pay; ``known`` has every row's sequence by its id."""

    def takes_prompt(self) -> bool:
        """Whether another sequence's prompt is to be taken in as it is computed."""

    def verified(self, sequence_id: int, drafted: int, kept: int) -> None:
        """Of the sequence's drafted tokens in the step that has ended the first were right."""

    def computed(
        self,
        rows: Sequence[ComputedRow],
        hidden: torch.Tensor | None,
    ) -> None:
        """A step has been computed, and its tokens are drawn; see ``ModelDrafter.computed``."""

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """A step in which ``batch`` sequences decoded, and nothing else, took so long in all."""

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's state."""

    def use_threads(self, threads: int) -> None:
        """See ``StepModel``."""

    def share_cores(self, share: CoreShare) -> None:
        """See ``ModelDrafter``."""


class Speculation:
    """Drafts by a ``Drafter``, which looks at tokens alone. Implements ``StepSpeculation``."""

    watches = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, drafter: Drafter, length: DraftLength | None = None) -> None:
        """``length`` says how much of each draft is checked; without it what is measured does."""
        self._drafter = drafter
        self._length = length or DraftLength()
        self._drafts: dict[int, Draft] = {}

    @property
    def drafter(self) -> str:
        """Its name."""
        return self._drafter.name

    def extend(
        self,
        rows: Sequence[DraftedRow],
        known: Mapping[int, KnownSequence],
        costs_of: CostsOf | None = None,
    ) -> list[DraftedRow]:
        """See ``StepSpeculation``. ``costs_of`` stands for what was observed."""
        self._drafts = {}
        for drafted in rows:
            row = drafted.row
            if row.limit:
                token_ids = known[row.sequence_id].token_ids
                most = min(MAX_DRAFT_TOKENS, row.limit - len(token_ids) - 1)
                if most > 0:
                    self._propose(row.sequence_id, token_ids, most)
        if not self._drafts:
            return list(rows)
        proposals = [
            Proposal(sequence_id, draft.evidence, len(draft.token_ids))
            for sequence_id, draft in self._drafts.items()
        ]
        batch = sum(drafted.row.sample for drafted in rows)
        total = sum(drafted.row.count for drafted in rows)
        costs = None
        if costs_of is not None:
            most = min(MAX_IN_A_STEP, sum(proposal.tokens for proposal in proposals))
            costs = costs_of(batch, total, most)
            if costs is None:
                return list(rows)
        lengths = self._length.choose(batch, total, proposals, costs)
        chosen = dict(zip(self._drafts, lengths, strict=True))
        return [self._with_draft(drafted, chosen) for drafted in rows]

    def _propose(self, sequence_id: int, token_ids: list[int], most: int) -> None:
        draft = self._drafter.propose(sequence_id, token_ids, most)
        if draft is not None:
            self._drafts[sequence_id] = draft

    def _with_draft(self, drafted: DraftedRow, chosen: dict[int, int]) -> DraftedRow:
        row = drafted.row
        count = chosen.get(row.sequence_id, 0)
        if not count:
            return drafted
        return with_draft(row, self._drafts[row.sequence_id].token_ids[:count])

    def verified(self, sequence_id: int, drafted: int, kept: int) -> None:
        """Of the sequence's drafted tokens in the step that has ended the first were right."""
        if drafted:
            evidence = self._drafts[sequence_id].evidence
            self._length.verified(sequence_id, evidence, drafted, kept)

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """See ``DraftLength.observe``."""
        self._length.observe(batch, drafted, seconds)

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's state."""
        self._drafter.forget(sequence_id)
        self._length.forget(sequence_id)

    def takes_prompt(self) -> bool:
        """There is nothing to take in."""
        return False

    def computed(self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None) -> None:
        """It is not called: there is nothing to watch."""

    def use_threads(self, threads: int) -> None:
        """What looks at tokens takes none."""

    def share_cores(self, share: CoreShare) -> None:
        """What looks at tokens takes none."""


def make_speculation(name: str) -> Speculation | None:
    """By the name of a drafter that looks at tokens alone; None for ``none``.

    Raises ValueError for another name.
    """
    drafter = make_drafter(name)
    return None if drafter is None else Speculation(drafter)


def make_drafter(name: str) -> Drafter | None:
    """As ``make_speculation``."""
    if name not in TOKEN_DRAFTERS:
        raise ValueError(f"drafter {name!r} is not one that looks at tokens alone")
    return None if name == "none" else NgramDrafter()


def with_draft(row: PlanRow, draft: Sequence[int]) -> DraftedRow:
    """A row of a sequence's last token, with a draft behind it."""
    return DraftedRow(with_place(row, row.start, row.count + len(draft)), tuple(draft))


def with_place(row: PlanRow, start: int, count: int) -> PlanRow:
    """The row for other tokens of its sequence."""
    return replace(row, start=start, count=count)


def kept_tokens(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many tokens of a draft are those drawn in their places."""
    kept = 0
    while kept < len(draft) and draft[kept] == drawn[kept]:
        kept += 1
    return kept
