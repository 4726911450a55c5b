"""Tickets: a worker's promises of blocks to writers.

    RESERVED ─first bytes→ RECEIVING ─commit→ COMMITTED (the sequence owns the blocks)
    RESERVED, RECEIVING ─abort, expiry, failure→ RELEASED ─last copy ended→ its blocks are free

A released ticket is quarantined while a copy into its blocks is running. On every transport, the
receiver does the copying and asks here before each copy. So this closes the only path to its
blocks: a writer that was stopped and wakes later cannot damage them.

Every rank of a receiver has its own ticket, for what it receives from each rank of the writer. The
ticket on rank 0 is decisive. It is complete once the other ranks have reported theirs as complete.
It is quarantined until they have reported that no copy is running any more.

``TicketBook`` has all tickets of a rank, and the tombstones of early aborts. ``TicketReceiver`` is
the part of receiving that all ranks share: only a ticket's own writer may send bytes and renew it.

Plain Python: data and ``now`` in, data out. Owned by the event loop of its rank.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from baton.errors import HandoffError, TicketEnded
from baton.request import AttemptName
from kvtransfer.layout.shard_layout import ShardLayout

_Runs = list[tuple[int, int]]


class TicketState(enum.Enum):
    """State of a ticket; the module's docstring shows the transitions."""

    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    RELEASED = "released"


class Purpose(enum.Enum):
    """The use of a ticket's blocks: a handoff or a pull."""

    HANDOFF = "handoff"
    """KV of a sequence that the writer hands over."""
    PULL = "pull"
    """Cached blocks that the receiving worker itself has requested from the writer."""


