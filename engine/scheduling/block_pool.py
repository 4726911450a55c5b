"""The block pool: which KV blocks are in use, which can be found by hash, which are taken back.

A block is in one of these states:

    free         holds nothing that can be found
    used         pinned by at least one sequence or ticket
    cached       pinned by none, its contents can be found by hash; evicted oldest first
    quarantined  released, but a writer elsewhere may still write to it

    free ─allocate→ used ─release→ free, or cached where it has a hash
    cached ─pin→ used;  cached ─allocate (eviction)→ used
    used ─quarantine→ quarantined ─end_quarantine→ free

``PrefixCache`` finds blocks for sequences. Where blocks run out, the sequence that costs least
loses its own (``victim_of``). Plain Python, owned by the engine core.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

from baton.hashing import last_hashes
from engine.scheduling.sequence import SchedulerLimits, Sequence


class OutOfBlocks(Exception):
    """Fewer blocks are free or evictable than were asked for."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in each state."""

    free: int
    used: int
    cached: int
    quarantined: int


class CacheListener(Protocol):
    """Copies cached blocks elsewhere. It must not change the pool.

    It is called before each change. Where it raises, the pool stays as it was.
    """

    def idle(self, block: int) -> None:
        """A block has become cached: from now on it may be evicted."""

    def busy(self, block: int) -> None:
        """A cached block has been pinned."""

    def evicted(self, block: int) -> None:
        """A cached block is about to be forgotten, and will hold something else."""


