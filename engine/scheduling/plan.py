"""Step plans: how a step is built, what the engine receives, and what it returns.

A step of a scheduler is built row by row, becomes a plan, and is in flight until its result is
applied. Plain Python.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

from baton.grammar import TokenMatcher
from baton.logprobs import TokenLogprobs
from baton.reasoning import ReasoningSpan
from baton.sampling_params import SamplingParams
from engine.scheduling.sequence import SchedulerLimits, Sequence, SequenceBounds


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the engine does not have, because the sequence is new or the engine has
    dropped it."""

    sequence_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    """Tokens that end the sequence. They cannot be drawn before ``min_tokens``."""
    choice: int = 0
    """Number of this choice within its request; it is an input of the sampling noise."""
    takes_prompt: bool = True
    """Whether a drafter may process the prompt while it is computed."""
    embeds: bool = False
    """Whether the request wants the sequence's embedding. It is returned with the next token."""
    matcher: TokenMatcher | None = None
    """Matcher of the grammar, at the start of the answer; the engine uses a copy."""
    reasoning: ReasoningSpan | None = None
    """The tokens that delimit the reasoning, if it has a budget or precedes a grammar; None
    otherwise."""


@dataclass(slots=True)
class PlanRow:
    """A sequence's part of a step: compute the KV of tokens ``start … start + count - 1``.

    A row never changes. It is not frozen, because each step makes a row for each sequence, and a
    frozen one takes five times as long to make.

    A row of one token that samples always computes the newest token that the engine has. If drafts
    were accepted in a step that was in flight when this one was planned, that token is after
    ``start``. The block table has a block for it.
    """

    sequence_id: int
    start: int
    count: int
    block_table: tuple[int, ...]
    """The sequence's own table: the same object as in the previous step unless it has changed."""
    sample: bool
    """Whether the row ends with the sequence's last known token, so that the next token is
    sampled."""
    limit: int = 0
    """Maximum length of the sequence after the step, in tokens. It bounds the number of draft
    tokens; 0 means no drafts."""
    choices: int = 1
    """Number of choices that sample their first token from this row's logits, each with its own
    noise. The first choice is the row's sequence, and each further choice becomes a new
    sequence."""
    scored: int = 0
    """Number of leading tokens of the row for which the log probability of the following prompt
    token is computed."""
    draft: tuple[int, ...] = ()
    """Draft tokens after the row's own token; ``count`` includes them. The engine adds them; the
    scheduler's plan has none."""


