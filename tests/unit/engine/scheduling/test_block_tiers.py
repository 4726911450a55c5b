"""The tiers behind a pool against a model of them, under any order of calls, with a fake copier.

The model's memory holds, for each block and each slot, the hash of what was last written there: so
a block that is found must be the one that was stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tier import BlockTier
from engine.scheduling.block_tiers import BlockTiers, Found, Spill

TORN = b"torn"
NAMES = "abcd"


def chain(name: str, length: int) -> list[bytes]:
    """Hashes as of a prompt's leading blocks."""
    return [f"{name}{index}".encode() for index in range(length)]


def leading(digest: bytes) -> list[bytes]:
    """Hashes within a block of several hash blocks."""
    return [digest + b"-0"]


@dataclass
class Copying:
    """A write in progress: ``bytes`` are what was read when it began."""

    spill: Spill
    bytes: bytes


@dataclass
class Loading:
    """A load in progress, into blocks of the pool without another user."""

    missing: list[Found]
    held: list[int]
    targets: list[int]


class TiersWorld:
    """Sequences come, compute what they do not find, and go; copies are made meanwhile."""

    def __init__(self, total: int, sizes: dict[str, int]) -> None:
        """A pool of ``total`` blocks, and tiers with the given numbers of slots."""
        self.pool = BlockPool(total)
        self.tiers = BlockTiers(self.pool, [BlockTier(name, n) for name, n in sizes.items()])
        self.budget = dict(sizes)
        self.memory = [b""] * total
        self.slots: dict[str, dict[int, bytes]] = {name: {} for name in sizes}
        self.running: list[list[int]] = []
        self.copying: list[Copying] = []
        self.loading: list[Loading] = []
        self.index: set[bytes] = set()
        self.loaded = 0

    def run(self, name: str, length: int) -> bool:
        """As the scheduler does it: cached blocks, new ones for the rest, all of them findable.

        Returns whether there was room.
        """
        hashes = chain(name, length)
        hits = self.pool.match(hashes)
        for block, digest in zip(hits, hashes, strict=False):
            assert self.memory[block] == digest, "the pool found another block"
        missing = hashes[len(hits) :]
        if len(missing) > self.pool.available - self.pool.evictable(hits):
            return False
        self.pool.pin(hits)
        blocks = self.pool.allocate(len(missing))
        for block, digest in zip(blocks, missing, strict=True):
            self.memory[block] = digest
            # A later one of the chain may be held, where this one was lost.
            self.pool.register(block, digest, leading(digest))
        self.running.append(hits + blocks)
        return True

    def end_run(self, index: int) -> None:
        self.pool.release(self.running.pop(index))

    def begin_spill(self) -> bool:
        wanted = self.tiers.wants_spill
        spill = self.tiers.next_spill()
        assert wanted or spill is None
        if spill is None:
            return False
        if spill.source is None:
            found = self.memory[spill.place]
        else:
            found = self.slots[spill.source.name][spill.place]
        assert found == spill.copy.digest, "another block would be copied"
        self.slots[spill.target.name][spill.copy.slot] = TORN
        self.copying.append(Copying(spill, found))
        return True

    def end_spill(self, index: int) -> None:
        copying = self.copying.pop(index)
        spill = copying.spill
        # Half was read at the beginning, half now.
        if spill.source is None:
            now = self.memory[spill.place]
        else:
            now = self.slots[spill.source.name][spill.place]
        whole = now == copying.bytes
        self.slots[spill.target.name][spill.copy.slot] = now if whole else TORN
        self.tiers.end_spill(spill)

    def fail_spill(self, index: int) -> None:
        copying = self.copying.pop(index)
        target = copying.spill.target
        before = target.total
        assert not self.tiers.end_spill(copying.spill, failed=True)
        assert target.total < before
        self.budget[target.name] = target.total

    def begin_load(self, name: str, length: int) -> bool:
        hashes = chain(name, length)
        run = self.tiers.find(hashes)
        assert [found.digest for found in run] == hashes[: len(run)]
        if len(run) < length:
            digest = hashes[len(run)]
            assert self.pool.holder(digest) is None
            assert all(tier.find(digest) is None for tier in self.tiers.tiers)
        held = [found.block for found in run if found.block is not None]
        missing = [found for found in run if found.block is None]
        if not missing or len(missing) > self.pool.available - self.pool.evictable(held):
            return False
        self.pool.pin(held)
        self.tiers.begin_load(missing)
        self.loading.append(Loading(missing, held, self.pool.allocate(len(missing))))
        return True

    def end_load(self, index: int, *, is_bad: bool) -> None:
        loading = self.loading.pop(index)
        bad = {loading.missing[-1].digest} if is_bad else set()
        for block, found in zip(loading.targets, loading.missing, strict=True):
            assert found.tier is not None
            assert found.copy is not None
            stored = self.slots[found.tier.name][found.copy.slot]
            assert stored == found.digest, "the block that came back is another one"
            if found.digest not in bad:
                self.memory[block] = stored
                self.pool.register(block, found.digest, leading(found.digest))
                self.loaded += 1
        self.tiers.end_load(loading.missing, bad)
        for found in loading.missing:
            if found.digest in bad:
                assert found.tier is not None
                assert found.tier.find(found.digest) is not found.copy
        self.pool.release([*loading.held, *loading.targets])

    def drop_cache(self) -> None:
        self.tiers.drop_cache()
        assert not self.pool.counts().cached
        assert all(len(tier) == 0 for tier in self.tiers.tiers)

    def publish(self) -> None:
        stored, removed = self.tiers.drain_changes()
        assert not set(stored) & set(removed)
        self.index |= set(stored)
        self.index -= set(removed)
        assert self.index == set(self.tiers.held_hashes())

    def check(self) -> None:
        self.pool.check()
        self.tiers.check()
        for tier in self.tiers.tiers:
            assert len(tier) <= tier.total <= self.budget[tier.name]
            for copy in tier:
                assert self.slots[tier.name][copy.slot] == copy.digest, "a wrong block is found"
        assert self.tiers.is_idle or self.copying or self.loading


