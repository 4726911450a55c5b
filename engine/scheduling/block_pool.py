"""The block pool: which KV blocks are in use, which can be found by hash, which are evicted.

A block is in one of these states:

    free         holds nothing that can be found
    used         pinned by at least one sequence or ticket
    cached       pinned by none, its contents can be found by hash; evicted oldest first, and those
                 that are retained after all others
    quarantined  released, but a writer elsewhere may still write to it

    free ─allocate→ used ─release→ free, or cached if it has a hash
    cached ─pin→ used;  cached ─allocate (eviction)→ used;  cached ─expire→ free
    used ─quarantine→ quarantined ─end_quarantine→ free

``engine.scheduling.retention`` decides which hashes are retained, and
``engine.scheduling.prefix_cache`` finds blocks for sequences. If blocks run out, the cheapest
sequence to recompute loses its blocks (``victim_of``). Plain Python, owned by the engine core.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Set
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

from engine.scheduling.sequence import Sequence

_NONE: OrderedDict[int, float] = OrderedDict()


class OutOfBlocks(Exception):
    """Fewer blocks are free or evictable than requested."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks in each state."""

    free: int
    used: int
    cached: int
    quarantined: int


class CacheListener(Protocol):
    """Copies cached blocks elsewhere. It must not change the pool.

    The pool calls each method before it makes the change. If a method raises, the pool stays
    unchanged.
    """

    def idle(self, block: int) -> None:
        """The pool calls this when a block becomes cached, so that it may be evicted from now
        on."""

    def busy(self, block: int) -> None:
        """The pool calls this when a sequence or ticket pins a cached block."""

    def evicted(self, block: int) -> None:
        """The pool calls this when it evicts a cached block, whose memory is about to be reused."""


