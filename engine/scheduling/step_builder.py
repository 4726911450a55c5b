"""One step of a scheduler: its rows while it is planned, and its plan until the result is applied.

Plain Python.
"""

from __future__ import annotations

from collections.abc import Container

from engine.scheduling.limits import SchedulerLimits, SequenceBounds
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from engine.scheduling.sequence import Sequence


class StepBuilder:
    """The rows of one step: sequences are added, then the plan is made of them, once."""

    __slots__ = ("_bounds", "_highest", "_limits", "rows")

    def __init__(self, limits: SchedulerLimits, bounds: SequenceBounds) -> None:
        self._limits = limits
        self._bounds = bounds
        self.rows: list[tuple[Sequence, PlanRow]] = []
        """The sequences with their rows, in the order of the plan."""
        self._highest: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def tokens(self) -> int:
        return sum(row.count for _, row in self.rows)

    def add(self, sequence: Sequence, most: int) -> int:
        """A row of at most that many tokens; returns how many it has."""
        start = sequence.scheduled
        count = min(sequence.target - start, most, self._limits.max_tokens(start))
        scored = 0
        if sequence.scores_prompt and start < sequence.prompt_length - 1:
            left = self._limits.scored_tokens - sum(row.scored for _, row in self.rows)
            count = max(1, min(count, left))
            scored = min(count, sequence.prompt_length - 1 - start)
        sample = start + count == sequence.target
        table, limit = tuple(sequence.block_table), self._bounds.row_limit(sequence)
        choices = 1 + len(sequence.siblings) if sample else 1
        if scored or choices > 1:
            limit = 0
        row = PlanRow(sequence.sequence_id, start, count, table, sample, limit, choices, scored)
        self.rows.append((sequence, row))
        return count

    def drop_preempted(self) -> None:
        """Leave out those that have lost their blocks since they were added."""
        self.rows = [(sequence, row) for sequence, row in self.rows if not sequence.preempted]

    def make_plan(self, step: int, dropped: tuple[int, ...]) -> StepPlan:
        """The plan. Changes no sequence: see ``mark_planned``."""
        new, copies = [], []
        self._highest = []
        for sequence, row in self.rows:
            if sequence.copy_of is not None:
                own = row.block_table[row.start // self._limits.block_size]
                copies.append((sequence.copy_of, own))
            if not sequence.known_to_engine:
                new.append(_introduced(sequence))
            after = self._bounds.known_at_most(sequence) + 1
            drafted = min(row.limit, after + self._limits.draft_tokens)
            self._highest.append(max(after, drafted))
        rows = tuple(row for _, row in self.rows)
        return StepPlan(step, tuple(new), dropped, rows, tuple(copies))

    def mark_planned(self) -> None:
        """Count all of its sequences as scheduled. Nothing in here raises: all of them or none."""
        for (sequence, row), highest in zip(self.rows, self._highest, strict=True):
            sequence.copy_of = None
            sequence.known_to_engine = True
            if row.sample:
                sequence.highest = highest
            sequence.scheduled += row.count
            sequence.pending += row.sample
            sequence.in_flight += 1


def _introduced(sequence: Sequence) -> NewSequence:
    return NewSequence(
        sequence.sequence_id,
        tuple(sequence.token_ids),
        sequence.prompt_length,
        sequence.spec.sampling,
        sequence.stop_ids,
        sequence.choice,
        sequence.takes_prompt,
        sequence.spec.embeds,
        sequence.matcher,
    )


class PlanInFlight:
    """A plan of one scheduler.

    Its sequences land one after another. Each is counted once, even where taking in the result of
    one of them fails: ``Scheduler.fail`` goes on behind that one.
    """

    __slots__ = ("_landed", "copied", "rows", "stayed")

    def __init__(self, rows: list[tuple[Sequence, PlanRow]], copied: list[int]) -> None:
        self.rows = rows
        self.copied = copied
        """Blocks that it copies from, which are pinned until its end."""
        self.stayed: list[Sequence] = []
        """Sequences that had not left when they landed, and the siblings that they began."""
        self._landed = 0

    def land(self, left: Container[Sequence]) -> int | None:
        """Land the next sequence and return its place; None: all have landed.

        ``left`` has the sequences that have left the scheduler.
        """
        place = self._landed
        if place == len(self.rows):
            return None
        sequence, row = self.rows[place]
        self._landed += 1
        sequence.in_flight -= 1
        sequence.pending -= row.sample
        if sequence not in left:
            self.stayed.append(sequence)
        return place
