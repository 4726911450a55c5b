"""The receiving side of transfers, with a real block pool, under any order of calls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from baton.errors import BatonError, ChecksumMismatch, HandoffError, TicketEnded
from baton.liveness.listening import ListeningClock
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.scheduling.block_pool import BlockPool, OutOfBlocks
from kvtransfer.tickets import TOMBSTONE_S, Ticket, TicketState
from worker.exchange.block_receiver import NO_TRANSPORT, BlockReceiver

BLOCK_BYTES = 192
LEASE_S = 3.0
CUTS = (0, 64, 128, BLOCK_BYTES)


@dataclass
class Listener:
    """Records its calls."""

    released_errors: dict[str, BatonError] = field(default_factory=dict)

    def released(self, ticket: Ticket, error: BatonError) -> None:
        assert ticket.state is TicketState.RELEASED
        assert ticket.ticket_id not in self.released_errors, "told twice"
        self.released_errors[ticket.ticket_id] = error


def make_receiver(blocks: int = 12) -> tuple[BlockReceiver, Listener]:
    metrics = WorkerMetrics(CollectorRegistry())
    receiver = BlockReceiver(BlockPool(blocks), metrics, block_bytes=BLOCK_BYTES, lease_s=LEASE_S)
    listener = Listener()
    receiver.subscribe(listener.released)
    return receiver, listener


def promise(
    receiver: BlockReceiver,
    *,
    attempt: int = 0,
    missing: int = 2,
    pinned: list[int] | None = None,
    now: float = 10.0,
) -> Ticket:
    return receiver.promise(("r", attempt), "w", missing=missing, pinned=pinned or [], now=now)


def begin(
    receiver: BlockReceiver, ticket: Ticket, *targets: int, writer: str = "w", now: float = 10.0
) -> tuple[int, ...] | None:
    """Whole blocks."""
    return receiver.begin_copy(ticket.ticket_id, writer, "shm", targets, 0, BLOCK_BYTES, now)


def counted(receiver: BlockReceiver, outcome: str, transport: str = "shm") -> float:
    labels = {"transport": transport, "outcome": outcome}
    found = receiver._metrics.registry.get_sample_value("baton_handoffs_total", labels)
    return found or 0.0


@dataclass(eq=False)
class Copy:
    """A copy in flight, and the bytes that it brings."""

    ticket: Ticket
    bytes: set[tuple[int, int]]


class BlockReceiverMachine(RuleBasedStateMachine):
    """Writers that send in any cut and order, repeat themselves, fall silent and come too late."""

    @initialize(blocks=st.integers(2, 14))
    def start(self, blocks: int) -> None:
        self.receiver, self.listener = make_receiver(blocks)
        self.pool = self.receiver.pool
        self.now = 100.0
        self.tickets: list[Ticket] = []
        self.copies: list[Copy] = []
        self.begun: dict[Ticket, set[tuple[int, int]]] = defaultdict(set)
        self.done: dict[Ticket, set[tuple[int, int]]] = defaultdict(set)
        self.owned: list[list[int]] = []
        self.dead: dict[tuple[str, int], float] = {}

    @rule(missing=st.integers(0, 5), attempt=st.integers(0, 8), writer=st.sampled_from(("w", "v")))
    def promise(self, missing: int, attempt: int, writer: str) -> None:
        key = ("r", attempt)
        if self.receiver.book.find(key) is not None:
            return  # its caller looks first
        before = self.pool.counts()
        pinned = self.owned[-1][:2] if self.owned else []
        try:
            ticket = self.receiver.promise(
                key, writer, missing=missing, pinned=pinned, now=self.now
            )
        except (OutOfBlocks, TicketEnded):
            assert self.pool.counts() == before, "refused, yet kept"
            return
        assert self.now - self.dead.get(key, -TOMBSTONE_S) >= TOMBSTONE_S, "a ticket for the dead"
        assert len(ticket.missing) == missing
        self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(
        data=st.data(),
        indexes=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
        cut=st.sampled_from([(a, b) for a in CUTS for b in CUTS if a < b]),
        writer=st.sampled_from(("w", "w", "w", "v")),
    )
    def begin(
        self, data: st.DataObject, indexes: list[int], cut: tuple[int, int], writer: str
    ) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        wanted = {(target, at) for target in indexes for at in range(cut[0], cut[1], 64)}
        known, was_open = self.begun[ticket] & wanted, ticket.is_open
        try:
            blocks = self.receiver.begin_copy(
                ticket.ticket_id, writer, "shm", indexes, cut[0], cut[1] - cut[0], self.now
            )
        except TicketEnded:
            assert not was_open or writer != ticket.writer
            return
        except HandoffError:
            assert max(indexes) >= len(ticket.missing) or known
            return
        assert was_open, "a copy into blocks that were given back"
        assert writer == ticket.writer
        if blocks is None:
            assert known == wanted
            return
        assert not known, "copied twice"
        assert blocks == tuple(ticket.missing[target] for target in indexes)
        assert all(self.pool._references[block] == 1 for block in blocks)
        self.begun[ticket] |= wanted
        self.copies.append(Copy(ticket, wanted))

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), how=st.sampled_from(("ok", "ok", "ok", "checksum", "error", "drop")))
    def end(self, data: st.DataObject, how: str) -> None:
        copy = data.draw(st.sampled_from(self.copies))
        ticket_id, was_open = copy.ticket.ticket_id, copy.ticket.is_open
        if how == "drop" and was_open:
            return  # a copy is dropped because its ticket has ended
        self.copies.remove(copy)
        before = counted(self.receiver, how)
        if how == "ok":
            self.done[copy.ticket] |= copy.bytes
            self.receiver.end_copy(ticket_id, "shm", 64 * len(copy.bytes))
            assert not was_open or copy.ticket.is_complete is self.has_all(copy.ticket)
        elif how == "drop":
            self.receiver.drop_copy(ticket_id)
        else:
            error = ChecksumMismatch("damaged") if how == "checksum" else HandoffError("broken")
            self.receiver.fail_copy(ticket_id, error, self.now)
            assert copy.ticket.state is TicketState.RELEASED
            assert counted(self.receiver, how) == before + was_open
            assert (self.listener.released_errors[ticket_id] is error) is was_open

    def has_all(self, ticket: Ticket) -> bool:
        """Whether every byte of it is in place."""
        return len(self.done[ticket]) == 3 * len(ticket.missing)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), writer=st.sampled_from(("w", "w", "v")))
    def commit(self, data: st.DataObject, writer: str) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        may = ticket.is_open and writer == ticket.writer and self.has_all(ticket)
        if not may:
            with pytest.raises(HandoffError):
                self.receiver.commit(ticket.ticket_id, writer, self.now)
            return
        assert self.receiver.commit(ticket.ticket_id, writer, self.now) is ticket
        self.owned.append(ticket.pinned + ticket.missing)
        self.dead[ticket.attempt] = self.now

    @rule(attempt=st.integers(0, 8))
    def abort(self, attempt: int) -> None:
        key = ("r", attempt)
        self.receiver.abort(key, self.now)
        self.receiver.abort(key, self.now)
        self.dead[key] = self.now
        assert not any(ticket.attempt == key and ticket.is_open for ticket in self.tickets)

    @rule(writer=st.sampled_from(("w", "v")))
    def writer_gone(self, writer: str) -> None:
        before = [ticket for ticket in self.tickets if ticket.is_open]
        self.receiver.writer_gone(writer, self.now)
        for ticket in before:
            ends = ticket.writer == writer and not self.has_all(ticket)
            assert ticket.is_open is not ends
            if ends:
                self.dead[ticket.attempt] = self.now

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), writer=st.sampled_from(("w", "v")))
    def renew(self, data: st.DataObject, writer: str) -> None:
        some = data.draw(st.lists(st.sampled_from(self.tickets), max_size=3, unique=True))
        before = {ticket: ticket.expires_at for ticket in some}
        ended = self.receiver.renew(writer, [ticket.ticket_id for ticket in some], self.now)
        for ticket in some:
            lives = ticket.is_open and ticket.writer == writer
            assert (ticket.ticket_id in ended) is not lives
            assert ticket.expires_at == (self.now + LEASE_S if lives else before[ticket])

    @rule(seconds=st.sampled_from((0.0, 0.5, 1.0, 2.0, 4.0)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        expired = [ticket for ticket in self.tickets if ticket.has_expired(self.now)]
        self.receiver.sweep(self.now)
        for ticket in expired:
            assert ticket.state is TicketState.RELEASED
            self.dead[ticket.attempt] = self.now

    @precondition(lambda self: self.owned)
    @rule()
    def end_sequence(self) -> None:
        self.pool.release(self.owned.pop())

    @rule()
    def close(self) -> None:
        self.receiver.close()
        assert not any(ticket.is_open for ticket in self.tickets)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        total = counts.free + counts.used + counts.cached + counts.quarantined
        assert total == self.pool.total
        copying = {c.ticket for c in self.copies if c.ticket.state is TicketState.RELEASED}
        expected = {block for ticket in copying for block in ticket.missing}
        assert self.pool._quarantined == expected, "quarantined without a copy, or the reverse"
        assert set(self.receiver.book) == {t for t in self.tickets if t.is_open} | copying
        released = {t.ticket_id for t in self.tickets if t.state is TicketState.RELEASED}
        assert set(self.listener.released_errors) == released
        ended = counted(self.receiver, "ok") + counted(self.receiver, "ok", NO_TRANSPORT)
        assert ended == sum(t.state is TicketState.COMMITTED for t in self.tickets)

    def teardown(self) -> None:
        if not hasattr(self, "receiver"):
            return
        self.receiver.sweep(self.now + LEASE_S)
        for copy in self.copies:
            self.receiver.end_copy(copy.ticket.ticket_id, "shm", 64)
        assert not len(self.receiver.book)
        for blocks in self.owned:
            self.pool.release(blocks)
        self.pool.check()
        counts = self.pool.counts()
        assert counts.free + counts.cached == self.pool.total


TestBlockReceiver = BlockReceiverMachine.TestCase
TestBlockReceiver.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)


# One thing at a time


def test_blocks_are_quarantined_until_the_last_copy_has_ended() -> None:
    receiver, listener = make_receiver(blocks=4)
    ticket = promise(receiver)
    assert begin(receiver, ticket, 0) == (ticket.missing[0],)
    assert begin(receiver, ticket, 1) == (ticket.missing[1],)
    receiver.sweep(13.0)
    assert receiver.pool.counts().quarantined == 2
    assert counted(receiver, "expired") == 1
    assert "w was silent for 3.0 s" in listener.released_errors[ticket.ticket_id].message
    with pytest.raises(TicketEnded):
        begin(receiver, ticket, 1, now=13.0)
    with pytest.raises(TicketEnded):
        promise(receiver, now=13.0)
    receiver.end_copy(ticket.ticket_id, "shm", BLOCK_BYTES)
    assert receiver.pool.counts().quarantined == 2
    receiver.fail_copy(ticket.ticket_id, HandoffError("broke after the ticket had ended"), 1.0)
    assert receiver.pool.counts().free == 4
    assert counted(receiver, "error") == 0, "a handoff is counted once"


def test_a_damaged_part_ends_the_handoff_and_is_counted() -> None:
    receiver, listener = make_receiver()
    ticket = promise(receiver)
    begin(receiver, ticket, 0)
    damaged = ChecksumMismatch("damaged")
    receiver.fail_copy(ticket.ticket_id, damaged, 1.0)
    assert counted(receiver, "checksum") == 1
    assert listener.released_errors == {ticket.ticket_id: damaged}
    with pytest.raises(TicketEnded):
        receiver.commit(ticket.ticket_id, "w", 10.0)
    assert receiver.pool.counts().used == 0


def test_a_ticket_that_ends_before_a_byte_has_no_transport() -> None:
    receiver, _ = make_receiver()
    promise(receiver)
    receiver.sweep(13.0)
    assert counted(receiver, "expired", NO_TRANSPORT) == 1


def test_another_writer_neither_writes_nor_commits_nor_renews() -> None:
    receiver, _ = make_receiver()
    ticket = promise(receiver)
    with pytest.raises(TicketEnded, match="not open for another"):
        begin(receiver, ticket, 0, writer="another", now=12.0)
    with pytest.raises(TicketEnded):
        receiver.commit(ticket.ticket_id, "another", 12.0)
    assert receiver.renew("another", [ticket.ticket_id, "unknown"], 12.0) == [
        ticket.ticket_id,
        "unknown",
    ]
    receiver.sweep(13.0)
    assert not ticket.is_open


def test_bytes_renew_the_lease() -> None:
    receiver, _ = make_receiver()
    ticket = promise(receiver)
    receiver.sweep(11.0)
    begin(receiver, ticket, 0, now=12.0)
    receiver.end_copy(ticket.ticket_id, "shm", BLOCK_BYTES)
    receiver.sweep(14.9)
    assert ticket.is_open
    receiver.sweep(15.0)
    assert not ticket.is_open


async def test_a_ticket_is_whole_with_its_last_byte() -> None:
    receiver, _ = make_receiver()
    ticket = promise(receiver)
    whole = receiver.whole(ticket.ticket_id)
    assert whole is not None
    begin(receiver, ticket, 1)
    begin(receiver, ticket, 0)
    receiver.end_copy(ticket.ticket_id, "shm", BLOCK_BYTES)
    assert not whole.done()
    receiver.end_copy(ticket.ticket_id, "shm", BLOCK_BYTES)
    assert begin(receiver, ticket, 0, 1) is None
    assert whole.done()
    assert receiver.whole(ticket.ticket_id) is None


async def test_a_ticket_that_has_ended_is_never_whole() -> None:
    receiver, _ = make_receiver()
    ticket = promise(receiver)
    whole = receiver.whole(ticket.ticket_id)
    assert whole is not None
    # The copy that runs keeps the blocks in quarantine, and the ticket in the book.
    begin(receiver, ticket, 0)
    receiver.abort(ticket.attempt, 11.0)
    with pytest.raises(TicketEnded, match="has ended"):
        await whole
    with pytest.raises(TicketEnded, match="has ended"):
        receiver.whole(ticket.ticket_id)
    receiver.drop_copy(ticket.ticket_id)


def test_a_listener_that_has_unsubscribed_is_not_called() -> None:
    receiver, listener = make_receiver()
    other = Listener()
    unsubscribe = receiver.subscribe(other.released)
    promise(receiver)
    receiver.abort(("r", 0), 11.0)
    assert set(other.released_errors) == set(listener.released_errors) != set()
    unsubscribe()
    unsubscribe()
    promise(receiver, attempt=1, now=12.0)
    receiver.abort(("r", 1), 13.0)
    assert len(other.released_errors) == 1
    assert len(listener.released_errors) == 2


def test_what_had_come_in_full_outlives_its_writers_connection() -> None:
    receiver, _ = make_receiver()
    whole, half = promise(receiver, attempt=0), promise(receiver, attempt=1)
    for ticket, targets in ((whole, (0, 1)), (half, (1,))):
        begin(receiver, ticket, *targets)
        receiver.end_copy(ticket.ticket_id, "shm", BLOCK_BYTES * len(targets))
    receiver.writer_gone("another", 11.0)
    assert half.is_open
    receiver.writer_gone("w", 11.0)
    assert not half.is_open
    receiver.commit(whole.ticket_id, "w", 11.0)
    with pytest.raises(TicketEnded):
        promise(receiver, attempt=1, now=11.0)


def test_pinned_blocks_come_back_when_there_are_too_few() -> None:
    receiver, _ = make_receiver(blocks=3)
    held = receiver.pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        promise(receiver, missing=2, pinned=held)
    receiver.pool.release(held)
    assert receiver.pool.counts().free == 3
    assert not len(receiver.book)


def test_an_abort_may_overtake_its_promise() -> None:
    receiver, listener = make_receiver()
    receiver.abort(("r", 0), 10.0)
    with pytest.raises(TicketEnded, match="aborted before"):
        promise(receiver, now=11.0)
    promise(receiver, attempt=1, now=11.0)
    assert listener.released_errors == {}


def test_a_standstill_of_both_sides_ends_no_lease() -> None:
    """The writer renews once both go on; one that stays silent is found all the same."""
    now = [100.0]
    clock = ListeningClock(0.5, lambda: now[0])
    receiver = BlockReceiver(
        BlockPool(4),
        WorkerMetrics(CollectorRegistry()),
        block_bytes=BLOCK_BYTES,
        lease_s=LEASE_S,
        clock=clock,
    )
    ticket = receiver.promise(("r", 0), "w", missing=2, pinned=[], now=clock())

    def listen(seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            now[0] += 0.25
            clock.tick()
            receiver.sweep(clock())

    listen(1.0)
    now[0] += 60.0
    clock.tick()
    receiver.sweep(clock())
    assert ticket.is_open, "it has not listened for the length of a lease"
    assert receiver.renew("w", [ticket.ticket_id], clock()) == []
    listen(LEASE_S - 0.25)
    assert ticket.is_open
    listen(0.25)
    assert not ticket.is_open
