"""A ticket: a worker's promise of blocks to one writer.

    RESERVED ─first segment→ RECEIVING ─commit→ COMMITTED (the sequence owns the blocks)
    RESERVED, RECEIVING ─abort, expiry, failure→ RELEASED ─last copy ended→ its blocks are free

A released ticket is quarantined while a copy into its blocks is under way: with the gRPC transport
the receiver does the copying, asks here before each copy, and so closes the only path.

Plain Python: data and ``now`` in, data out. Owned by the receiver's control loop.
"""

from __future__ import annotations

import enum

from baton.errors import HandoffError, TicketEnded

SEGMENT_BYTES = 1 << 20
"""Most bytes of a segment; larger messages halve gRPC's throughput."""


Attempt = tuple[str, int]
"""(request id, number of the attempt)"""


class TicketState(enum.Enum):
    """See the module's text."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    RELEASED = "released"


def segments_of(block_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the segments in which a block travels."""
    return [
        (offset, min(SEGMENT_BYTES, block_bytes - offset))
        for offset in range(0, block_bytes, SEGMENT_BYTES)
    ]


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
    ) -> None:
        self.ticket_id = ticket_id
        self.attempt = attempt
        self.writer = writer
        self.missing = missing
        self.pinned = pinned
        self.block_bytes = block_bytes
        self.lease_s = lease_s
        self.reserved_at = now
        self.expires_at = now + lease_s
        self.state = TicketState.RESERVED
        self.copies = 0
        self._segments = segments_of(block_bytes)
        self._awaited = {
            (block, offset) for block in range(len(missing)) for offset, _ in self._segments
        }

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

    def begin_copy(self, block_index: int, offset: int, length: int, now: float) -> int | None:
        """Permission to copy a segment. Returns the block to write to, None for a duplicate.

        Raises TicketEnded once it is no longer open, HandoffError for a segment that cannot be.
        """
        if not self.is_open:
            raise TicketEnded(f"ticket {self.ticket_id} has ended: {self.state.value}")
        is_missing = 0 <= block_index < len(self.missing)
        if not is_missing or (offset, length) not in self._segments:
            raise HandoffError(
                f"ticket {self.ticket_id} has no segment of {length} bytes at {offset} "
                f"of block {block_index}"
            )
        self.renew(now)
        self.state = TicketState.RECEIVING
        if (block_index, offset) not in self._awaited:
            return None
        self._awaited.discard((block_index, offset))
        self.copies += 1
        return self.missing[block_index]

    def end_copy(self) -> None:
        """A copy for which ``begin_copy`` gave a block has ended, well or not."""
        self.copies -= 1

    def commit(self, writer: str) -> None:
        """The blocks become the sequence's. Raises TicketEnded, or HandoffError if bytes lack."""
        if not self.is_open or writer != self.writer:
            raise TicketEnded(f"ticket {self.ticket_id} is not open for {writer}")
        if not self.is_complete:
            raise HandoffError(
                f"ticket {self.ticket_id} lacks {len(self._awaited) + self.copies} segments"
            )
        self.state = TicketState.COMMITTED

    def release(self) -> bool:
        """End the promise; idempotent. Returns whether this call ended it."""
        if not self.is_open:
            return False
        self.state = TicketState.RELEASED
        return True
