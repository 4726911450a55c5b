"""What guesses tokens with a model of its own, for all sequences of a step at once.

Each step goes in this order, all of it on the engine thread:

    backlog, catch_up, propose → begin → (the model computes the step) → computed

A drafter may have a group of the KV cache (``KvCache.drafter``), of the same block tables as the
model's: it fills it for the tokens that the model has computed, at once or when it needs it.
``FilledSlots`` says how far it has come.
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
from engine.scheduling.plan import KnownSequence, PlanRow


@dataclass(frozen=True, slots=True)
class DraftQuery:
    """A sequence that decodes in a step, and how many tokens behind its last one are wanted."""

    row: PlanRow
    """As it is computed without a draft: the sequence's last token."""
    known: KnownSequence
    most: int
    """1 or more; its block table has slots for them."""


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row that the model has computed."""

    row: PlanRow
    """With the drafted tokens in it."""
    known: KnownSequence
    """With the tokens that the step has brought, behind those of the row."""
    right: int
    """So many of the row's tokens, from its first, are the sequence's: all but wrong drafts."""
    drafted: int
    """So many of the row's tokens, to its last, are those of a draft."""
    first: int
    """Which of the step's tokens the row's first one is: its place in ``StepOutput.hidden``."""


class ModelDrafter(Protocol):
    """One for an engine; see the module's text."""

    @property
    def name(self) -> str:
        """As the configuration and the metrics call it."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What ``computed`` wants of the model; see ``StepInput.hidden_layers``."""

    @property
    def max_tokens(self) -> int:
        """The longest draft that it makes."""

    def backlog(self, query: DraftQuery) -> int | None:
        """How many tokens it must take in before it can draft for a sequence, the last one aside.

        None where it cannot draft for it, now or ever.
        """

    def catch_up(self, query: DraftQuery, most: int) -> None:
        """Take in up to ``most`` tokens of the backlog."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Of each up to ``most`` tokens, the backlog being taken in first."""

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """The model computes these rows next, drafted tokens included."""

    def computed(
        self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None, *, prompts: bool
    ) -> int:
        """The model has computed a step. ``hidden`` is of ``hidden_layers``.

        ``prompts``: whether to take in at once what was computed of prompts; other tokens may wait
        for the next draft. Returns how many tokens were taken in so.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; one that is not known is ignored."""

    def use_threads(self, threads: int) -> None:
        """See ``StepModel``."""

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines, where its model can."""


class FilledSlots:
    """How much of a drafter's part of a cache on the CPU is filled, block by block.

    The count lies in the block itself (``DrafterGroup.filled``), so that it is right after a
    handoff, a hit in the prefix cache, a fork and a preemption, without a message. Owned by the
    engine thread.
    """

    def __init__(self, group: DrafterGroup) -> None:
        # A buffer of Python numbers: numpy would make an array of each number that is read.
        self._filled = group.filled.numpy().data
        self.block_size = self._size = group.block_size
        self._known: dict[int, int] = {}
        """How many of each sequence's first tokens were filled when it was last looked at."""

    def spoil(self, rows: Iterable[PlanRow]) -> None:
        """The model computes these rows: the drafter's KV in their slots is of other tokens."""
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
        """Tokens ``start`` … ``end - 1`` of a row's sequence are filled, as all before them are."""
        size, filled = self._size, self._filled
        for place in range(start // size, -(-end // size)):
            block = row.block_table[place]
            # A shared block may have been filled further for another sequence.
            filled[block] = max(filled[block], min(size, end - place * size))
        self._known[row.sequence_id] = end

    def forget(self, sequence_id: int) -> None:
        """Drop what is known of a sequence; one that is not known is ignored."""
        self._known.pop(sequence_id, None)


class CachedDrafter:
    """The part of ``ModelDrafter`` that drafters with KV in the cache have in common."""

    def __init__(self, steps: StepModel, filled: FilledSlots) -> None:
        """``steps`` computes over the cache's group ``drafter``, of which ``filled`` tells."""
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
    """Some tokens of a row's sequence, for a step of the drafter."""
    return PlanRow(row.sequence_id, start, count, row.block_table, True)


Sampler = Callable[[torch.Tensor, list[SampleRow]], list[int]]
"""As ``engine.sampling.sampling.sample``."""


class DraftDraws:
    """Draws with the noise that the model will draw with (``engine.sampling.sampling``)."""

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
        """Whether the likeliest tokens are those drawn."""
        return all(draw.sampling.greedy and not draw.adjusted for draw in draws)

    def named(self, outputs: Sequence[int]) -> list[int]:
        """The model's ids of the head's outputs."""
        return [self._names[output] for output in outputs]

    def draw(self, logits: torch.Tensor, draws: list[SampleRow]) -> list[int]:
        """One token for each row of ``logits``, fp32 [rows, draft_vocab_size].

        A grammar does not hold it back: what the grammar forbids is not kept.
        """
        if self.are_greedy(draws):
            return self.named(logits.argmax(dim=-1).tolist())
        whole = logits.new_full((len(draws), self._vocab_size), -torch.inf)
        whole[:, self._token_ids] = logits
        return self._sampler(whole, draws)
