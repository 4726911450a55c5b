"""The tiers behind a block pool: what is copied before eviction, and what a prompt finds.

Blocks move down one tier at a time, the oldest first. First come the blocks that the pool would
evict next, and then those for which the first tier would make room next. They are copied *ahead*,
so that an eviction costs nothing. At each level, the blocks that it may soon give away are free, or
have a copy below. A copy stays where it is when its block returns.

A cached block is copied without a pin, so that copying takes nothing from what can be allocated. If
the block is evicted meanwhile, its copy is discarded.

Plain Python, owned by the engine core.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tier import BlockTier, Copy

_AHEAD = 0.5
"""Share of the blocks of a level (pool or tier) that should be free or copied below, so that they
can be evicted at once. A long prompt takes many blocks at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Spill:
    """A copy that has to be made from the pool, or from a tier, to the next lower tier."""

    source: BlockTier | None
    """The tier to copy from; None means the pool."""
    place: int
    """Block number in the pool, or slot number in the source tier."""
    target: BlockTier
    copy: Copy
    origin: Copy | None
    """The copy in the source tier that is read; None if the source is the pool."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where one block of a prompt was found: in the pool, or as a copy in a tier."""

    digest: bytes
    block: int | None
    """Block number in the pool; None if the block is only in ``tier``, as ``copy``."""
    tier: BlockTier | None = None
    copy: Copy | None = None