class TiersMachine(RuleBasedStateMachine):
    """Any order of calls."""

    @initialize(total=st.integers(2, 9), host=st.integers(0, 6), disk=st.integers(1, 9))
    def start(self, total: int, host: int, disk: int) -> None:
        self.world = TiersWorld(total, ({"host": host} if host else {}) | {"disk": disk})

    @rule(name=st.sampled_from(NAMES), length=st.integers(1, 5))
    def run_sequence(self, name: str, length: int) -> None:
        self.world.run(name, length)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        self.world.end_run(draw_index(data, self.world.running))

    @rule()
    def begin_spill(self) -> None:
        self.world.begin_spill()

    @precondition(lambda self: self.world.copying)
    @rule(data=st.data(), fails=st.booleans())
    def end_spill(self, data: st.DataObject, fails: bool) -> None:
        end = self.world.fail_spill if fails else self.world.end_spill
        end(draw_index(data, self.world.copying))

    @rule(name=st.sampled_from(NAMES), length=st.integers(1, 5))
    def begin_load(self, name: str, length: int) -> None:
        self.world.begin_load(name, length)

    @precondition(lambda self: self.world.loading)
    @rule(data=st.data(), is_bad=st.booleans())
    def end_load(self, data: st.DataObject, is_bad: bool) -> None:
        self.world.end_load(draw_index(data, self.world.loading), is_bad=is_bad)

    @rule()
    def drop_cache(self) -> None:
        self.world.drop_cache()

    @rule()
    def publish(self) -> None:
        self.world.publish()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


def draw_index(data: st.DataObject, items: Sequence[object]) -> int:
    return data.draw(st.integers(0, len(items) - 1))


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(12))
def test_a_busy_life(seed: int) -> None:
    """Random calls as often as they come in life: the pool overflows again and again."""
    chance = Random(seed)
    sizes = {"host": chance.randint(3, 8), "disk": chance.randint(6, 16)}
    if seed % 3 == 0:
        del sizes["host"]
    world = TiersWorld(chance.randint(5, 12), sizes)
    for turn in range(800):
        kind = chance.choices(range(7), (30, 35, 40, 40, 10, 15, 1))[0]
        name, length = chance.choice(NAMES), chance.randint(1, 5)
        if kind == 0:
            world.run(name, length)
        elif kind == 1 and world.running:
            world.end_run(chance.randrange(len(world.running)))
        elif kind == 2:
            world.begin_spill()
        elif kind == 3 and world.copying:
            fails = turn > 700 and chance.random() < 0.05
            end = world.fail_spill if fails else world.end_spill
            end(chance.randrange(len(world.copying)))
        elif kind == 4:
            world.begin_load(name, 5)
        elif kind == 5 and world.loading:
            is_bad = chance.random() < 0.1
            world.end_load(chance.randrange(len(world.loading)), is_bad=is_bad)
        elif kind == 6 and chance.random() < 0.2:
            world.drop_cache()
        if chance.random() < 0.3:
            world.publish()
        world.check()
    assert world.loaded > 0, "nothing of this was tested"


def run(pool: BlockPool, hashes: list[bytes]) -> None:
    """A sequence computes a prompt and ends."""
    hits = pool.match(hashes)
    pool.pin(hits)
    blocks = pool.allocate(len(hashes) - len(hits))
    for block, digest in zip(blocks, hashes[len(hits) :], strict=True):
        pool.register(block, digest)
    pool.release([*hits, *blocks])


def spill_all(tiers: BlockTiers) -> list[bytes]:
    """Copy all that is behind; returns the hashes in order."""
    done = []
    while (spill := tiers.next_spill()) is not None:
        assert tiers.end_spill(spill)
        done.append(spill.copy.digest)
    return done


