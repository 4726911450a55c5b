"""Drafters with a model of their own, which draft for all sequences of a step at once.

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
    """A sequence that decodes in a step, and how many draft tokens are wanted."""

    row: PlanRow
    """The row without a draft: the sequence's last token."""
    known: RunnerSequence
    most: int
    """Maximum draft tokens, 1 or more; the block table has slots for them."""


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row that the model has computed."""

    row: PlanRow
    """The row, including its drafted tokens."""
    known: RunnerSequence
    """The sequence, including the tokens that the step has brought."""
    right: int
    """Number of the row's leading tokens that belong to the sequence: all except wrong drafts."""
    drafted: int
    """Number of the row's trailing tokens that are a draft."""
    first: int
    """Index of the row's first token in the step, and in ``StepOutput.hidden``."""


class ModelDrafter(Protocol):
    """Drafts tokens for all sequences of an engine."""

    @property
    def name(self) -> str:
        """Name in the configuration and the metrics."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the model that ``computed`` needs; see ``StepInput.hidden_layers``."""

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a draft."""

    def backlog(self, query: DraftQuery) -> int | None:
        """Number of tokens to process before it can draft for a sequence, without the last one.

        None if it cannot draft for the sequence, now or ever.
        """

    def catch_up(self, query: DraftQuery, most: int) -> None:
        """Process up to ``most`` tokens of the backlog."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Draft up to ``most`` tokens for each query, after processing its backlog."""

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """Prepare for a step: the model computes these rows next, drafted tokens included."""

    def computed(
        self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None, *, prompts: bool
    ) -> int:
        """Process a step that the model has computed. ``hidden`` is from ``hidden_layers``.

        ``prompts``: whether to process the computed prompt tokens at once. Other tokens may wait
        for the next draft. Returns the number of tokens that were processed at once.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; an unknown one is ignored."""

    def use_threads(self, threads: int) -> None:
        """See ``StepModel``."""

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines, if its model can."""


class FilledSlots:
    """How much of a drafter's part of a CPU cache is filled, block by block.

    The count is in the block itself (``DrafterGroup.filled``). So it is right after a handoff, a
    hit in the prefix cache, a fork and a preemption, without a message. Owned by the engine thread.
    """

    def __init__(self, group: DrafterGroup) -> None:
        # A buffer of Python numbers: numpy would make an array of each number that is read.
        self._filled = group.filled.numpy().data
        self.block_size = self._size = group.block_size
        self._known: dict[int, int] = {}
        """Number of each sequence's leading tokens that were filled at the last check."""

    def spoil(self, rows: Iterable[PlanRow]) -> None:
        """Invalidate draft KV in the slots that the model overwrites with these rows."""
        size, filled = self._size, self._filled
        for row in rows:
            first, slot = divmod(row.start, size)
            block = row.block_table[first]
            filled[block] = min(filled[block], slot)
            if slot + row.count > size:
                for block in row.block_table[first + 1 : -(-(row.start + row.count) // size)]:
                    filled[block] = 0

    def count(self, row: PlanRow, tokens: int) -> int:
        """How many of the first ``tokens`` tokens of a row's sequence are filled without a gap."""
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
        """Record that tokens ``start`` … ``end - 1`` of a row's sequence and all before are
        filled."""
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
    """The common part of drafters that have KV in the cache; see ``ModelDrafter``."""

    def __init__(self, steps: StepModel, filled: FilledSlots) -> None:
        """``steps`` computes over the cache's group ``drafter``; ``filled`` tracks that group."""
        self._steps = steps
        self._filled = filled

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """See ``ModelDrafter``."""
        self._filled.spoil(rows)

    def forget(self, sequence_id: int) -> None:
        """See ``ModelDrafter``."""
        self._filled.forget(sequence_id)

    def use_threads(self, threads: int) -> None:
        """See ``ModelDrafter``."""
        self._steps.use_threads(threads)

    def share_cores(self, share: CoreShare) -> None:
        """See ``ModelDrafter``."""
        if isinstance(self._steps, CpuDecoder):
            self._steps.share_cores(share)


def part_of(row: PlanRow, start: int, count: int) -> PlanRow:
    """Make a row for some tokens of a row's sequence, for a step of the drafter."""
    return PlanRow(row.sequence_id, start, count, row.block_table, True)


Sampler = Callable[[torch.Tensor, list[SampleRow]], list[int]]
"""Draws tokens like ``engine.sampling.sampling.sample``."""


class DraftDraws:
    """Draws with the noise that the model will use (``engine.sampling.sampling``)."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        vocab_size: int,
        sampler: Sampler,
    ) -> None:
        """``token_ids`` int64 [draft_vocab_size] are the model's ids of the head's outputs."""
        self._token_ids = token_ids
        self._names: list[int] = token_ids.tolist()
        self._vocab_size = vocab_size
        self._sampler = sampler

    @staticmethod
    def are_greedy(draws: Sequence[SampleRow]) -> bool:
        """Whether the most likely tokens are those drawn."""
        return all(draw.sampling.greedy and not draw.adjusted for draw in draws)

    def named(self, outputs: Sequence[int]) -> list[int]:
        """The model's ids of the head's outputs."""
        return [self._names[output] for output in outputs]

    def draw(self, logits: torch.Tensor, draws: list[SampleRow]) -> list[int]:
        """Draw one token for each row of ``logits``, fp32 [rows, draft_vocab_size].

        Grammars are not applied: a token that the grammar forbids is not kept.
        """
        if self.are_greedy(draws):
            return self.named(logits.argmax(dim=-1).tolist())
        whole = logits.new_full((len(draws), self._vocab_size), -torch.inf)
        whole[:, self._token_ids] = logits
        return self._sampler(whole, draws)
