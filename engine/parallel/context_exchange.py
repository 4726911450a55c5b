"""The KV that the ranks of a context-parallel worker compute, brought to all of them.

Every rank has a whole cache, with the same bytes in the same blocks: whichever rank a token's query
is on, all that it attends to is there, from earlier chunks and from prompts that began alike. Of
each layer the ranks gather one another's keys and values before they attend (all-gather, as Llama 3
does: with few KV heads that is little beside the computing; a ring, Liu et al., 2023, would hide
it, and hold less). What travels are the cache's own bytes, codes and scales of int8 and fp8
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kv.kv_cache import KvGroup
from engine.parallel.context_split import ContextShare
from engine.parallel.rank_group import RankGroup
from engine.scheduling.plan import PlanRow


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """Where the KV of some tokens lies: int64 [tokens] both."""

    blocks: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[PlanRow], block_size: int, device: torch.device) -> SlotMapping:
        """Of all tokens of a step's rows."""
        blocks, positions = [], []
        for row in rows:
            own = np.arange(row.start, row.start + row.count)
            blocks.append(np.array(row.block_table, dtype=np.int64)[own // block_size])
            positions.append(own)
        where = np.stack((np.concatenate(blocks), np.concatenate(positions) % block_size))
        found = torch.from_numpy(where).to(device)
        return cls(found[0], found[1])

    def at(self, tokens: torch.Tensor) -> SlotMapping:
        """Of some of them."""
        return SlotMapping(self.blocks[tokens], self.slots[tokens])


@dataclass(frozen=True, slots=True)
class StepSpread:
    """Of one step: what this rank gives, and what it gets."""

    own: SlotMapping
    widest: int
    """The most tokens of a rank: what is gathered has one shape."""
    kept: torch.Tensor
    """int64: of [ranks * widest] gathered tokens those of other ranks, without padding."""
    others: SlotMapping
    """Where these belong."""


class ContextExchange:
    """Used by the engine thread."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._spread: StepSpread | None = None

    def begin(
        self, rows: Sequence[PlanRow], shares: Sequence[ContextShare], cache: KvGroup
    ) -> None:
        """A step is computed in ``shares``, until ``end``: each layer's KV is to be spread."""
        device = cache.data.device
        widest = max(len(share.tokens) for share in shares)
        mapping = SlotMapping.of(rows, cache.block_size, device)
        own = torch.tensor(shares[self.group.rank].tokens, device=device)
        kept: list[int] = []
        tokens: list[int] = []
        for rank, share in enumerate(shares):
            if rank != self.group.rank:
                kept += range(rank * widest, rank * widest + len(share.tokens))
                tokens += share.tokens
        self._spread = StepSpread(
            mapping.at(own),
            widest,
            torch.tensor(kept, device=device),
            mapping.at(torch.tensor(tokens, device=device)),
        )

    def end(self) -> None:
        """The step is over."""
        self._spread = None

    def spread(self, cache: KvGroup, layer: int) -> None:
        """Have all tokens of the step in ``cache``, of which this rank has written its own.

        Does nothing for a step that is not divided.
        """
        spread = self._spread
        if spread is None:
            return
        own = cache.stored(spread.own.blocks, spread.own.slots, layer)
        padded = own.new_zeros(spread.widest, own.shape[1])
        padded[: len(own)] = own
        found = self.group.gather_everywhere(padded).flatten(0, 1)
        others = spread.others
        cache.store(others.blocks, others.slots, found[spread.kept], layer)

    def copy_from_lead(self, rows: Sequence[PlanRow], cache: KvGroup) -> None:
        """Have what rank 0 has computed alone, all layers of it."""
        where = SlotMapping.of(rows, cache.block_size, cache.data.device)
        found = cache.stored(where.blocks, where.slots)
        self.group.share(found)
        if self.group.rank:
            cache.store(where.blocks, where.slots, found)

    def whole(self, own: torch.Tensor, places: Sequence[int], count: int) -> torch.Tensor:
        """[count, …] of all ranks, of whom each has its ``own`` at some of the places."""
        found = own.new_zeros(count, *own.shape[1:])
        found[torch.tensor(places, dtype=torch.int64, device=own.device)] = own
        # Each place is one rank's, and the others add zeros.
        return self.group.add(found)
