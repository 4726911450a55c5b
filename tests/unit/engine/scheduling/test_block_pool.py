"""The block pool against a model of it, under any order of calls."""

from __future__ import annotations

from collections import Counter

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

from engine.scheduling.block_pool import BlockPool, OutOfBlocks

CHAINS = ("a", "b")
TTL_S = {"a": 0.0, "b": 5.0}
"""Of the blocks of each chain; 0: they do not expire."""


def chain(name: str, length: int) -> list[bytes]:
    """Hashes as of a prompt's leading blocks."""
    return [f"{name}{index}".encode() for index in range(length)]


def leading(digest: bytes) -> list[bytes]:
    """Hashes within a block of several hash blocks; the last one is common to two chains."""
    return [digest + b"-0", b"common-" + digest[1:]]


class BlockPoolMachine(RuleBasedStateMachine):
    """Owners hold lists of blocks, as sequences and tickets do; the model counts their pins."""

    @initialize(total=st.integers(1, 9))
    def start(self, total: int) -> None:
        self.pool = BlockPool(total)
        self.owners: list[list[int]] = []
        self.shared: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.named: dict[bytes, int] = {}
        self.index: set[bytes] = set()
        self.retained: set[bytes] = set()
        self.now = 0.0
        self.expires_at: dict[bytes, float] = {}
        """Of cached blocks with a time to live, since the first look after their last use."""

    def pins(self) -> Counter[int]:
        return Counter(block for blocks in self.owners for block in blocks)

    def outside(self) -> set[int]:
        return {block for blocks in self.quarantined for block in blocks}

    def forget_evicted(self, blocks: list[int]) -> None:
        self.named = {d: b for d, b in self.named.items() if b not in blocks}
        self.expires_at = {d: at for d, at in self.expires_at.items() if d in self.named}

    def use(self, blocks: list[int]) -> None:
        self.owners.append(blocks)
        used = {digest for digest, block in self.named.items() if block in blocks}
        self.expires_at = {d: at for d, at in self.expires_at.items() if d not in used}

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        before = (self.pool.counts(), self.pool.held_hashes())
        pinned, outside = self.pins(), self.outside()
        room = self.pool.total - len(pinned) - len(outside)
        assert room == self.pool.available
        free = room - self.pool.counts().cached
        if count > room:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            assert (self.pool.counts(), self.pool.held_hashes()) == before
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not (set(blocks) & (set(pinned) | outside)), "a block in use was handed out"
        evicted = [block for block in blocks if block in self.named.values()]
        assert len(evicted) == max(0, count - free), "evicted although blocks were free"
        cached = {digest for digest, block in self.named.items() if not pinned[block]}
        gone = {digest for digest in cached if self.named[digest] in evicted}
        if gone & self.retained:
            assert cached - gone <= self.retained, "a retained block was not the last to be evicted"
        self.forget_evicted(evicted)
        self.owners.append(blocks)

    @rule(name=st.sampled_from(CHAINS), length=st.integers(0, 5))
    def match_and_pin(self, name: str, length: int) -> None:
        hashes = chain(name, length)
        blocks = self.pool.match(hashes)
        depth = next((i for i, h in enumerate(hashes) if h not in self.named), length)
        assert blocks == [self.named[digest] for digest in hashes[:depth]]
        before, pinned = self.pool.available, self.pins()
        evictable = self.pool.evictable(blocks)
        assert evictable == sum(1 for block in blocks if not pinned[block])
        self.pool.pin(blocks)
        assert self.pool.available == before - evictable
        self.use(blocks)

    @rule(name=st.sampled_from(CHAINS), length=st.integers(1, 5))
    def prefill(self, name: str, length: int) -> None:
        """As a sequence does: pin what is there of its prompt, and make the rest findable."""
        hashes = chain(name, length)
        found = self.pool.match(hashes)
        if length - len(found) > self.pool.available - self.pool.evictable(found):
            return
        self.pool.pin(found)
        made = self.pool.allocate(length - len(found))
        self.forget_evicted(made)
        self.use([*found, *made])
        for digest, block in zip(hashes[len(found) :], made, strict=True):
            if digest not in self.named:
                self.pool.register(block, digest, leading(digest), TTL_S[name])
                self.named[digest] = block

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), name=st.sampled_from(CHAINS), depth=st.integers(0, 4))
    def register(self, data: st.DataObject, name: str, depth: int) -> None:
        blocks = data.draw(st.sampled_from(self.owners))
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        digest = chain(name, depth + 1)[-1]
        if digest in self.named:
            assert self.pool.register(block, digest, leading(digest)) == self.named[digest]
        elif block in self.named.values():
            with pytest.raises(ValueError, match="another hash"):
                self.pool.register(block, digest, leading(digest))
        else:
            assert self.pool.register(block, digest, leading(digest), TTL_S[name]) == block
            self.named[digest] = block

    @rule(name=st.sampled_from(CHAINS), length=st.integers(1, 5), is_over=st.booleans())
    def retain(self, name: str, length: int, is_over: bool) -> None:
        hashes = chain(name, length)
        if is_over:
            self.pool.end_retention(hashes)
            self.retained -= set(hashes)
        else:
            self.pool.retain(hashes)
            self.retained |= set(hashes)
        assert self.pool.retained == self.retained

    @rule(seconds=st.integers(0, 7))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        pinned, gone = self.pins(), []
        for digest, block in self.named.items():
            ttl_s = TTL_S[digest.decode()[0]]
            if not ttl_s or pinned[block]:
                continue
            expires_at = self.expires_at.setdefault(digest, self.now + ttl_s)
            if expires_at <= self.now and digest in self.retained:
                self.expires_at[digest] = self.now + ttl_s
            elif expires_at <= self.now:
                gone.append(block)
        assert self.pool.expire(self.now) == len(gone)
        self.forget_evicted(gone)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.owners))
        self.owners.remove(blocks)
        self.pool.release(blocks)

    @rule(block=st.integers(0, 8))
    def release_too_often(self, block: int) -> None:
        if block >= self.pool.total or self.pins()[block]:
            return
        with pytest.raises(ValueError, match="more often"):
            self.pool.release([block])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.owners))
        pinned, named = self.pins(), set(self.named.values())
        bad = [block for block in blocks if pinned[block] > 1 or block in named]
        if bad:
            with pytest.raises(ValueError, match="cannot be quarantined"):
                self.pool.quarantine(bad[:1])
            return
        self.owners.remove(blocks)
        self.pool.quarantine(blocks)
        self.quarantined.append(blocks)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.quarantined))
        self.quarantined.remove(blocks)
        self.pool.end_quarantine(blocks)

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        pinned = self.pins()
        self.forget_evicted([block for block in self.named.values() if not pinned[block]])

    @rule()
    def drain(self) -> None:
        stored, removed = self.pool.drain_changes()
        assert not set(stored) & set(removed)
        self.index = (self.index | set(stored)) - set(removed)
        assert self.index == set(self.pool.held_hashes()), "the prefix index would be wrong"
        assert self.pool.drain_changes() == ([], [])

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        counts, pinned = self.pool.counts(), self.pins()
        unused = {block for block in self.named.values() if not pinned[block]}
        assert counts.used == len(pinned)
        assert counts.cached == len(unused)
        assert counts.quarantined == len(self.outside())
        assert counts.free + counts.used + counts.cached + counts.quarantined == self.pool.total
        held = {prefix for digest in self.named for prefix in (digest, *leading(digest))}
        assert sorted(self.pool.held_hashes()) == sorted(held)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for blocks in self.owners:
            self.pool.release(blocks)
        for blocks in self.quarantined:
            self.pool.end_quarantine(blocks)
        self.pool.check()
        counts = self.pool.counts()
        assert counts.used == counts.quarantined == 0
        assert len(self.pool.allocate(self.pool.total)) == self.pool.total


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)


