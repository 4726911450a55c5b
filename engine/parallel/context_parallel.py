"""Steps of a context-parallel worker: each rank has all weights and computes some tokens.

    a long step ─every rank computes its tokens, and sends their KV layer by layer→ rank 0 draws;
    a short step ─rank 0 computes it alone, and its KV is copied to the others→ rank 0 draws

Every rank has a whole cache, with the same bytes in the same blocks. So everything that a query
attends to is on its rank, from earlier chunks and from prompts with the same beginning. For each
layer, the ranks gather one another's keys and values before they attend (all-gather, as for Llama
3). With few KV heads, the exchange takes little time compared with the computation. A ring (Liu et
al., 2023) would overlap the two, and need less memory. The ranks exchange the cache's own bytes,
including codes and scales of int8 and fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from engine.kv.kv_cache import KvGroup
from engine.parallel.context_split import ContextShard, is_split, shards_of
from engine.parallel.rank_group import RankGroup
from engine.sampling.step import StepInput, StepModel, StepOutput
from engine.scheduling.plan import PlanRow


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """The blocks and slots in which the KV of some tokens is stored; both tensors are int64
    [tokens]."""

    blocks: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[PlanRow], block_size: int, device: torch.device) -> SlotMapping:
        """Make the slot mapping of all tokens of a step's rows."""
        blocks, positions = [], []
        for row in rows:
            own = np.arange(row.start, row.start + row.count)
            blocks.append(np.array(row.block_table, dtype=np.int64)[own // block_size])
            positions.append(own)
        where = np.stack((np.concatenate(blocks), np.concatenate(positions) % block_size))
        found = torch.from_numpy(where).to(device)
        return cls(found[0], found[1])

    def at(self, tokens: torch.Tensor) -> SlotMapping:
        """Select the slot mapping of the tokens with these indexes."""
        return SlotMapping(self.blocks[tokens], self.slots[tokens])


@dataclass(frozen=True, slots=True)
class StepSpread:
    """Describes the KV that this rank sends and receives in one step, by numbers and slots: for its
    own tokens, and for those of other ranks."""

    own: SlotMapping
    widest: int
    """Maximum number of tokens on any rank. All ranks pad their tensors to this number, because
    gathered tensors must have the same shape."""
    kept: torch.Tensor
    """Indexes of other ranks' tokens, without padding, among the [ranks * widest] gathered tokens;
    int64."""
    others: SlotMapping
    """Slots in which this rank stores the KV of the tokens in ``kept``."""


class ContextExchange:
    """Exchanges KV between the ranks of a context-parallel worker, which divide prompts. Used by
    the engine thread."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._spread: StepSpread | None = None

    def begin(
        self, rows: Sequence[PlanRow], shards: Sequence[ContextShard], cache: KvGroup
    ) -> None:
        """Begin a step; ``shards`` has the part of its rows that each rank computes. Until ``end``
        is called, ``spread`` exchanges each layer's KV."""
        device = cache.data.device
        widest = max(len(shard.tokens) for shard in shards)
        mapping = SlotMapping.of(rows, cache.block_size, device)
        own = torch.tensor(shards[self.group.rank].tokens, device=device)
        kept: list[int] = []
        tokens: list[int] = []
        for rank, shard in enumerate(shards):
            if rank != self.group.rank:
                kept += range(rank * widest, rank * widest + len(shard.tokens))
                tokens += shard.tokens
        self._spread = StepSpread(
            mapping.at(own),
            widest,
            torch.tensor(kept, device=device),
            mapping.at(torch.tensor(tokens, device=device)),
        )

    def end(self) -> None:
        """End the step that ``begin`` began. Until the next call of ``begin``, ``spread`` has no
        effect."""
        self._spread = None

    def spread(self, cache: KvGroup, layer: int) -> None:
        """Exchange a layer's KV, so that ``cache`` has it for the tokens of all ranks. This rank
        must have written the KV of its own tokens.

        Has no effect in a step that is not divided.
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

    def copy_from_leader(self, rows: Sequence[PlanRow], cache: KvGroup) -> None:
        """Copy the KV of all layers, which rank 0 has computed alone, to the caches of all other
        ranks."""
        where = SlotMapping.of(rows, cache.block_size, cache.data.device)
        found = cache.stored(where.blocks, where.slots)
        self.group.broadcast(found)
        if self.group.rank:
            cache.store(where.blocks, where.slots, found)

    def whole(self, own: torch.Tensor, places: Sequence[int], count: int) -> torch.Tensor:
        """Combine the ranks' rows into one tensor [count, …]. Each rank passes its ``own`` rows,
        and their indexes in the result, ``places``."""
        found = own.new_zeros(count, *own.shape[1:])
        found[torch.tensor(places, dtype=torch.int64, device=own.device)] = own
        # Each place belongs to one rank, and the others add zeros.
        return self.group.add(found)


Compute: TypeAlias = Callable[[StepInput], StepOutput]
"""Computes a step's tokens on this rank, and calls ``ContextExchange.spread`` for each layer."""

_NOTHING = StepOutput([], None)


@dataclass(frozen=True, slots=True)
class StepPart:
    """One rank's part of a step on a context-parallel worker."""

    step: StepInput
    tokens: tuple[int, ...] = ()
    """Indexes, among the tokens of the whole step, of the tokens that this rank computes; empty if
    the step is not divided."""
    outputs: tuple[int, ...] = ()
    """Indexes, among the outputs of the whole step, of the outputs that this rank computes."""
    gathers: bool = False
    """Whether rank 0 must collect outputs from other ranks. Usually rank 0 computes all outputs
    itself, because they are those of the last tokens of rows."""


class ContextSteps:
    """Divides steps among the ranks of a context-parallel worker, and computes one rank's part. All
    ranks get the same steps. Used by the engine thread."""

    def __init__(self, cache: KvGroup, exchange: ContextExchange) -> None:
        self._cache = cache
        self._exchange = exchange
        self.group = exchange.group

    @contextmanager
    def part(self, step: StepInput) -> Iterator[StepPart | None]:
        """Context in which this rank computes its part of the step; its value is None if the rank
        has no part. At the context's end, all ranks have the KV.

        Raises WorkerFailed if a rank is lost.
        """
        group = self.group
        if is_split(step.rows, group.ranks):
            shards = shards_of(step.rows, group.ranks)
            self._exchange.begin(step.rows, shards, self._cache)
            try:
                yield _part(step, shards[group.rank], shards[0])
            finally:
                self._exchange.end()
            return
        yield None if group.rank else StepPart(step)
        self._exchange.copy_from_leader(step.rows, self._cache)

    def run(self, step: StepInput, compute: Compute) -> StepOutput:
        """Compute this rank's part of a step with ``compute``. Only rank 0 gets the whole step's
        result."""
        with self.part(step) as part:
            found = _NOTHING if part is None else compute(part.step)
        return found if part is None or not part.tokens else self._whole(step, part, found)

    def _whole(self, step: StepInput, part: StepPart, found: StepOutput) -> StepOutput:
        """Combine the results of all ranks' parts on rank 0."""
        if found.hidden is not None:
            hidden = self._exchange.whole(found.hidden, part.tokens, len(step.token_ids))
            found = replace(found, hidden=hidden)
        if not part.gathers:
            return found
        assert found.logits is not None, "a part that gathers is not greedy"
        logits = self._exchange.whole(found.logits, part.outputs, len(step.outputs))
        if step.greedy:
            return replace(found, best=logits.argmax(dim=-1).tolist(), logits=None)
        return replace(found, logits=logits)


def _part(step: StepInput, own: ContextShard, lead: ContextShard) -> StepPart:
    here = {token: place for place, token in enumerate(own.tokens)}
    leads = set(lead.tokens)
    gathers = any(token not in leads for token in step.outputs)
    outputs = tuple(number for number, token in enumerate(step.outputs) if token in here)
    mine = StepInput(
        own.rows,
        [step.token_ids[token] for token in own.tokens],
        [here[step.outputs[number]] for number in outputs],
        step.greedy and not gathers,
        step.hidden_layers,
    )
    return StepPart(mine, own.tokens, outputs, gathers)


class ContextModel:
    """One rank's model on a context-parallel worker: wraps a model that computes on this rank
    alone. Implements ``engine.sampling.step.StepModel``."""

    def __init__(self, model: StepModel, steps: ContextSteps) -> None:
        self._model = model
        self._steps = steps

    @property
    def layers_done(self) -> int:
        """Number of layers for which rank 0's cache has the KV of all tokens of the step."""
        return self._model.layers_done

    def clear_progress(self) -> None:
        self._model.clear_progress()

    def use_threads(self, threads: int) -> None:
        self._model.use_threads(threads)

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        """Compute a step's tokens on all ranks, and store their KV. Raises WorkerFailed if a rank
        is lost."""
        return self._steps.run(step, self._model.run)