@dataclass(frozen=True)
class StepPlan:
    """One engine step. The engine appends sampled tokens to its own copy of each sequence."""

    step: int
    new: tuple[NewSequence, ...]
    dropped: tuple[int, ...]
    rows: tuple[PlanRow, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """Blocks to copy before the rows are computed, as pairs (from, to)."""

    @cached_property
    def tokens(self) -> int:
        return sum([row.count for row in self.rows])

    @cached_property
    def decodes_only(self) -> bool:
        """Whether every row computes one token, so that the step is short."""
        return all(row.count == 1 for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled: one entry for each row of the plan, in its order."""

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    """New tokens of each row. A row that samples has one token, and one more for each accepted
    draft token. A row with ``choices`` has the first token of each choice."""
    seconds: float = 0.0
    failed: tuple[tuple[int, str], ...] = ()
    """Rows whose sequences cannot continue: (index of the row in the plan, reason)."""
    drafted: int = 0
    """Number of draft tokens that the step verified, in all rows."""
    accepted: int = 0
    """Number of the verified draft tokens that were accepted, in all rows."""
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    """For each row, the log probabilities of its new tokens, or None if it wants none. Empty if no
    row wants any."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    """For each row, the log probabilities of the prompt tokens that it scores. Empty if no row
    scores any."""
    embeddings: tuple[tuple[float, ...] | None, ...] = ()
    """Embedding of each row that wants one, fp32 [hidden_size]; empty if no row does."""
    left_out: tuple[int, ...] = ()
    """Indexes of rows that were not computed, because an earlier step failed and the engine lacks
    that step's tokens of their sequences."""


@dataclass(slots=True)
class RunnerSequence:
    """A sequence as the engine knows it, with its current tokens. Owned by the engine thread."""

    token_ids: list[int]
    """Tokens of prompt and output. The runner appends each step's new tokens."""
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    choice: int
    takes_prompt: bool = True
    """Whether a drafter processes the prompt while the prompt is computed."""
    embeds: bool = False
    """Whether the request wants the sequence's embedding. It is returned with the next token."""

    @classmethod
    def of(cls, new: NewSequence) -> RunnerSequence:
        """Make the engine's initial state of a new sequence."""
        return cls(
            list(new.token_ids),
            new.prompt_length,
            new.sampling,
            new.stop_ids,
            new.choice,
            embeds=new.embeds,
        )


class ScheduledStep:
    """One step of a scheduler, from its planning until its result is applied.

    planned: ``add``, ``add_steady``, ``make_plan``, ``mark_planned`` → in flight: ``land`` → over

    ``land`` is called once for each sequence of the step. Each is counted once, even if the
    scheduler fails to apply one of the results: ``Scheduler.fail`` continues after that one.
    """

    __slots__ = (
        "_bounds",
        "_highest",
        "_landed",
        "_limits",
        "copied",
        "is_alone",
        "rows",
        "sequences",
        "stayed",
        "taken",
    )

    def __init__(self, limits: SchedulerLimits, bounds: SequenceBounds) -> None:
        self._limits = limits
        self._bounds = bounds
        self.sequences: list[Sequence] = []
        """The sequences of the step, in the order of the plan."""
        self.rows: list[PlanRow] = []
        """The row of each sequence."""
        self.copied: dict[Sequence, int] = {}
        """For each sequence with a copied block, the block that the plan copies from. It stays
        pinned until the step has ended."""
        self.stayed: list[Sequence] = []
        """Sequences that had not left the scheduler when the step ended for them."""
        self.taken: list[Sequence] = []
        """Sequences whose results were applied, perhaps in part, and the siblings that they
        started."""
        self.is_alone = False
        """Whether the step has one sequence, and no other step was in flight when it was planned.
        If it fails, the error belongs to that sequence."""
        self._highest: list[int] = []
        """``Sequence.highest`` after the step, for each row; empty if the engine drafts no
        tokens."""
        self._landed = 0

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def tokens(self) -> int:
        return sum([row.count for row in self.rows])

    def add_steady(self, sequence: Sequence) -> None:
        """Add the row of a sequence that is steady at its next token: see
        ``Sequence.steady_until``."""
        row = PlanRow(sequence.sequence_id, sequence.scheduled, 1, sequence.block_table, True)
        self.rows.append(row)
        self.sequences.append(sequence)

    def add(self, sequence: Sequence, most: int) -> int:
        """Add a row of at most ``most`` tokens for a sequence. Returns the row's number of
        tokens."""
        start = sequence.scheduled
        count = min(sequence.target - start, most, self._limits.max_tokens(start))
        scored = 0
        if sequence.scores_prompt and start < sequence.prompt_length - 1:
            left = self._limits.scored_tokens - sum(row.scored for row in self.rows)
            count = max(1, min(count, left))
            scored = min(count, sequence.prompt_length - 1 - start)
        sample = start + count == sequence.target
        table, limit = sequence.block_table, self._bounds.row_limit(sequence)
        choices = 1 + len(sequence.siblings) if sample else 1
        if scored or choices > 1:
            limit = 0
        row = PlanRow(sequence.sequence_id, start, count, table, sample, limit, choices, scored)
        self.rows.append(row)
        self.sequences.append(sequence)
        return count

    def drop_preempted(self) -> None:
        """Remove the rows of sequences that were preempted after they were added."""
        kept = [not sequence.preempted for sequence in self.sequences]
        if not all(kept):
            self.rows = list(compress(self.rows, kept))
            self.sequences = list(compress(self.sequences, kept))

    def make_plan(self, step: int, dropped: tuple[int, ...]) -> StepPlan:
        """Make the step plan. Sequences do not change until ``mark_planned`` is called."""
        new, copies, copied = [], [], {}
        for sequence, row in zip(self.sequences, self.rows, strict=True):
            if sequence.copy_of is not None:
                own = row.block_table[row.start // self._limits.block_size]
                copies.append((sequence.copy_of, own))
                copied[sequence] = sequence.copy_of
            if not sequence.known_to_engine:
                new.append(_introduced(sequence))
        self._highest = self._highest_of_rows() if self._limits.draft_tokens else []
        self.copied = copied
        return StepPlan(step, tuple(new), dropped, tuple(self.rows), tuple(copies))

    def _highest_of_rows(self) -> list[int]:
        """Compute ``Sequence.highest`` after this step, for each row that samples."""
        found = []
        for sequence, row in zip(self.sequences, self.rows, strict=True):
            after = self._bounds.known_at_most(sequence) + 1
            found.append(max(after, min(row.limit, after + self._limits.draft_tokens)))
        return found

    def mark_planned(self) -> None:
        """Add the plan's tokens to each sequence's counts of scheduled and pending tokens. It never
        raises, so all sequences are updated or none."""
        every = zip(self.sequences, self.rows, strict=True)
        drafting = zip(self.sequences, self.rows, self._highest, strict=False)
        for sequence, row in every:
            sequence.copy_of = None
            sequence.known_to_engine = True
            sequence.scheduled += row.count
            sequence.pending += row.sample
            sequence.in_flight += 1
        for sequence, row, highest in drafting:
            if row.sample:
                sequence.highest = highest

    def land(self, left: Container[Sequence]) -> int | None:
        """Mark the step as ended for the next sequence of its plan. Returns the index of that
        sequence's row; None if no row is left.

        ``left`` contains the sequences that have left the scheduler.
        """
        place = self._landed
        if place == len(self.rows):
            return None
        sequence = self.sequences[place]
        self._landed += 1
        sequence.in_flight -= 1
        sequence.pending -= self.rows[place].sample
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