class BlockTiers:
    """The block pool with its offload tiers: decides what is copied down, and finds blocks on all
    levels.

    Implements ``engine.scheduling.block_pool.CacheListener``.
    """

    def __init__(self, pool: BlockPool, tiers: Sequence[BlockTier]) -> None:
        """``tiers`` are the offload tiers in order of speed, the fastest first."""
        self.pool = pool
        self.tiers = tuple(tiers)
        pool.subscribe(self)
        self._bare: OrderedDict[int, None] = OrderedDict()
        """Cached blocks of the pool that the first tier has no copy of, the longest unused
        first."""
        self._bare_copies: list[OrderedDict[bytes, Copy]] = [OrderedDict() for _ in self.tiers]
        """For each tier, the copies that this tier has and the next lower tier lacks, in about the
        order of their last use."""
        self._turn = len(self.tiers) - 1
        """Level from which the latest copy was made: 0 is the pool, 1 the first tier."""
        self._spilling: dict[int, Spill] = {}
        """Copies in progress from the pool to the first tier, by block number."""
        self._leading: Counter[bytes] = Counter()
        self._changed: dict[bytes, None] = {}

    # Events of the pool

    def idle(self, block: int) -> None:
        """Note that a block of the pool became cached, so that it is copied to the first tier
        unless that tier has it."""
        digest, _ = self.pool.contents(block)
        for tier in self.tiers:
            tier.touch(digest)
        # A block that came from a lower tier goes to the first tier too, because it was used. A
        # block that expires in the pool is not copied: it would be held for longer in the tier.
        if not self.tiers[0].has(digest) and not self.pool.expires(block):
            self._bare[block] = None

    def busy(self, block: int) -> None:
        """Note that a cached block of the pool was pinned. While the block is in use, no copy of it
        is needed."""
        self._bare.pop(block, None)

    def evicted(self, block: int) -> None:
        """Note that the pool evicts a block: a copy of it in progress is invalid."""
        self._bare.pop(block, None)
        # A copy in progress of this block is torn.
        self._spilling.pop(block, None)

    # Copies to lower tiers

    @property
    def wants_spill(self) -> bool:
        """Whether blocks or copies should now be copied to a lower tier. ``next_spill`` returns the
        first of them."""
        return self._pool_is_behind() or any(
            self._is_behind(level) for level in range(len(self.tiers) - 1)
        )

    def _pool_is_behind(self) -> bool:
        if not self._bare:
            return False
        wanted = min(int(self.pool.total * _AHEAD), self.tiers[0].total)
        return self.pool.available - len(self._bare) < wanted

    def _is_behind(self, level: int) -> bool:
        tier, bare = self.tiers[level], self._bare_copies[level]
        if not bare:
            return False
        wanted = min(int(tier.total * _AHEAD), self.tiers[level + 1].total)
        return tier.room + len(tier) - len(bare) < wanted

    def next_spill(self) -> Spill | None:
        """Return the next copy to make to a lower tier; None if there is none. The caller makes the
        copy, and then calls ``end_spill``.

        The levels take turns: under pressure the first tier must not lose blocks that the next one
        lacks.
        """
        for _ in self.tiers:
            self._turn = (self._turn + 1) % len(self.tiers)
            spill = self._from_pool() if self._turn == 0 else self._from_tier(self._turn - 1)
            if spill is not None:
                return spill
        return None

    def _from_pool(self) -> Spill | None:
        while self._pool_is_behind():
            block, _ = self._bare.popitem(last=False)
            digest, leading = self.pool.contents(block)
            copy = self._begin_write(0, digest, leading)
            if copy is not None:
                spill = Spill(None, block, self.tiers[0], copy, None)
                self._spilling[block] = spill
                return spill
        return None

    def _from_tier(self, level: int) -> Spill | None:
        source, target = self.tiers[level], self.tiers[level + 1]
        while self._is_behind(level):
            _, origin = self._bare_copies[level].popitem(last=False)
            copy = self._begin_write(level + 1, origin.digest, origin.leading)
            if copy is not None:
                source.begin_read(origin)
                return Spill(source, origin.slot, target, copy, origin)
        return None

    def _begin_write(self, level: int, digest: bytes, leading: tuple[bytes, ...]) -> Copy | None:
        begun = self.tiers[level].begin_write(digest, leading)
        if begun is None:
            return None
        copy, victim = begun
        if victim is not None:
            self._forget(level, victim)
        return copy

    def end_spill(self, spill: Spill, *, failed: bool = False, damaged: bool = False) -> bool:
        """Record that the copying of a block to a lower tier has ended. Returns whether the new
        copy can be found now.

        ``failed``: true if the slot of the new copy could not be written. ``damaged``: true if the
        bytes read were wrong.
        """
        if spill.source is None:
            is_whole = self._spilling.pop(spill.place, None) is spill
        else:
            is_whole = True
            if spill.origin is not None:
                spill.source.end_read(spill.origin)
        if failed:
            spill.target.retire(spill.copy)
            return False
        if not is_whole or damaged:
            spill.target.abandon(spill.copy)
            return False
        if not spill.target.end_write(spill.copy):
            return False
        level = self.tiers.index(spill.target)
        self._hold(level, spill.copy)
        return True

    def _hold(self, level: int, copy: Copy) -> None:
        if not any(tier.has(copy.digest) for tier in self.tiers[level + 1 :]):
            self._bare_copies[level][copy.digest] = copy
        self._changed[copy.digest] = None
        for prefix in copy.leading:
            self._leading[prefix] += 1
            self._changed[prefix] = None

    def _forget(self, level: int, copy: Copy) -> None:
        self._bare_copies[level].pop(copy.digest, None)
        self._changed[copy.digest] = None
        for prefix in copy.leading:
            self._leading[prefix] -= 1
            if not self._leading[prefix]:
                del self._leading[prefix]
            self._changed[prefix] = None

    # Loads from the tiers

    def find(self, hashes: Iterable[bytes]) -> list[Found]:
        """Locate the blocks of the longest leading run of ``hashes`` for which the pool or a tier
        has a block. These blocks are not pinned."""
        run = []
        for digest in hashes:
            found = self._find(digest)
            if found is None:
                break
            run.append(found)
        return run

    def _find(self, digest: bytes) -> Found | None:
        block = self.pool.holder(digest)
        if block is not None:
            return Found(digest, block)
        for tier in self.tiers:
            copy = tier.find(digest)
            if copy is not None:
                return Found(digest, None, tier, copy)
        return None

    def begin_load(self, run: Iterable[Found]) -> None:
        """Keep the tiers' copies of these blocks in their slots, until ``end_load`` is called."""
        for found in run:
            if found.tier is not None and found.copy is not None:
                found.tier.begin_read(found.copy)
                found.tier.touch(found.digest)

    def end_load(self, run: Iterable[Found], bad: Iterable[bytes] = ()) -> None:
        """Undo a call of ``begin_load``: the tiers may replace the copies of these blocks again.
        Copies with hashes in ``bad`` are damaged, and are dropped."""
        damaged = set(bad)
        for found in run:
            if found.tier is None or found.copy is None:
                continue
            found.tier.end_read(found.copy)
            if found.digest in damaged and found.tier.find(found.digest) is found.copy:
                self._forget(self.tiers.index(found.tier), found.copy)
                found.tier.drop(found.copy)

    # For the prefix index

    @property
    def total(self) -> int:
        """Number of blocks that the pool and the tiers can hold."""
        return self.pool.total + sum(tier.total for tier in self.tiers)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes that were stored and the hashes that were removed since the last call,
        in pool and tiers together."""
        stored, removed = self.pool.drain_changes()
        changed, self._changed = self._changed, {}
        gone = [digest for digest in removed if not self._holds(digest)]
        for digest in changed:
            # The pool reported its blocks when it stored them; those that it lost are in
            # ``removed``.
            if self.pool.holds(digest):
                continue
            (stored if self._holds(digest) else gone).append(digest)
        return stored, list(dict.fromkeys(gone))

    def held_hashes(self) -> list[bytes]:
        """All hashes that the prefix index has to list."""
        held = dict.fromkeys(self.pool.held_hashes())
        for tier in self.tiers:
            held.update((copy.digest, None) for copy in tier)
        held.update(dict.fromkeys(self._leading))
        return list(held)

    def _holds(self, digest: bytes) -> bool:
        in_tier = any(tier.find(digest) for tier in self.tiers)
        return in_tier or digest in self._leading

    # Dropping the cache

    def drop_cache(self) -> int:
        """Evict all cached blocks of the pool, and drop all copies of the tiers. Returns their
        number."""
        copied = {copy.digest for tier in self.tiers for copy in tier}
        alone = sum(1 for digest in copied if self.pool.holder(digest) is None)
        dropped = self.pool.counts().cached + alone
        self.pool.drop_cache()
        for level, tier in enumerate(self.tiers):
            for copy in tier.drop_all():
                self._forget(level, copy)
        return dropped

    @property
    def is_idle(self) -> bool:
        """Whether no copy of any tier is being read or written."""
        return all(tier.is_idle for tier in self.tiers)

    def check(self) -> None:
        """Assert that the records of the pool and the tiers agree."""
        for tier, bare in zip(self.tiers, self._bare_copies, strict=True):
            tier.check()
            assert all(tier.find(digest) is copy for digest, copy in bare.items()), "a lost copy"
        leading = Counter(prefix for tier in self.tiers for copy in tier for prefix in copy.leading)
        assert leading == self._leading, "leading hashes disagree"
        for block in self._bare:
            digest, _ = self.pool.contents(block)
            assert self.tiers[0].find(digest) is None, "a copied block is bare"