def test_nothing_is_copied_while_half_of_the_pool_can_be_given_away() -> None:
    pool = BlockPool(8)
    tiers = BlockTiers(pool, [BlockTier("host", 8)])
    run(pool, chain("a", 4))
    assert not tiers.wants_spill
    assert tiers.next_spill() is None
    run(pool, chain("b", 2))
    assert tiers.wants_spill
    # The oldest first, of a prompt its end.
    assert spill_all(tiers) == [b"a3", b"a2"]
    assert not tiers.wants_spill


def test_what_was_evicted_is_found_in_the_tier() -> None:
    pool = BlockPool(6)
    tiers = BlockTiers(pool, [BlockTier("host", 8)])
    run(pool, chain("a", 6))
    assert spill_all(tiers) == [b"a5", b"a4", b"a3"]
    run(pool, chain("b", 3))
    found = tiers.find(chain("a", 6))
    assert [one.block is None for one in found] == [False] * 3 + [True] * 3
    assert [one.copy.slot for one in found if one.copy is not None] == [2, 1, 0]


def test_a_block_that_is_evicted_while_it_is_copied_is_not_kept() -> None:
    pool = BlockPool(4)
    tiers = BlockTiers(pool, [BlockTier("host", 8)])
    run(pool, chain("a", 4))
    spill = tiers.next_spill()
    assert spill is not None
    run(pool, chain("b", 1))
    assert not tiers.end_spill(spill)
    assert len(tiers.tiers[0]) == 0
    assert [one.digest for one in tiers.find(chain("a", 4))] == chain("a", 3)


def test_host_memory_makes_room_for_what_the_disk_has() -> None:
    pool = BlockPool(2)
    host, disk = BlockTier("host", 2), BlockTier("disk", 8)
    tiers = BlockTiers(pool, [host, disk])
    for name in "abcdef":
        run(pool, chain(name, 1))
        spill_all(tiers)
    held = [one.digest for one in tiers.find(chain("a", 1))]
    assert held == [b"a0"]
    assert disk.find(b"a0") is not None
    assert all(tiers.find(chain(name, 1)) for name in "abcdef")


def test_a_block_that_came_back_from_disk_goes_to_host_memory_too() -> None:
    pool = BlockPool(2)
    host, disk = BlockTier("host", 2), BlockTier("disk", 8)
    tiers = BlockTiers(pool, [host, disk])
    for name in "abcdef":
        run(pool, chain(name, 1))
        spill_all(tiers)
    assert host.find(b"a0") is None
    run(pool, chain("a", 1))
    run(pool, chain("g", 1))
    spill_all(tiers)
    assert host.find(b"a0") is not None


def test_a_dropped_copy_keeps_its_slot_while_it_is_read() -> None:
    tier = BlockTier("disk", 1)
    begun = tier.begin_write(b"x", ())
    assert begun is not None
    copy, _ = begun
    assert tier.begin_write(b"y", ()) is None
    tier.end_write(copy)
    tier.begin_read(copy)
    assert tier.begin_write(b"y", ()) is None, "it would be overwritten"
    assert tier.drop_all() == [copy]
    assert tier.find(b"x") is None
    assert tier.begin_write(b"y", ()) is None
    assert not tier.is_idle
    tier.end_read(copy)
    assert tier.is_idle
    assert tier.begin_write(b"y", ()) is not None


@pytest.mark.parametrize("written", [0, 1, 3])
def test_a_full_disk_keeps_what_was_written(written: int) -> None:
    tier = BlockTier("disk", 5)
    for index in range(written):
        begun = tier.begin_write(bytes([index]), ())
        assert begun is not None
        tier.end_write(begun[0])
    begun = tier.begin_write(b"x", ())
    assert begun is not None
    tier.retire(begun[0])
    assert tier.total == written == len(tier)
    tier.check()
    again = tier.begin_write(b"y", ())
    assert (again is None) == (written == 0)
    if again is not None:
        assert again[1] is not None, "the oldest makes room"


def test_the_index_hears_of_a_block_until_pool_and_tier_have_lost_it() -> None:
    pool = BlockPool(2)
    tiers = BlockTiers(pool, [BlockTier("host", 1)])
    (block,) = pool.allocate(1)
    pool.register(block, b"x", [b"x-0"])
    pool.release([block])
    run(pool, [b"y"])
    spill_all(tiers)
    assert set(tiers.drain_changes()[0]) == {b"x", b"x-0", b"y"}
    run(pool, [b"z"])
    assert pool.holder(b"x") is None
    assert tiers.drain_changes() == ([b"z"], [])
    # Its slot goes to the next one, which the pool still has.
    spill_all(tiers)
    stored, removed = tiers.drain_changes()
    assert (stored, set(removed)) == ([], {b"x", b"x-0"})
    assert set(tiers.held_hashes()) == {b"y", b"z"}
