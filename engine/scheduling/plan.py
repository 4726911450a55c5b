"""Step plans: how a step is built, what the engine receives, and what it returns.

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
    """A sequence that the engine does not know, or has dropped."""

    sequence_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    """Tokens that end the sequence; they are forbidden before ``min_tokens``."""
    choice: int = 0
    """Number of this choice of the request; it is part of the noise of its draws."""
    takes_prompt: bool = True
    """Whether a drafter may process the prompt while it is computed."""
    embeds: bool = False
    """Whether the embedding is wanted, with the next token."""
    matcher: TokenMatcher | None = None
    """Matcher of the grammar, at the start of the answer; the engine uses a copy."""
    reasoning: ReasoningSpan | None = None
    """The tokens around the reasoning, if the reasoning has a budget or precedes a grammar."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A sequence's part of a step: compute the KV of tokens ``start … start + count - 1``.

    A row of one token that samples always computes the newest token that the engine has. If drafts
    were accepted in a step that was in flight when this one was planned, that token is after
    ``start``. The block table has a block for it.
    """

    sequence_id: int
    start: int
    count: int
    block_table: tuple[int, ...]
    sample: bool
    """Whether the row ends with the last known token, so that the next token is drawn."""
    limit: int = 0
    """Maximum tokens of the sequence after the step, which bounds drafts. 0: no drafts."""
    choices: int = 1
    """Number of choices that draw their first token here. They share the logits; each has its own
    noise. The first choice is the sequence itself; the others become new sequences."""
    scored: int = 0
    """Number of leading tokens for which the next token's log probability is wanted. That next
    token is known already, as part of the prompt."""
    draft: tuple[int, ...] = ()
    """Drafted tokens after the row's own token; ``count`` includes them. The engine adds them: a
    plan has none."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step. The engine appends sampled tokens to its own copy of each sequence."""

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
        """Whether every sequence computes one token, which makes the step short."""
        return all(row.count == 1 for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled: one entry for each row of the plan, in its order."""

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    """New tokens of each row. A row that samples has one, and one more for each accepted token of
    its draft. A row with ``choices`` has the first token of each choice."""
    seconds: float = 0.0
    failed: tuple[tuple[int, str], ...] = ()
    """Rows whose sequences cannot continue, by their index in the plan, and the reason."""
    drafted: int = 0
    """Number of drafted tokens that were checked, in all rows."""
    accepted: int = 0
    """Number of these tokens that were accepted."""
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    """One for each of a row's tokens, or None if the row wants none; empty if no row does."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """One for each token that a row scores; empty if no row does."""
    embeddings: tuple[tuple[float, ...] | None, ...] = ()
    """Embedding of each row that wants one, fp32 [hidden_size]; empty if no row does."""
    left_out: tuple[int, ...] = ()
    """Rows that were not computed, by their index in the plan: an earlier step failed, and their
    sequences lack its tokens."""


@dataclass(slots=True)
class RunnerSequence:
    """A sequence as the engine knows it, with its current tokens. Owned by the engine thread."""

    token_ids: list[int]
    """Tokens of prompt and output; the runner appends to them."""
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    choice: int
    takes_prompt: bool = True
    """Whether a drafter processes the prompt while it is computed."""
    embeds: bool = False
    """Whether the embedding is wanted, with the next token."""

    @classmethod
    def of(cls, new: NewSequence) -> RunnerSequence:
        """The initial state of a new sequence."""
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

    The sequences of a step in flight land one after another. Each is counted once, even if the
    scheduler fails to apply one of the results: ``Scheduler.fail`` continues after that one.
    """

    __slots__ = ("_bounds", "_highest", "_landed", "_limits", "copied", "rows", "stayed")

    def __init__(self, limits: SchedulerLimits, bounds: SequenceBounds) -> None:
        self._limits = limits
        self._bounds = bounds
        self.rows: list[tuple[Sequence, PlanRow]] = []
        """The sequences with their rows, in the order of the plan."""
        self.copied: list[int] = []
        """Blocks that the plan copies from; pinned until the step is over."""
        self.stayed: list[Sequence] = []
        """Sequences that were still there when they landed, and the siblings that they started."""
        self._highest: list[int] = []
        self._landed = 0

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def tokens(self) -> int:
        return sum(row.count for _, row in self.rows)

    def add(self, sequence: Sequence, most: int) -> int:
        """Add a row of at most ``most`` tokens; returns its number of tokens."""
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
        """Remove the sequences that were preempted since they were added."""
        self.rows = [(sequence, row) for sequence, row in self.rows if not sequence.preempted]

    def make_plan(self, step: int, dropped: tuple[int, ...]) -> StepPlan:
        """Make the plan. It changes no sequence: see ``mark_planned``."""
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
        """Count all sequences as scheduled. Nothing here raises: all are counted or none."""
        for (sequence, row), highest in zip(self.rows, self._highest, strict=True):
            sequence.copy_of = None
            sequence.known_to_engine = True
            if row.sample:
                sequence.highest = highest
            sequence.scheduled += row.count
            sequence.pending += row.sample
            sequence.in_flight += 1

    def land(self, left: Container[Sequence]) -> int | None:
        """Land the next sequence and return its index; None if all have landed.

        ``left`` contains the sequences that have left the scheduler.
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
