"""The step scheduler over a pool with tiers behind it: no block that comes back is a wrong one.

The engine checks what each step reads, so that a torn, stale or mixed copy is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from baton.hashing import last_hashes
from engine.scheduling.block_tier import BlockTier
from engine.scheduling.block_tiers import BlockTiers, Found, Spill
from engine.scheduling.plan import StepPlan
from engine.scheduling.sequence import Sequence
from tests.support.engine.scheduler import (
    World,
    make_spec,
    make_world,
    random_jobs,
    random_limits,
    run_crowd,
)


@dataclass
class Loading:
    """Blocks on their way from the tiers."""

    missing: list[Found]
    held: list[int]
    targets: list[int]
    sequence: Sequence | None
    """The preempted one that waits for it."""


class TieredWorld(World):
    """A world whose evicted blocks are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tiers = BlockTiers(self.pool, [BlockTier("host", 5), BlockTier("disk", 12)])
        self.slots: dict[tuple[str, int], list[int | None]] = {}
        self.spills: list[Spill] = []
        self.loads: list[Loading] = []

    def begin_spill(self) -> bool:
        spill = self.tiers.next_spill()
        if spill is not None:
            self.spills.append(spill)
        return spill is not None

    def end_spill(self) -> None:
        spill = self.spills.pop(0)
        if spill.source is None:
            found = list(self.engine.memory[spill.place])
        else:
            found = list(self.slots[(spill.source.name, spill.place)])
        self.slots[(spill.target.name, spill.copy.slot)] = found
        self.tiers.end_spill(spill)

    def spill_all(self) -> None:
        while self.spills or self.begin_spill():
            self.end_spill()

    def find(self, sequence: Sequence) -> list[Found]:
        limits = self.limits
        hashes = last_hashes(sequence.full_hashes(limits.hash_block), limits.hashes_per_block)
        return self.tiers.find(hashes[: (len(sequence.token_ids) - 1) // limits.block_size])

    def begin_load(self, run: list[Found], sequence: Sequence | None = None) -> bool:
        """Take blocks for what the tiers have of a run; not where there is no room."""
        held = [found.block for found in run if found.block is not None]
        missing = [found for found in run if found.block is None]
        if not missing or len(missing) > self.pool.available - self.pool.evictable(held):
            return False
        self.pool.pin(held)
        self.tiers.begin_load(missing)
        self.loads.append(Loading(missing, held, self.pool.allocate(len(missing)), sequence))
        return True

    def end_load(self) -> None:
        load = self.loads.pop(0)
        for found, target in zip(load.missing, load.targets, strict=True):
            assert found.tier is not None
            assert found.copy is not None
            self.engine.memory[target] = list(self.slots[(found.tier.name, found.copy.slot)])
            self.pool.register(target, found.digest, found.copy.leading)
        self.tiers.end_load(load.missing)
        self.pool.release([*load.held, *load.targets])
        if load.sequence is not None:
            load.sequence.returning = False

    def bring_back(self) -> bool:
        """Begin to bring back the first in line, where it lost blocks that a tier has."""
        first = self.scheduler.waiting[0] if self.scheduler.waiting else None
        if first is None or not first.preempted or first.returning:
            return False
        if first.block_table or first.in_flight or not self.begin_load(self.find(first), first):
            return False
        first.returning = True
        return True


class RestlessWorld(TieredWorld):
    """Before each step some blocks go down and some come up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chance = Random(0)
        self.returned = 0

    def schedule(self) -> StepPlan | None:
        for _ in range(self.chance.randrange(6)):
            self.begin_spill()
        for _ in range(self.chance.randrange(6)):
            if self.spills:
                self.end_spill()
        if self.chance.random() < 0.5:
            self.returned += self.bring_back()
        if self.loads and self.chance.random() < 0.5:
            self.end_load()
        self.tiers.check()
        return super().schedule()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_whose_blocks_come_and_go(depth: int) -> None:
    """Fixed seeds: many sequences are preempted, and many of them come back."""
    returned = preemptions = 0
    for seed in range(150):
        random = Random(seed)
        limits = random_limits(random)
        blocks = -(-limits.context_length // limits.block_size)
        world = RestlessWorld(blocks + random.randrange(3), limits, depth)
        world.chance = random
        run_crowd(world, random_jobs(random))
        returned += world.returned
        preemptions += world.scheduler.preemptions
    assert preemptions > 50, "the pools are too large to test anything"
    assert returned > 20, "nothing comes back"


def tiered_world(blocks: int, size: int, **changes: int) -> TieredWorld:
    world = make_world(blocks, size, **changes)
    return TieredWorld(world.blocks, world.limits, world.depth)


def test_one_that_returns_keeps_its_place_and_computes_only_what_was_lost() -> None:
    world = tiered_world(6, 2)
    first = world.add(make_spec([1, 2, 3, 4], max_tokens=6))
    second = world.add(make_spec([5, 6, 7, 8], max_tokens=6))
    while not second.preempted:
        world.schedule()
        world.execute()
        world.deliver()
        world.spill_all()
    world.spill_all()
    while not world.bring_back():
        world.schedule()
        world.execute()
        world.deliver()
        world.spill_all()
    late = world.add(make_spec([9, 9], max_tokens=2))
    assert world.scheduler.waiting[0] is second
    while world.schedule() is not None:
        assert second not in world.scheduler.running
        assert late not in world.scheduler.running
        world.execute()
        world.deliver()
    assert world.ended.keys() >= {first}
    assert world.scheduler.schedule() is None, "it is not computed while its blocks are coming"
    world.end_load()
    world.run_to_end()
    world.check_answers()
    assert second.cached_tokens > 0