def test_the_longest_unused_goes_first_and_a_prefix_outlives_its_continuation() -> None:
    """Otherwise the end of a chain could not be found any more, and would still take room."""
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, digest in zip(old + new, chain("a", 2) + chain("b", 2), strict=True):
        pool.register(block, digest)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert pool.match(chain("a", 2)) == [old[0]]
    assert pool.allocate(2) == [old[0], new[1]]
    assert pool.match(chain("b", 2)) == [new[0]]


def test_a_pinned_block_is_never_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, b"x")
    pool.release([block])
    pool.pin(pool.match([b"x"]))
    assert pool.allocate(1) != [block]
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert pool.match([b"x"]) == [block]


def test_a_retained_block_is_evicted_after_younger_ones_and_still_makes_room() -> None:
    """So pins never keep a pool from serving."""
    pool = BlockPool(4)
    kept, other = pool.allocate(2), pool.allocate(2)
    for block, digest in zip(kept + other, chain("a", 2) + chain("b", 2), strict=True):
        pool.register(block, digest)
    pool.retain(chain("a", 2))
    pool.release(kept)
    pool.release(other)
    assert pool.available == 4
    assert sorted(pool.allocate(2)) == sorted(other)
    assert pool.match(chain("a", 2)) == kept
    assert pool.allocate(1) == [kept[1]], "its last block goes first"
    assert pool.match(chain("a", 2)) == [kept[0]]
    assert pool.allocate(1) == [kept[0]]


def test_a_block_that_was_evicted_is_retained_again_once_it_is_back() -> None:
    pool = BlockPool(2)
    pool.retain([b"x"])
    for digest in (b"x", b"y"):
        (block,) = pool.allocate(1)
        pool.register(block, digest)
        pool.release([block])
    pool.allocate(1)
    assert pool.match([b"x"]), "the younger one went first"


def test_an_unused_block_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="not in use"):
        BlockPool(1).register(0, b"x")


def test_a_prefix_in_two_blocks_is_published_until_both_are_gone() -> None:
    """Prompts that part within a block share its first hash blocks."""
    pool = BlockPool(2)
    one, other = pool.allocate(2)
    pool.register(one, b"one", [b"shared", b"its own"])
    pool.register(other, b"other", [b"shared"])
    stored, removed = pool.drain_changes()
    assert (sorted(stored), removed) == ([b"its own", b"one", b"other", b"shared"], [])
    assert pool.match([b"shared"]) == [], "half of a block was found"
    pool.release([one])
    assert pool.allocate(1) == [one]
    stored, removed = pool.drain_changes()
    assert (stored, sorted(removed)) == ([], [b"its own", b"one"])
    assert sorted(pool.held_hashes()) == [b"other", b"shared"]
    pool.check()
    pool.release([other])
    pool.drop_cache()
    stored, removed = pool.drain_changes()
    assert (stored, sorted(removed)) == ([], [b"other", b"shared"])
    pool.check()
