"""One tier behind the block pool: which slot holds which block's copy.

A slot is in one of these states:

    free      holds nothing that can be found
    writing   a copy is being made; not found yet
    held      found by its hash; the least recently used copy makes room
    reading   held, with at least one reader: it does not change until all readers have ended
    retired   could not be written: never used again

    free ─begin_write→ writing ─end_write→ held;  writing ─abandon→ free
    held ─begin_read→ reading ─end_read→ held, or free if it was dropped meanwhile
    held ─begin_write of another (the oldest)→ writing
    writing ─retire→ retired

Slots that were never used are taken last, so that a file grows no more than it must. Plain Python,
owned by the engine core.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Copy:
    """A copy of a block in a slot of an offload tier."""

    __slots__ = ("digest", "dropped", "leading", "readers", "slot")

    def __init__(self, digest: bytes, leading: tuple[bytes, ...], slot: int) -> None:
        """``leading`` are the hashes of the shorter prefixes that end within the block."""
        self.digest = digest
        self.leading = leading
        self.slot = slot
        self.readers = 0
        self.dropped = False
        """Whether the copy can no longer be found. Its slot becomes free when no read or write of
        the copy is in progress."""


class BlockTier:
    """State of the slots 0 … ``total - 1`` of one offload tier, and the copies that they hold."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self._held: OrderedDict[bytes, Copy] = OrderedDict()
        self._writing: dict[bytes, Copy] = {}
        self._forgotten = 0
        """Number of dropped copies that are still being read or written."""
        self._free: list[int] = []
        self._used = 0
        """Number of slots that were used at least once. It is also the number of the next unused
        slot."""
        self._end = total
        """Number of usable slots at the start of the range: slots from this number on are
        retired."""
        self._retired = 0

    def __len__(self) -> int:
        """Number of copies in the tier that can be found."""
        return len(self._held)

    def __iter__(self) -> Iterator[Copy]:
        """Iterate over the copies that can be found, the least recently used first."""
        return iter(self._held.values())

    @property
    def total(self) -> int:
        """Number of slots that are not retired."""
        return self._end - self._retired

    @property
    def room(self) -> int:
        """Number of free slots."""
        return len(self._free) + self._end - self._used

    @property
    def is_idle(self) -> bool:
        """Whether no slot is being read or written."""
        readers = any(copy.readers for copy in self._held.values())
        return not (self._writing or self._forgotten or readers)

    def find(self, digest: bytes) -> Copy | None:
        """Return the copy of the block with this hash; None if there is none that can be found."""
        return self._held.get(digest)

    def has(self, digest: bytes) -> bool:
        """Whether a copy of the block with this hash is held or being written."""
        return digest in self._held or digest in self._writing

    def touch(self, digest: bytes) -> None:
        """Mark the copy with this hash as the most recently used, so that other copies are replaced
        first."""
        if digest in self._held:
            self._held.move_to_end(digest)

    def begin_write(
        self, digest: bytes, leading: tuple[bytes, ...]
    ) -> tuple[Copy, Copy | None] | None:
        """Get a slot for a copy of a block. Returns the new copy, and the old copy that it
        replaces, if any.

        Returns None if every slot is being read or written, or if the tier has the block already.
        """
        if self.has(digest):
            return None
        victim = None
        copy = Copy(digest, leading, slot=-1)
        if self._free:
            copy.slot = self._free.pop()
        elif self._used < self._end:
            copy.slot = self._used
            self._used += 1
        else:
            victim = next((held for held in self._held.values() if not held.readers), None)
            if victim is None:
                return None
            del self._held[victim.digest]
            copy.slot = victim.slot
        self._writing[digest] = copy
        return copy, victim

    def end_write(self, copy: Copy) -> bool:
        """Complete a copy. Returns whether the copy can be found: false if it was dropped while it
        was written."""
        if copy.dropped:
            self._end_forgotten(copy)
            return False
        del self._writing[copy.digest]
        self._held[copy.digest] = copy
        return True

    def abandon(self, copy: Copy) -> None:
        """Discard a copy that is being written, and free its slot."""
        if copy.dropped:
            self._end_forgotten(copy)
            return
        del self._writing[copy.digest]
        self._free.append(copy.slot)

    def retire(self, copy: Copy) -> None:
        """Retire the slot of a copy that could not be written, and all slots that were never
        used."""
        self.abandon(copy)
        self._free.remove(copy.slot)
        self._retired += 1
        self._end = self._used

    def begin_read(self, copy: Copy) -> None:
        """Add a reader: the copy stays in its slot until each reader has called ``end_read``."""
        copy.readers += 1

    def end_read(self, copy: Copy) -> None:
        """Remove a reader from a copy, which was added by ``begin_read``."""
        copy.readers -= 1
        if copy.dropped and not copy.readers:
            self._end_forgotten(copy)

    def _end_forgotten(self, copy: Copy) -> None:
        self._forgotten -= 1
        self._free.append(copy.slot)

    def drop(self, copy: Copy) -> None:
        """Make a copy unfindable, whether it is complete or being written."""
        is_busy = copy.readers > 0 or copy.digest in self._writing
        self._held.pop(copy.digest, None)
        self._writing.pop(copy.digest, None)
        copy.dropped = True
        if is_busy:
            self._forgotten += 1
        else:
            self._free.append(copy.slot)

    def drop_all(self) -> list[Copy]:
        """Make all copies unfindable. Returns those that could be found."""
        held = list(self._held.values())
        for copy in (*held, *self._writing.values()):
            self.drop(copy)
        return held

    def check(self) -> None:
        """Assert that each slot is in one state."""
        busy = [copy.slot for copy in (*self._held.values(), *self._writing.values())]
        assert len(set(busy) | set(self._free)) == len(busy) + len(self._free), "a slot twice"
        assert all(slot < self._used for slot in (*busy, *self._free)), "a slot that is not used"
        assert len(busy) + self._forgotten + self.room == self.total, "a slot is lost"
        assert not self._held.keys() & self._writing.keys(), "a block twice"
