"""Step plans: how one step is built, what the engine is told of it, and what it brings.

A step of a scheduler is built row by row, becomes a plan, and is in flight until its result is
applied. Plain Python.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from baton.grammar import TokenMatcher
from baton.logprobs import TokenLogprobs
from baton.reasoning import ReasoningSpan
from baton.sampling_params import SamplingParams
from engine.scheduling.sequence import SchedulerLimits, Sequence, SequenceBounds


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the engine has not seen, or has dropped since."""

    sequence_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    """Tokens that end the sequence; forbidden before ``min_tokens``."""
    choice: int = 0
    """Which of its request's answers it is: enters the noise."""
    takes_prompt: bool = True
    """Whether a drafter may take the prompt in as it is computed."""
    embeds: bool = False
    """Whether its embedding is wanted, with the next token."""
    matcher: TokenMatcher | None = None
    """That of its grammar, at the start of the answer; the engine follows a copy of it."""
    reasoning: ReasoningSpan | None = None
    """Where its reasoning lies, if that bounds it, or its grammar."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A sequence's part of a step: compute the KV of tokens ``start … start + count - 1``.

    A row of one token that samples computes the last token that the engine has, which lies behind
    ``start`` where drafts were right in a step that was in flight when this one was planned. Its
    block table has a block for that.
    """

    sequence_id: int
    start: int
    count: int
    block_table: tuple[int, ...]
    sample: bool
    """Whether the last of these tokens is the last known one, so that the next is drawn."""
    limit: int = 0
    """The most tokens that the sequence may have after the step: so far the engine may draft. 0: it
    drafts nothing."""
    choices: int = 1
    """How many choices draw their first token here: from the same logits, each with its noise. The
    first is the sequence's own; the others become sequences of their own."""
    scored: int = 0
    """Of how many of these tokens, from the first, the next one's log probability is wanted: the
    next one is known already, a token of the prompt."""
    draft: tuple[int, ...] = ()
    """Drafted tokens behind its own, of which ``count`` has them in it. The engine adds them: a
    plan has none."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step. The engine appends what it samples to its own copy of the tokens."""

    step: int
    new: tuple[NewSequence, ...]
    dropped: tuple[int, ...]
    rows: tuple[PlanRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks to copy before the rows are computed: (from, to)."""

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def decodes_only(self) -> bool:
        """Whether every sequence computes one token: a short step."""
        return all(row.count == 1 for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled: one entry for each row of the plan, in its order."""

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    """Of a row that samples one token, and one more for each token of its draft that was right; of
    a row with ``choices`` the first token of each."""
    seconds: float = 0.0
    failed: tuple[tuple[int, str], ...] = ()
    """Rows whose sequences cannot go on, by their place in the plan, and why."""
    drafted: int = 0
    """Tokens that were drafted and checked, of all rows."""
    accepted: int = 0
    """Those of them that were right."""
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    """One for each of a row's tokens, None for a row that wants none; empty if no row does."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """One for each token that a row scores; empty if no row does."""
    embeddings: tuple[tuple[float, ...] | None, ...] = ()
    """fp32 [hidden_size] of a row whose sequence is embedded; empty if there is none."""
    left_out: tuple[int, ...] = ()
    """Rows that were not computed, by their place in the plan: an earlier step failed, and their
    sequences lack its tokens."""


@dataclass(slots=True)
class KnownSequence:
    """What the engine was told of a sequence, and its tokens by now. Owned by the engine thread."""

    token_ids: list[int]
    """Prompt and output; the runner appends to it."""
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    choice: int
    takes_prompt: bool = True
    """Whether a drafter takes the prompt in as it is computed."""
    embeds: bool = False
    """Whether its embedding is wanted, with the next token."""

    @classmethod
    def of(cls, new: NewSequence) -> KnownSequence:
        """As it was when it came."""
        return cls(
            list(new.token_ids),
            new.prompt_length,
            new.sampling,
            new.stop_ids,
            new.choice,
            embeds=new.embeds,
        )


class ScheduledStep:
    """One step of a scheduler.

        planned: ``add``, ``make_plan``, ``mark_planned`` → in flight: ``land`` → over

    The sequences of a step in flight land one after another. Each is counted once, even where the
    scheduler fails to apply the result of one of them: ``Scheduler.fail`` goes on behind that one.
    """

    __slots__ = ("_bounds", "_highest", "_landed", "_limits", "copied", "rows", "stayed")

    def __init__(self, limits: SchedulerLimits, bounds: SequenceBounds) -> None:
        self._limits = limits
        self._bounds = bounds
        self.rows: list[tuple[Sequence, PlanRow]] = []
        """The sequences with their rows, in the order of the plan."""
        self.copied: list[int] = []
        """Blocks that the plan copies from. They are pinned until the step is over."""
        self.stayed: list[Sequence] = []
        """Sequences that had not left when they landed, and the siblings that they began."""
        self._highest: list[int] = []
        self._landed = 0

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
        new, copies, highest = [], [], []
        for sequence, row in self.rows:
            if sequence.copy_of is not None:
                own = row.block_table[row.start // self._limits.block_size]
                copies.append((sequence.copy_of, own))
            if not sequence.known_to_engine:
                new.append(_introduced(sequence))
            after = self._bounds.known_at_most(sequence) + 1
            drafted = min(row.limit, after + self._limits.draft_tokens)
            highest.append(max(after, drafted))
        self._highest = highest
        self.copied = [source for source, _ in copies]
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
        sequence.spec.reasoning,
    )
