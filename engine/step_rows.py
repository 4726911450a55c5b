"""The rows of the step that is being planned, and the plan that they make. Plain Python."""

from __future__ import annotations

from collections.abc import Iterator

from engine.plan import NewSequence, PlanRow, StepPlan
from engine.scheduler_limits import SchedulerLimits
from engine.sequence import Sequence
from engine.sequence_bounds import SequenceBounds


class StepRows:
    """One scheduler's, for one step: sequences are added, then the plan is made of them, once."""

    __slots__ = ("_bounds", "_limits", "_rows")

    def __init__(self, limits: SchedulerLimits, bounds: SequenceBounds) -> None:
        self._limits = limits
        self._bounds = bounds
        self._rows: list[tuple[Sequence, PlanRow]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def tokens(self) -> int:
        return sum(row.count for _, row in self._rows)

    def sequences(self) -> Iterator[Sequence]:
        """The sequences, in the order of their rows."""
        return (sequence for sequence, _ in self._rows)

    def add(self, sequence: Sequence, most: int) -> int:
        """A row of at most that many tokens; returns how many it has."""
        start = sequence.scheduled
        count = min(sequence.target - start, most, self._limits.most_tokens(start))
        scored = 0
        if sequence.scores_prompt and start < sequence.prompt_length - 1:
            left = self._limits.scored_tokens - sum(row.scored for _, row in self._rows)
            count = max(1, min(count, left))
            scored = min(count, sequence.prompt_length - 1 - start)
        sample = start + count == sequence.target
        table, limit = tuple(sequence.block_table), self._bounds.row_limit(sequence)
        choices = 1 + len(sequence.siblings) if sample else 1
        if scored or choices > 1:
            limit = 0
        row = PlanRow(sequence.sequence_id, start, count, table, sample, limit, choices, scored)
        self._rows.append((sequence, row))
        return count

    def drop_preempted(self) -> None:
        """Leave out those that have lost their blocks since they were added."""
        self._rows = [(sequence, row) for sequence, row in self._rows if not sequence.preempted]

    def make_plan(self, step: int, dropped: tuple[int, ...]) -> StepPlan:
        """The plan; its sequences count as scheduled from now on."""
        new, copies = [], []
        for sequence, row in self._rows:
            if sequence.copy_of is not None:
                own = row.block_table[row.start // self._limits.block_size]
                copies.append((sequence.copy_of, own))
                sequence.copy_of = None
            if not sequence.known_to_engine:
                sequence.known_to_engine = True
                new.append(_introduced(sequence))
            if row.sample:
                after = self._bounds.known_at_most(sequence) + 1
                drafted = min(row.limit, after + self._limits.draft_tokens)
                sequence.highest = max(after, drafted)
            sequence.scheduled += row.count
            sequence.pending += row.sample
            sequence.in_flight += 1
        rows = tuple(row for _, row in self._rows)
        return StepPlan(step, tuple(new), dropped, rows, tuple(copies))


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
    )
