"""A ticket: a worker's promise of blocks to one writer.

    RESERVED ─first bytes→ RECEIVING ─commit→ COMMITTED (the sequence owns the blocks)
    RESERVED, RECEIVING ─abort, expiry, failure→ RELEASED ─last copy ended→ its blocks are free

A released ticket is quarantined while a copy into its blocks is under way. On every transport the
receiver does the copying, asks here before each copy, and so closes the only path to its blocks: a
writer that was stopped and wakes later finds nothing to spoil.

Plain Python: data and ``now`` in, data out. Owned by the receiver's control loop.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from baton.errors import HandoffError, TicketEnded

Attempt = tuple[str, int]
"""(request id, number of the attempt)"""


class TicketState(enum.Enum):
    """See the module's text."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    RELEASED = "released"


class Purpose(enum.Enum):
    """What a ticket's blocks are for."""

    HANDOFF = "handoff"
    """A sequence that its writer hands over."""
    PULL = "pull"
    """Cached blocks that the worker itself has asked its writer for."""


class Ticket:
    """One promise. ``missing`` are the blocks to be written, ``pinned`` those held already."""

    def __init__(
        self,
        ticket_id: str,
        attempt: Attempt,
        writer: str,
        *,
        missing: list[int],
        pinned: list[int],
        block_bytes: int,
        lease_s: float,
        now: float,
        purpose: Purpose = Purpose.HANDOFF,
    ) -> None:
        self.ticket_id = ticket_id
        self.attempt = attempt
        self.purpose = purpose
        self.writer = writer
        self.missing = missing
        self.pinned = pinned
        self.block_bytes = block_bytes
        self.lease_s = lease_s
        self.reserved_at = now
        self.expires_at = now + lease_s
        self.state = TicketState.RESERVED
        self.copies = 0
        self._awaited = {index: [(0, block_bytes)] for index in range(len(missing))}
        """Of each missing block the runs of bytes, (start, end), that nobody has begun to copy."""

    @property
    def is_open(self) -> bool:
        """Whether its writer may still write."""
        return self.state in (TicketState.RESERVED, TicketState.RECEIVING)

    @property
    def is_complete(self) -> bool:
        """Whether every byte has arrived and was verified."""
        return not self._awaited and self.copies == 0

    @property
    def is_quarantined(self) -> bool:
        """Whether a copy into its released blocks is still under way."""
        return self.state is TicketState.RELEASED and self.copies > 0

    @property
    def expected_bytes(self) -> int:
        return len(self.missing) * self.block_bytes

    def renew(self, now: float) -> None:
        """A heartbeat or data of the writer."""
        if self.is_open:
            self.expires_at = now + self.lease_s

    def has_expired(self, now: float) -> bool:
        return self.is_open and now >= self.expires_at

    @property
    def awaited_bytes(self) -> int:
        """Bytes that nobody has begun to copy."""
        return sum(end - start for runs in self._awaited.values() for start, end in runs)

    def begin_copy(
        self, targets: Sequence[int], offset: int, length: int, now: float
    ) -> tuple[int, ...] | None:
        """Permission to copy the same part of some missing blocks, as one copy.

        ``targets`` count the missing blocks from 0. Returns the blocks to write to, None where all
        of it is in place or being copied already. Raises TicketEnded once it is no longer open,
        HandoffError for parts that cannot be, or of which some are there and some are not.
        """
        if not self.is_open:
            raise TicketEnded(f"ticket {self.ticket_id} has ended: {self.state.value}")
        fits = 0 <= offset < offset + length <= self.block_bytes
        known = all(0 <= target < len(self.missing) for target in targets)
        if not (targets and known and fits) or len(set(targets)) != len(targets):
            raise HandoffError(
                f"ticket {self.ticket_id} has no {length} bytes at {offset} of blocks {targets}"
            )
        self.renew(now)
        self.state = TicketState.RECEIVING
        awaited = [self._is_awaited(target, offset, offset + length) for target in targets]
        if not any(awaited):
            return None
        if not all(awaited):
            raise HandoffError(f"ticket {self.ticket_id}: some of a batch's bytes came twice")
        for target in targets:
            self._strike(target, offset, offset + length)
        self.copies += 1
        return tuple(self.missing[target] for target in targets)

    def _is_awaited(self, target: int, start: int, end: int) -> bool:
        """Whether all of it is; False if none is. Raises HandoffError for a part of it."""
        runs = self._awaited.get(target, [])
        if runs == [(start, end)]:
            return True
        if any(first <= start and end <= last for first, last in runs):
            return True
        if any(first < end and start < last for first, last in runs):
            raise HandoffError(f"ticket {self.ticket_id}: parts of a block overlap")
        return False

    def _strike(self, target: int, start: int, end: int) -> None:
        if self._awaited[target] == [(start, end)]:
            del self._awaited[target]
            return
        left = []
        for first, last in self._awaited[target]:
            cut = ((first, min(last, start)), (max(first, end), last))
            left += [run for run in cut if run[0] < run[1]]
        if left:
            self._awaited[target] = left
        else:
            del self._awaited[target]

    def end_copy(self) -> None:
        """A copy for which ``begin_copy`` gave a block has ended, well or not."""
        self.copies -= 1

    def shorten(self, count: int) -> list[int]:
        """Only the first ``count`` missing blocks are wanted: the writer has no more.

        Returns the blocks that are no longer promised. Raises TicketEnded once it is no longer
        open, HandoffError while copies are under way: they might be into those.
        """
        if not self.is_open:
            raise TicketEnded(f"ticket {self.ticket_id} has ended: {self.state.value}")
        if not 0 <= count <= len(self.missing) or self.copies:
            raise HandoffError(
                f"ticket {self.ticket_id} cannot be cut to {count} of {len(self.missing)} blocks "
                f"while {self.copies} copies are under way"
            )
        self.missing, dropped = self.missing[:count], self.missing[count:]
        self._awaited = {index: runs for index, runs in self._awaited.items() if index < count}
        return dropped

    def commit(self, writer: str) -> None:
        """The blocks become the sequence's. Raises TicketEnded, or HandoffError if bytes lack."""
        if not self.is_open or writer != self.writer:
            raise TicketEnded(f"ticket {self.ticket_id} is not open for {writer}")
        if not self.is_complete:
            raise HandoffError(
                f"ticket {self.ticket_id} lacks {self.awaited_bytes} bytes, and "
                f"{self.copies} copies have not ended"
            )
        self.state = TicketState.COMMITTED

    def release(self) -> bool:
        """End the promise; idempotent. Returns whether this call ended it."""
        if not self.is_open:
            return False
        self.state = TicketState.RELEASED
        return True