class BlockPool:
    """State of the blocks 0 … ``total - 1`` of one cache group: free, used, cached or
    quarantined."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = [0] * total
        self._unused = range(total)
        """Free blocks that were never allocated."""
        self._released: deque[int] = deque()
        """Free blocks that were allocated before, in order of release."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._retained: set[bytes] = set()
        self._retained_cached: OrderedDict[int, None] = OrderedDict()
        """Cached blocks whose hashes are retained."""
        self._ttl_of: dict[int, float] = {}
        """For each block with a TTL, the seconds for which it stays cached after its last use. A
        block without an entry never expires."""
        self._newly_cached: dict[int, None] = {}
        """Cached blocks that have an entry in ``_ttl_of`` and were added since the last call of
        ``expire``."""
        self._expiring: dict[float, OrderedDict[int, float]] = {}
        """For each TTL in seconds, the cached blocks with this TTL and their expiry times, in order
        of expiry."""
        self._quarantined: set[int] = set()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._leading_of: dict[int, tuple[bytes, ...]] = {}
        self._leading: Counter[bytes] = Counter()
        self._changed: dict[bytes, bool] = {}
        self._listeners: tuple[CacheListener, ...] = ()

    def subscribe(self, listener: CacheListener) -> None:
        """Add a listener, which is called for each change from now on."""
        self._listeners = (*self._listeners, listener)

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated now: those that are free or cached."""
        free = len(self._unused) + len(self._released)
        return free + len(self._cached) + len(self._retained_cached)

    @property
    def _free_count(self) -> int:
        return len(self._unused) + len(self._released)

    @property
    def _cached_count(self) -> int:
        return len(self._cached) + len(self._retained_cached)

    def counts(self) -> BlockCounts:
        rest = self.available + len(self._quarantined)
        return BlockCounts(
            free=self._free_count,
            used=self.total - rest,
            cached=self._cached_count,
            quarantined=len(self._quarantined),
        )

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest leading run of ``hashes`` for which the pool has blocks.
        These blocks are not pinned."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, digest: bytes) -> bool:
        """Whether a block or a prefix with this hash is in the pool, so that the prefix index lists
        it."""
        return digest in self._block_of or digest in self._leading

    def holder(self, digest: bytes) -> int | None:
        """Return the block with this hash; None if there is none."""
        return self._block_of.get(digest)

    def contents(self, block: int) -> tuple[bytes, tuple[bytes, ...]]:
        """Return a findable block's hash, and the hashes of the shorter prefixes that end within
        the block."""
        return self._hash_of[block], self._leading_of.get(block, ())

    def evictable(self, blocks: Iterable[int]) -> int:
        """Count the blocks among ``blocks`` that have no user. Pinning one of these reduces the
        number of available blocks."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def is_shared(self, block: int) -> bool:
        """Whether a block has several users (sequences or tickets)."""
        return self._references[block] > 1

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a user to each block. The blocks must be used or cached."""
        blocks = list(blocks)
        for listener in self._listeners:
            for block in blocks:
                if self._references[block] == 0:
                    listener.busy(block)
        # As in ``release``, the code below calls no function.
        for block in blocks:
            if self._references[block] == 0:
                retained = self._hash_of[block] in self._retained
                del (self._retained_cached if retained else self._cached)[block]
                if block in self._ttl_of:
                    self._newly_cached.pop(block, None)
                    self._expiring.get(self._ttl_of[block], _NONE).pop(block, None)
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks, each with one user. If too few are free, the least recently
        used cached blocks are evicted, retained ones last.

        Raises OutOfBlocks without any change.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks needed, {self.available} available")
        while self._free_count < count:
            self._evict()
        unused = self._unused[:count]
        blocks = [*unused, *[self._released.popleft() for _ in range(count - len(unused))]]
        # Last: nothing may raise between this and the use of the blocks.
        self._unused = self._unused[count:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> None:
        """Evict the least recently used cached block; a retained one only if there is no other."""
        self._forget(next(iter(self._cached or self._retained_cached)))

    def _forget(self, block: int) -> None:
        """Make a cached block free, and its contents no longer findable."""
        queue = self._queue_of(block)
        for listener in self._listeners:
            listener.evicted(block)
        # As in ``release``, the code below calls no function.
        del queue[block]
        if block in self._ttl_of:
            self._newly_cached.pop(block, None)
            self._expiring.get(self._ttl_of.pop(block), _NONE).pop(block, None)
        self._released.append(block)
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self._changed[digest] = False
        for prefix in self._leading_of.pop(block, ()):
            self._leading[prefix] -= 1
            if not self._leading[prefix]:
                del self._leading[prefix]
                self._changed[prefix] = False

    def release(self, blocks: Several[int]) -> None:
        """Remove a user from each block. Blocks are evicted in reverse order, so a prompt's last
        block goes first."""
        for block, count in Counter(reversed(blocks)).items():
            if self._references[block] < count:
                raise ValueError(f"block {block} is released more often than pinned")
            if self._listeners and self._references[block] == count and block in self._hash_of:
                for listener in self._listeners:
                    listener.idle(block)
        # The code below calls no function: an exception midway would lose blocks.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                digest = self._hash_of.get(block)
                if digest is None:
                    self._released.append(block)
                    continue
                queue = self._retained_cached if digest in self._retained else self._cached
                queue[block] = None
                if block in self._ttl_of:
                    self._newly_cached[block] = None

    def _queue_of(self, block: int) -> OrderedDict[int, None]:
        is_retained = self._hash_of[block] in self._retained
        return self._retained_cached if is_retained else self._cached

    def register(
        self, block: int, digest: bytes, leading: Several[bytes] = (), ttl_s: float = 0.0
    ) -> int:
        """Make a used block's contents findable.

        Returns the block that holds these contents from now on. That is another one if equal
        contents were cached already; the caller may then use it instead of its own. ``leading`` are
        the hashes of the shorter prefixes that end within the block. The prefix index lists them,
        but they find nothing here. Several blocks may share one. ``ttl_s`` is the time after the
        last use until the block expires, in seconds; 0 means never.
        """
        if self._references[block] <= 0:
            raise ValueError(f"block {block} is not in use")
        holder = self._block_of.get(digest)
        if holder is not None:
            return holder
        if block in self._hash_of:
            raise ValueError(f"block {block} has another hash already")
        if ttl_s:
            self._ttl_of[block] = ttl_s
        self._block_of[digest] = block
        self._hash_of[block] = digest
        self._changed[digest] = True
        if leading:
            self._leading_of[block] = tuple(leading)
        for prefix in leading:
            self._leading[prefix] += 1
            self._changed[prefix] = True
        return block

    # Retention and expiry

    @property
    def retained(self) -> Set[bytes]:
        """Hashes whose blocks are evicted last, whether or not the blocks are cached now."""
        return self._retained

    def retain(self, digests: Several[bytes]) -> None:
        """Mark these hashes as retained: their blocks are evicted after all others, the last hash's
        first.

        The blocks need not be cached yet.
        """
        self._change_retention(digests, self._retained.add)

    def end_retention(self, digests: Several[bytes]) -> None:
        """Unmark these hashes: their blocks are evicted like all others. Cached ones count as just
        used."""
        self._change_retention(digests, self._retained.discard)

    def _change_retention(self, digests: Several[bytes], change: Callable[[bytes], None]) -> None:
        for digest in reversed(digests):
            block = self._block_of.get(digest)
            if block is None or self._references[block] > 0:
                change(digest)
                continue
            # As in ``release``: ``change`` is a set's method, which does not raise.
            (self._retained_cached if digest in self._retained else self._cached).pop(block)
            change(digest)
            queue = self._retained_cached if digest in self._retained else self._cached
            queue[block] = None

    def expires(self, block: int) -> bool:
        """Whether a findable block has a TTL in the cache."""
        return block in self._ttl_of

    def expire(self, now: float) -> int:
        """Forget the cached blocks whose last use is longer ago than their TTL.

        Returns their number. The TTL counts from the first call of ``expire`` after the block's
        last use; retention counts as use. ``now`` is in seconds, on any monotonic clock.
        """
        for block in self._newly_cached:
            ttl_s = self._ttl_of[block]
            self._expiring.setdefault(ttl_s, OrderedDict())[block] = now + ttl_s
        self._newly_cached = {}
        count = 0
        for ttl_s, blocks in self._expiring.items():
            while blocks and next(iter(blocks.values())) <= now:
                block = next(iter(blocks))
                if self._hash_of[block] in self._retained:
                    blocks[block] = now + ttl_s
                    blocks.move_to_end(block)
                else:
                    self._forget(block)
                    count += 1
        return count

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Reserve used blocks to which a writer elsewhere may still write. Each of these blocks
        must have one user and no hash."""
        for block in blocks:
            if self._references[block] != 1 or block in self._hash_of:
                raise ValueError(f"block {block} cannot be quarantined: it is shared or findable")
            self._references[block] = 0
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """Make quarantined blocks free. Call this only when no writer can still write to them."""
        for block in blocks:
            self._quarantined.remove(block)
            self._released.append(block)

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes stored and the hashes removed since the last call, for the prefix
        index."""
        changed, self._changed = self._changed, {}
        stored = [digest for digest, held in changed.items() if held]
        return stored, [digest for digest, held in changed.items() if not held]

    def held_hashes(self) -> list[bytes]:
        """All hashes that the prefix index has to list."""
        return [*self._block_of, *self._leading]

    def drop_cache(self) -> None:
        """Evict all cached blocks; used blocks stay findable."""
        while self._cached_count:
            self._evict()

    def check(self) -> None:
        """Assert that each block is in exactly one state; cheap enough for idle moments."""
        free = {*self._unused, *self._released}
        cached = {*self._cached, *self._retained_cached}
        used = {block for block, count in enumerate(self._references) if count > 0}
        states = [free, cached, used, self._quarantined]
        assert sum(map(len, states)) == self.total == len(set().union(*states)), "a block is lost"
        assert len(free) == self._free_count, "a block is free twice"
        assert all(count >= 0 for count in self._references), "a block has a negative count"
        assert cached <= self._hash_of.keys(), "a cached block has no hash"
        retained = {block for block in cached if self._hash_of[block] in self._retained}
        assert retained == self._retained_cached.keys(), "a retained block is in the wrong queue"
        assert self._ttl_of.keys() <= self._hash_of.keys(), "a block without a hash expires"
        waits = Counter(self._newly_cached.keys())
        for blocks in self._expiring.values():
            waits.update(blocks.keys())
        assert waits == Counter(cached & self._ttl_of.keys()), "a block expires twice or never"
        assert not (free | self._quarantined) & self._hash_of.keys(), "a free block has a hash"
        assert {d: b for b, d in self._hash_of.items()} == self._block_of, "hashes disagree"
        assert self._leading_of.keys() <= self._hash_of.keys(), "a block has leading hashes alone"
        shared = Counter(prefix for held in self._leading_of.values() for prefix in held)
        assert shared == self._leading, "leading hashes disagree"


PATIENCE = 3
"""Number of preemptions after which a sequence is preempted only after all others, whatever their
priorities. So even a sequence of the lowest priority ends."""
CACHED_SHARE = 0.25
"""Cost of recomputing a token whose block may still be in the prefix cache, relative to a token
that must be computed. It is above 0 because such blocks may be evicted before the sequence
resumes."""


def victim_of(candidates: Several[Sequence], pool: BlockPool, block_size: int) -> Sequence:
    """Choose the sequence to preempt; ``candidates`` is not empty.

    The order is: lowest priority, fewest preemptions, lowest cost to recompute, last of
    ``candidates``, which are in order of arrival. So the first sequence in this order is preempted
    only if it is the only candidate. It runs to its end, and then the next one gets its blocks.
    """

    def rank(place: int) -> tuple[bool, int, int, float, int]:
        one = candidates[place]
        has_waited = one.preemptions >= PATIENCE
        level = 0 if has_waited else -one.spec.priority
        return has_waited, level, one.preemptions, recompute_cost(one, pool, block_size), -place

    return candidates[min(range(len(candidates)), key=rank)]


def recompute_cost(sequence: Sequence, pool: BlockPool, block_size: int) -> float:
    """Estimate the cost of resuming a sequence after a preemption, in tokens to compute.

    Full blocks that the sequence shares with others stay in the pool, and cost nothing.
    """
    full = sequence.block_table[: sequence.registered]
    own = sum(not pool.is_shared(block) for block in full)
    rest = max(0, sequence.computed - sequence.registered * block_size)
    return rest + CACHED_SHARE * own * block_size