class Ticket:
    """One rank's ticket: the blocks reserved for a writer, the bytes that have arrived, and the
    lease."""

    def __init__(
        self,
        ticket_id: str,
        attempt: AttemptName,
        writer: str,
        *,
        missing: list[int],
        pinned: list[int],
        block_bytes: int,
        lease_s: float,
        now: float,
        purpose: Purpose = Purpose.HANDOFF,
        shards: Sequence[ShardLayout] = (),
        others: Iterable[int] = (),
    ) -> None:
        """``missing`` are the blocks that the writer sends. ``pinned`` are blocks that are in this
        worker's cache already.

        ``shards`` are the parts of blocks that this rank receives if the writer or the receiver has
        several ranks. Without them, whole blocks of ``block_bytes`` arrive. ``others`` are the
        receiver's other ranks, and are given on its rank 0 alone.
        """
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
        self._holds = 0
        """Number of commits that wait. While it is not zero, the lease does not expire, because the
        writer stops renewing it once all bytes have arrived."""
        self._shards = {shard.shard.source_rank: shard for shard in shards}
        self._awaited = {rank: self._all_of(rank) for rank in self._shards or (0,)}
        """Byte ranges [start, end) for which no copy has begun yet, by the writer's rank and by
        missing block."""
        self._lacking = set(others)
        """Other ranks of the receiver that have not yet received all their bytes of the ticket."""
        self._others = frozenset(self._lacking)
        self._copying: set[int] = set()
        """Other ranks of the receiver on which copies may still run, although the ticket is
        released."""
        self._bytes_of_others = 0

    def _all_of(self, rank: int) -> dict[int, _Runs]:
        """Return all byte ranges that one rank of the writer has to send, by missing block."""
        size, shard = self._part_bytes(rank), self._shards.get(rank)
        count = range(len(self.missing))
        return {i: [(0, size)] for i in count if shard is None or shard.shard.has(i)}

    def _part_bytes(self, rank: int) -> int:
        """Return how many bytes of each block one rank of the writer sends; 0 if it sends none."""
        if not self._shards:
            return 0 if rank else self.block_bytes
        return self._shards[rank].block_bytes if rank in self._shards else 0

    @property
    def is_open(self) -> bool:
        """Whether the ticket's writer may still write to its blocks."""
        return self.state in (TicketState.RESERVED, TicketState.RECEIVING)

    @property
    def is_complete(self) -> bool:
        """Whether every byte of the ticket's blocks has arrived and was verified."""
        return not (any(self._awaited.values()) or self.copies or self._lacking)

    @property
    def is_quarantined(self) -> bool:
        """Whether a copy into the ticket's released blocks is still running."""
        return self.state is TicketState.RELEASED and (self.copies > 0 or bool(self._copying))

    @property
    def expected_bytes(self) -> int:
        """Number of bytes that this rank expects, plus the bytes that the other ranks have
        reported."""
        if not self._shards:
            return len(self.missing) * self.block_bytes
        own = sum(len(self._all_of(rank)) * self._part_bytes(rank) for rank in self._shards)
        return own + self._bytes_of_others

    def renew(self, now: float) -> None:
        """Renew the ticket's lease, because the writer has sent a heartbeat or data."""
        if self.is_open:
            self.expires_at = now + self.lease_s

    def hold(self, writer: str) -> None:
        """Keep the lease from expiring until ``let_go`` is called, because a commit waits for the
        receiver itself.

        Raises TicketEnded if the ticket is not open for ``writer``.
        """
        if not self.is_open or writer != self.writer:
            raise TicketEnded(f"ticket {self.ticket_id} is not open for {writer}")
        self._holds += 1

    def let_go(self, now: float) -> None:
        """Undo one call of ``hold``. The ticket's lease restarts at full length from ``now``."""
        self._holds -= 1
        self.renew(now)

    def has_expired(self, now: float) -> bool:
        return self.is_open and not self._holds and now >= self.expires_at

    @property
    def awaited_bytes(self) -> int:
        """Number of the ticket's bytes for which no copy has begun yet."""
        runs = (run for blocks in self._awaited.values() for run in blocks.values())
        return sum(end - start for each in runs for start, end in each)

    def begin_copy(
        self, targets: Sequence[int], offset: int, length: int, now: float, rank: int = 0
    ) -> tuple[int, ...] | None:
        """Allow one copy of the same part of some missing blocks.

        ``targets`` are numbers of missing blocks from 0; ``rank`` is the writer's rank. Returns the
        blocks to write to. Returns None if the part of all these blocks is stored or being copied
        already. Raises TicketEnded once the ticket is no longer open. Raises HandoffError for a
        part that the ticket does not have, or if only some of the blocks still await the part.
        """
        if not self.is_open:
            raise TicketEnded(f"ticket {self.ticket_id} has ended: {self.state.value}")
        fits = 0 <= offset < offset + length <= self._part_bytes(rank)
        known = targets and min(targets) >= 0 and max(targets) < len(self.missing)
        if not (known and fits) or len(set(targets)) != len(targets):
            raise HandoffError(
                f"ticket {self.ticket_id} has no {length} bytes at {offset} of blocks {targets}"
            )
        self.renew(now)
        self.state = TicketState.RECEIVING
        blocks = self._awaited[rank]
        whole = [(offset, offset + length)]
        awaited = [
            blocks.get(each) == whole or self._is_awaited(blocks, each, offset, offset + length)
            for each in targets
        ]
        if not any(awaited):
            return None
        if not all(awaited):
            raise HandoffError(f"ticket {self.ticket_id}: some of a batch's bytes arrived twice")
        for target in targets:
            _strike(blocks, target, offset, offset + length)
        self.copies += 1
        return tuple(self.missing[target] for target in targets)

    def _is_awaited(self, blocks: dict[int, _Runs], target: int, start: int, end: int) -> bool:
        """Whether no copy has begun for any byte of [start, end) of a block. Returns False if
        copies have begun for all of these bytes.

        Raises HandoffError if copies have begun for only some of them.
        """
        runs = blocks.get(target, [])
        if runs == [(start, end)]:
            return True
        if any(first <= start and end <= last for first, last in runs):
            return True
        if any(first < end and start < last for first, last in runs):
            raise HandoffError(f"ticket {self.ticket_id}: parts of a block overlap")
        return False

    def end_copy(self) -> None:
        """Record that a copy is over, successful or not: one for which ``begin_copy`` returned
        blocks."""
        self.copies -= 1

    def shorten(self, count: int) -> list[int]:
        """Keep only the first ``count`` missing blocks, because the writer has no more blocks to
        send.

        Returns the blocks that are no longer reserved for the writer. Raises TicketEnded once the
        ticket is no longer open. Raises HandoffError while copies run, since they might write to
        those blocks.
        """
        if not self.is_open:
            raise TicketEnded(f"ticket {self.ticket_id} has ended: {self.state.value}")
        if not 0 <= count <= len(self.missing) or self.copies:
            raise HandoffError(
                f"ticket {self.ticket_id} cannot be shortened to {count} of {len(self.missing)}"
                f" blocks while {self.copies} copies are running"
            )
        self.missing, dropped = self.missing[:count], self.missing[count:]
        self._awaited = {
            rank: {index: runs for index, runs in blocks.items() if index < count}
            for rank, blocks in self._awaited.items()
        }
        return dropped

    def commit(self, writer: str) -> None:
        """Give the ticket's blocks to the sequence.

        Raises TicketEnded once the ticket is no longer open, and HandoffError if bytes are missing.
        """
        if not self.is_open or writer != self.writer:
            raise TicketEnded(f"ticket {self.ticket_id} is not open for {writer}")
        if not self.is_complete:
            raise HandoffError(
                f"ticket {self.ticket_id} lacks {self.awaited_bytes} bytes, {self.copies} copies "
                f"have not ended, and {len(self._lacking)} other ranks lack bytes"
            )
        self.state = TicketState.COMMITTED

    def release(self) -> bool:
        """End the ticket without a commit; idempotent. Returns whether this call ended it."""
        if not self.is_open:
            return False
        self.state = TicketState.RELEASED
        self._copying = set(self._others)
        return True

    # For a receiver's rank 0

    def rank_filled(self, rank: int, count: int) -> None:
        """Record that rank ``rank`` of the receiver has all its bytes; ``count`` is their
        number."""
        if rank in self._lacking:
            self._lacking.discard(rank)
            self._bytes_of_others += count

    def rank_freed(self, rank: int) -> None:
        """Record that on rank ``rank`` of the receiver, no copy into the released blocks is running
        any more."""
        self._copying.discard(rank)