class BlockPool:
    """The blocks 0 … ``total - 1`` of one cache group."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = [0] * total
        self._free: deque[int] = deque(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._leading_of: dict[int, tuple[bytes, ...]] = {}
        self._leading: Counter[bytes] = Counter()
        self._changed: dict[bytes, bool] = {}
        self._listeners: tuple[CacheListener, ...] = ()

    def subscribe(self, listener: CacheListener) -> None:
        """Call ``listener`` from the next change on."""
        self._listeners = (*self._listeners, listener)

    @property
    def available(self) -> int:
        """Blocks that ``allocate`` can give."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        rest = len(self._free) + len(self._cached) + len(self._quarantined)
        return BlockCounts(
            free=len(self._free),
            used=self.total - rest,
            cached=len(self._cached),
            quarantined=len(self._quarantined),
        )

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of leading hashes that are held. Pins nothing."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, digest: bytes) -> bool:
        """Whether the prefix index is to know of a hash."""
        return digest in self._block_of or digest in self._leading

    def holder(self, digest: bytes) -> int | None:
        """The block that is found by a hash."""
        return self._block_of.get(digest)

    def contents(self, block: int) -> tuple[bytes, tuple[bytes, ...]]:
        """The hash of a findable block, and those of the shorter prefixes that end within it."""
        return self._hash_of[block], self._leading_of.get(block, ())

    def evictable(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` count as available now and will not once they are pinned."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def is_shared(self, block: int) -> bool:
        """Whether it has several users."""
        return self._references[block] > 1

    def pin(self, blocks: Iterable[int]) -> None:
        """One more user of each block, which must be used or cached."""
        blocks = list(blocks)
        for listener in self._listeners:
            for block in blocks:
                if self._references[block] == 0:
                    listener.busy(block)
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one user each; evicts the blocks longest unused.

        Raises OutOfBlocks, and then changes nothing.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.available} available")
        while len(self._free) < count:
            self._evict()
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> None:
        """Free the cached block that is least recently used."""
        block = next(iter(self._cached))
        for listener in self._listeners:
            listener.evicted(block)
        del self._cached[block]
        self._free.append(block)
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self._changed[digest] = False
        for prefix in self._leading_of.pop(block, ()):
            self._leading[prefix] -= 1
            if not self._leading[prefix]:
                del self._leading[prefix]
                self._changed[prefix] = False

    def release(self, blocks: Several[int]) -> None:
        """One user less of each block. The last of a sequence's blocks will be evicted first."""
        for block, count in Counter(reversed(blocks)).items():
            if self._references[block] < count:
                raise ValueError(f"block {block} is released more often than pinned")
            if self._listeners and self._references[block] == count and block in self._hash_of:
                for listener in self._listeners:
                    listener.idle(block)
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, digest: bytes, leading: Several[bytes] = ()) -> int:
        """Make a used block's contents findable. Returns the block that holds them from now on:

        another one, if equal contents were held already; the caller may exchange its own for it.
        ``leading`` are the hashes of the shorter prefixes that end within the block: the prefix
        index is told of them, but nothing is found here by them. Several blocks may share one.
        """
        if self._references[block] <= 0:
            raise ValueError(f"block {block} is not in use")
        holder = self._block_of.get(digest)
        if holder is not None:
            return holder
        if block in self._hash_of:
            raise ValueError(f"block {block} has another hash already")
        self._block_of[digest] = block
        self._hash_of[block] = digest
        self._changed[digest] = True
        if leading:
            self._leading_of[block] = tuple(leading)
        for prefix in leading:
            self._leading[prefix] += 1
            self._changed[prefix] = True
        return block

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Take blocks with one user and no hash out of circulation."""
        for block in blocks:
            if self._references[block] != 1 or block in self._hash_of:
                raise ValueError(f"block {block} cannot be quarantined: it is shared or findable")
            self._references[block] = 0
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """No writer is left: the blocks are free."""
        for block in blocks:
            self._quarantined.remove(block)
            self._free.append(block)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Hashes stored and removed since the last call, for the prefix index."""
        changed, self._changed = self._changed, {}
        stored = [digest for digest, held in changed.items() if held]
        return stored, [digest for digest, held in changed.items() if not held]

    def held_hashes(self) -> list[bytes]:
        """Every hash that the prefix index is to know of."""
        return [*self._block_of, *self._leading]

    def drop_cache(self) -> None:
        """Forget every block that nobody uses."""
        while self._cached:
            self._evict()

    def check(self) -> None:
        """Assert that each block is in exactly one state; cheap enough for idle moments."""
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(self._references) if count > 0}
        states = [free, cached, used, self._quarantined]
        assert sum(map(len, states)) == self.total == len(set().union(*states)), "a block is lost"
        assert len(free) == len(self._free), "a block is free twice"
        assert all(count >= 0 for count in self._references), "a block has a negative count"
        assert cached <= self._hash_of.keys(), "a cached block has no hash"
        assert not (free | self._quarantined) & self._hash_of.keys(), "a free block has a hash"
        assert {d: b for b, d in self._hash_of.items()} == self._block_of, "hashes disagree"
        assert self._leading_of.keys() <= self._hash_of.keys(), "a block has leading hashes alone"
        shared = Counter(prefix for held in self._leading_of.values() for prefix in held)
        assert shared == self._leading, "leading hashes disagree"


class PrefixCache:
    """Finds, registers and exchanges blocks of a pool for a scheduler's sequences."""

    __slots__ = ("_limits", "_pool")

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self._pool = pool
        self._limits = limits

    def prefix_of(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix of a sequence that has none of its own.

        The last token is computed in any case, since its logits are needed, and it is never
        written into a shared block: at most the blocks before it are taken.
        """
        if sequence.scores_prompt:
            # What is scored is computed: its logits are needed.
            return []
        most = (len(sequence.token_ids) - 1) // self._limits.block_size
        hashes = sequence.full_hashes(self._limits.hash_block)
        return self._pool.match(last_hashes(hashes, self._limits.hashes_per_block)[:most])

    def deduplicate(self, sequence: Sequence) -> None:
        """Exchange blocks whose contents were held already. Only for sequences not in flight."""
        for index in range(sequence.registered):
            own = sequence.block_table[index]
            holder = self._make_findable(sequence, index)
            if holder != own:
                self._pool.pin([holder])
                sequence.block_table[index] = holder
                # The block stays the sequence's until it is released: that may raise.
                sequence.spare.append(own)
                self._pool.release([own])
                sequence.spare.remove(own)

    def register(self, sequence: Sequence) -> None:
        """Make the blocks that have become full findable. Equal contents stay with their holder."""
        full = sequence.computed // self._limits.block_size
        if full <= sequence.registered:
            return
        sequence.full_hashes(self._limits.hash_block)
        for index in range(sequence.registered, full):
            self._make_findable(sequence, index)
        sequence.registered = full

    def _make_findable(self, sequence: Sequence, index: int) -> int:
        """See ``BlockPool.register``."""
        count = self._limits.hashes_per_block
        *leading, last = sequence.hashes[index * count : (index + 1) * count]
        return self._pool.register(sequence.block_table[index], last, leading)


PATIENCE = 3
"""A sequence that has lost its blocks so often comes before all that have not, whatever their
priorities: so even the lowest one ends."""
CACHED_SHARE = 0.25
"""What a token costs whose block can be found again, against one that must be computed: the blocks
are the first to be used by others, and then they cannot."""


def victim_of(candidates: Several[Sequence], pool: BlockPool, block_size: int) -> Sequence:
    """The one to lose its blocks; there is at least one.

    The lowest priority; of equals who has lost its blocks less often; then who is cheapest to bring
    back; then the last of ``candidates``, which stand in the order of their arrival. So one of them
    is not chosen while others are there: it ends, and leaves its blocks to the next.
    """

    def rank(place: int) -> tuple[bool, int, int, float, int]:
        one = candidates[place]
        has_waited = one.preemptions >= PATIENCE
        level = 0 if has_waited else -one.spec.priority
        return has_waited, level, one.preemptions, recompute_cost(one, pool, block_size), -place

    return candidates[min(range(len(candidates)), key=rank)]


def recompute_cost(sequence: Sequence, pool: BlockPool, block_size: int) -> float:
    """What it takes to bring a sequence back, in tokens to compute.

    Of its full blocks those that others use stay where they are, and cost nothing.
    """
    full = sequence.block_table[: sequence.registered]
    own = sum(not pool.is_shared(block) for block in full)
    rest = max(0, sequence.computed - sequence.registered * block_size)
    return rest + CACHED_SHARE * own * block_size
