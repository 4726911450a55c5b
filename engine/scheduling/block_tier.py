"""One tier behind the block pool: which copy of a block lies in which slot.

A slot is in one of these states:

    free      holds nothing that can be found
    writing   a copy is being made; not found yet
    held      found by its hash; the one longest unused makes room
    reading   held, and being read by at least one: it stays as it is until they have ended
    retired   could not be written: never used again

    free ─begin_write→ writing ─end_write→ held;  writing ─abandon→ free
    held ─begin_read→ reading ─end_read→ held, or free where it was dropped meanwhile
    held ─begin_write of another (the oldest)→ writing
    writing ─retire→ retired

Slots that were never used come last, so that a file grows only as far as it must. Plain Python,
owned by the engine core.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class Copy:
    """A block's copy in a slot."""

    __slots__ = ("digest", "dropped", "leading", "readers", "slot")

    def __init__(self, digest: bytes, leading: tuple[bytes, ...], slot: int) -> None:
        """``leading`` are the hashes of the shorter prefixes that end within the block."""
        self.digest = digest
        self.leading = leading
        self.slot = slot
        self.readers = 0
        self.dropped = False
        """It is forgotten; its slot is free once nobody reads or writes it."""


class BlockTier:
    """The slots 0 … ``total - 1``; see the module's text."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self._held: OrderedDict[bytes, Copy] = OrderedDict()
        self._writing: dict[bytes, Copy] = {}
        self._forgotten = 0
        """Copies that are dropped, and still read or written."""
        self._free: list[int] = []
        self._used = 0
        """Slots that were used at least once: the next new one's number."""
        self._end = total
        """The first number that is no slot any more."""
        self._retired = 0

    def __len__(self) -> int:
        """Copies that can be found."""
        return len(self._held)

    def __iter__(self) -> Iterator[Copy]:
        """Those that can be found, the longest unused first."""
        return iter(self._held.values())

    @property
    def total(self) -> int:
        """Slots that are not retired."""
        return self._end - self._retired

    @property
    def room(self) -> int:
        """Slots that are free."""
        return len(self._free) + self._end - self._used

    @property
    def is_idle(self) -> bool:
        """Whether no slot is being read or written."""
        readers = any(copy.readers for copy in self._held.values())
        return not (self._writing or self._forgotten or readers)

    def find(self, digest: bytes) -> Copy | None:
        """The copy of a block."""
        return self._held.get(digest)

    def has(self, digest: bytes) -> bool:
        """Whether a block is held here, or soon will be."""
        return digest in self._held or digest in self._writing

    def touch(self, digest: bytes) -> None:
        """A block was used: others make room before it does."""
        if digest in self._held:
            self._held.move_to_end(digest)

    def begin_write(
        self, digest: bytes, leading: tuple[bytes, ...]
    ) -> tuple[Copy, Copy | None] | None:
        """A slot for a block, and the copy that made room for it, which is forgotten.

        None where every slot is being read or written, or where the block is here.
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
        """The bytes are there. Returns whether the block can be found: not if it was dropped."""
        if copy.dropped:
            self._end_forgotten(copy)
            return False
        del self._writing[copy.digest]
        self._held[copy.digest] = copy
        return True

    def abandon(self, copy: Copy) -> None:
        """A copy that is being written is worth nothing."""
        if copy.dropped:
            self._end_forgotten(copy)
            return
        del self._writing[copy.digest]
        self._free.append(copy.slot)

    def retire(self, copy: Copy) -> None:
        """A slot could not be written, so that those that were never used cannot be either."""
        self.abandon(copy)
        self._free.remove(copy.slot)
        self._retired += 1
        self._end = self._used

    def begin_read(self, copy: Copy) -> None:
        """It keeps its slot until ``end_read``."""
        copy.readers += 1

    def end_read(self, copy: Copy) -> None:
        """See ``begin_read``."""
        copy.readers -= 1
        if copy.dropped and not copy.readers:
            self._end_forgotten(copy)

    def _end_forgotten(self, copy: Copy) -> None:
        self._forgotten -= 1
        self._free.append(copy.slot)

    def drop(self, copy: Copy) -> None:
        """Forget a copy that can be found, or that is being written."""
        is_busy = copy.readers > 0 or copy.digest in self._writing
        self._held.pop(copy.digest, None)
        self._writing.pop(copy.digest, None)
        copy.dropped = True
        if is_busy:
            self._forgotten += 1
        else:
            self._free.append(copy.slot)

    def drop_all(self) -> list[Copy]:
        """Forget everything; returns what could be found."""
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