def _strike(blocks: dict[int, _Runs], target: int, start: int, end: int) -> None:
    """Remove bytes [start, end) of block ``target`` from the awaited bytes, because a copy of them
    begins."""
    if blocks[target] == [(start, end)]:
        del blocks[target]
        return
    left = []
    for first, last in blocks[target]:
        cut = ((first, min(last, start)), (max(first, end), last))
        left += [run for run in cut if run[0] < run[1]]
    if left:
        blocks[target] = left
    else:
        del blocks[target]


TOMBSTONE_S = 60.0
"""Seconds for which an abort that arrives before its reserve is remembered. This is longer than a
call can be retried."""
MAX_TOMBSTONES = 10_000


class TicketBook:
    """All tickets of a rank until they end, and the tombstones of early aborts."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._of_attempt: dict[AttemptName, str] = {}
        self._tombstones: OrderedDict[AttemptName, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets.values()))

    def add(self, ticket: Ticket) -> None:
        """Add a ticket. Raises TicketEnded if its attempt was aborted before."""
        self.check_alive(ticket.attempt)
        self._tickets[ticket.ticket_id] = ticket
        self._of_attempt[ticket.attempt] = ticket.ticket_id

    def check_alive(self, attempt: AttemptName) -> None:
        """Raise TicketEnded if an abort of this attempt has left a tombstone."""
        if attempt in self._tombstones:
            raise TicketEnded(f"request {attempt[0]} was aborted before its blocks were reserved")

    def get(self, ticket_id: str) -> Ticket:
        """Return the ticket with an id.

        Raises TicketEnded if there is none: it has ended, or never existed.
        """
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            raise TicketEnded(f"ticket {ticket_id} is unknown here")
        return ticket

    def find_id(self, ticket_id: str) -> Ticket | None:
        """Return the ticket with an id; None if there is none."""
        return self._tickets.get(ticket_id)

    def find(self, attempt: AttemptName) -> Ticket | None:
        """Return the ticket of an attempt; None if it has none."""
        ticket_id = self._of_attempt.get(attempt)
        return None if ticket_id is None else self._tickets.get(ticket_id)

    def bury(self, attempt: AttemptName, now: float) -> None:
        """Leave a tombstone for an attempt that is over, so that a reserve that arrives later is
        refused."""
        self._tombstones[attempt] = now + TOMBSTONE_S
        self._tombstones.move_to_end(attempt)
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def drop(self, ticket: Ticket) -> None:
        """Remove a ticket that has ended from the book. Its blocks must no longer be
        quarantined."""
        self._tickets.pop(ticket.ticket_id, None)
        self._of_attempt.pop(ticket.attempt, None)

    def expired(self, now: float) -> list[Ticket]:
        """Return the open tickets whose lease has expired."""
        return [ticket for ticket in self._tickets.values() if ticket.has_expired(now)]

    def sweep(self, now: float) -> None:
        """Drop the tombstones that have expired."""
        while self._tombstones and next(iter(self._tombstones.values())) <= now:
            self._tombstones.popitem(last=False)


class TicketReceiver:
    """Checks that only a ticket's own writer sends bytes for it and renews it. Implements these
    methods of ``kvtransfer.pairs.inbound_pair.TicketKeeper``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` measures leases, in seconds; see ``baton.liveness.listening``."""
        self.clock = clock
        self.book = TicketBook()
        self._transports: dict[str, str] = {}
        """Name of the transport that last carried bytes of each ticket, by ticket id."""

    def begin_copy(
        self,
        ticket_id: str,
        writer: str,
        transport: str,
        targets: Sequence[int],
        offset: int,
        length: int,
        now: float,
        rank: int = 0,
    ) -> tuple[int, ...] | None:
        """Allow a copy into a ticket's blocks, as ``Ticket.begin_copy`` does. Also raises
        TicketEnded if the ticket belongs to another writer."""
        ticket = self.book.get(ticket_id)
        if ticket.writer != writer:
            raise TicketEnded(f"ticket {ticket_id} is not open for {writer}")
        blocks = ticket.begin_copy(targets, offset, length, now, rank)
        self._transports[ticket_id] = transport
        return blocks

    def renew(self, writer: str, ticket_ids: Sequence[str], now: float) -> list[str]:
        """Renew the leases of a writer's tickets, after its heartbeat.

        Returns the ids of tickets to which the writer must no longer write.
        """
        ended = []
        for ticket_id in ticket_ids:
            ticket = self.book.find_id(ticket_id)
            if ticket is not None and ticket.is_open and ticket.writer == writer:
                ticket.renew(now)
            else:
                ended.append(ticket_id)
        return ended
