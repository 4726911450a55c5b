"""Drafters with a model of their own. Each drafts for all sequences of a step at once.

Each step has this order, all on the engine thread:

backlog, catch_up, propose → begin → (the model computes the step) → computed

A drafter may have a group of the KV cache (``KvCache.drafter``) with the same block tables as the
model's. It fills the group for tokens that the model has computed, at once or when it needs them.
``FilledSlots`` records its progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.cpu.decoder import CpuDecoder
from engine.cpu.library import CoreShare
from engine.kv.kv_cache import DrafterGroup
from engine.sampling.sampling import SampleRow
from engine.sampling.step import StepModel
from engine.scheduling.plan import PlanRow, RunnerSequence


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """A sequence that decodes in a step, and the maximum number of draft tokens for it."""

    row: PlanRow
    """The sequence's row without a draft: it computes the sequence's last token."""
    known: RunnerSequence
    most: int
    """Maximum number of draft tokens, 1 or more; the block table has slots for them."""


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row that the target has computed, in the form in which it is passed to a drafter."""

    row: PlanRow
    """The computed row, including its draft tokens."""
    known: RunnerSequence
    """The row's sequence, including the tokens that the step has added."""
    right: int
    """Number of the row's leading tokens that are part of the sequence: all except rejected draft
    tokens."""
    drafted: int
    """Number of draft tokens at the end of the row."""
    first: int
    """Index of the row's first token in the step's tokens, and in ``StepOutput.hidden``."""


class ModelDrafter(Protocol):
    """Uses a model of its own to draft tokens for all sequences of an engine."""

    @property
    def name(self) -> str:
        """Name of the drafter in the configuration and the metrics."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs ``computed`` needs, as in
        ``StepInput.hidden_layers``."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens that the drafter can draft at once."""

    def backlog(self, query: DraftQuery) -> int | None:
        """Number of tokens that the drafter must process before it can draft for a sequence. The
        sequence's last token does not count.

        None if the drafter cannot draft for the sequence, now or ever.
        """

    def catch_up(self, query: DraftQuery, most: int) -> None:
        """Process up to ``most`` tokens of a sequence's backlog."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Draft up to ``query.most`` tokens for each query, after processing the query's
        backlog."""

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """Prepare for a step: the target computes these rows next, including their draft tokens."""

    def computed(
        self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None, *, prompts: bool
    ) -> int:
        """Process a step that the target has computed. ``hidden`` has the inputs of
        ``hidden_layers``.

        ``prompts``: true if the drafter must process the computed prompt tokens in this call. It
        may process other tokens later, before the next draft. Returns the number of tokens that it
        has processed in this call.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; an unknown one is ignored."""

    def use_threads(self, threads: int) -> None:
        """Set the number of CPU threads of the drafter."""

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines, if the drafter's model supports that."""


class FilledSlots:
    """Records how much of the drafter's part of each block has KV, for a cache in host memory.

    The count is in the block itself (``DrafterGroup.filled``). So it is right after a handoff, a
    hit in the prefix cache, a fork and a preemption, without a message. Owned by the engine thread.
    """

    def __init__(self, group: DrafterGroup) -> None:
        # A buffer of Python numbers: numpy would make an array of each number that is read.
        self._filled = group.filled.numpy().data
        self.block_size = self._size = group.block_size
        self._known: dict[int, int] = {}
        """For each sequence id, the number of leading tokens that had the drafter's KV at the last
        check."""

    def spoil(self, rows: Iterable[PlanRow]) -> None:
        """Mark the drafter's KV as missing in the slots that the target overwrites when it computes
        these rows."""
        size, filled = self._size, self._filled
        for row in rows:
            first, slot = divmod(row.start, size)
            block = row.block_table[first]
            filled[block] = min(filled[block], slot)
            if slot + row.count > size:
                for block in row.block_table[first + 1 : -(-(row.start + row.count) // size)]:
                    filled[block] = 0

    def count(self, row: PlanRow, tokens: int) -> int:
        """Count the leading tokens of a row's sequence that have the drafter's KV; at most
        ``tokens`` are counted."""
        size, found = self._size, tokens
        place = min(tokens, self._known.get(row.sequence_id, 0)) // size
        for block in row.block_table[place : -(-tokens // size)]:
            filled = self._filled[block]
            if filled < size:
                found = min(tokens, place * size + filled)
                break
            place += 1
        self._known[row.sequence_id] = found
        return found

    def fill(self, row: PlanRow, start: int, end: int) -> None:
        """Record that the drafter's KV is complete up to token ``end - 1`` of a row's sequence;
        tokens ``start … end - 1`` are new."""
        size, filled = self._size, self._filled
        for place in range(start // size, -(-end // size)):
            block = row.block_table[place]
            # A shared block may have been filled further for another sequence.
            filled[block] = max(filled[block], min(size, end - place * size))
        self._known[row.sequence_id] = end

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; an unknown one is ignored."""
        self._known.pop(sequence_id, None)


class CachedDrafter:
    """Base class of drafters whose KV is in the cache group ``drafter``, with methods of
    ``ModelDrafter``."""

    def __init__(self, steps: StepModel, filled: FilledSlots) -> None:
        """``steps`` computes over the cache's group ``drafter``; ``filled`` records which slots of
        the group have KV."""
        self._steps = steps
        self._filled = filled

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """Prepare for a step: the slots that the target overwrites lose the drafter's KV."""
        self._filled.spoil(rows)

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; an unknown one is ignored."""
        self._filled.forget(sequence_id)

    def use_threads(self, threads: int) -> None:
        """Set the number of CPU threads of the drafter's model."""
        self._steps.use_threads(threads)

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines, if the drafter's model supports that."""
        if isinstance(self._steps, CpuDecoder):
            self._steps.share_cores(share)


def part_of(row: PlanRow, start: int, count: int) -> PlanRow:
    """Make a row for ``count`` tokens from position ``start`` on, for a step of the drafter; it has
    the block table of ``row``."""
    return PlanRow(row.sequence_id, start, count, row.block_table, True)


Sampler = Callable[[torch.Tensor, list[SampleRow]], list[int]]
"""Draws a token for each row of logits, like ``engine.sampling.sampling.sample``."""


class DraftDraws:
    """Draws draft tokens with the noise that the target will use for the same positions
    (``engine.sampling.sampling``)."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        vocab_size: int,
        sampler: Sampler,
    ) -> None:
        """``token_ids``, int64 [draft_vocab_size], has the target's token id for each output of the
        drafter."""
        self._token_ids = token_ids
        self._names: list[int] = token_ids.tolist()
        self._vocab_size = vocab_size
        self._sampler = sampler

    @staticmethod
    def are_greedy(draws: Sequence[SampleRow]) -> bool:
        """Whether each draw takes the most likely token."""
        return all(draw.sampling.greedy and not draw.adjusted for draw in draws)

    def named(self, outputs: Sequence[int]) -> list[int]:
        """Convert numbers of the drafter's outputs to the target's token ids."""
        return [self._names[output] for output in outputs]

    def draw(self, logits: torch.Tensor, draws: list[SampleRow]) -> list[int]:
        """Draw one token for each row of ``logits``, fp32 [rows, draft_vocab_size].

        Drafts ignore grammars; the target does not accept a token that the grammar forbids.
        """
        if self.are_greedy(draws):
            return self.named(logits.argmax(dim=-1).tolist())
        whole = logits.new_full((len(draws), self._vocab_size), -torch.inf)
        whole[:, self._token_ids] = logits
        return self._sampler(whole, draws)
