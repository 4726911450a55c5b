"""The receiving end of handoffs, with a real scheduler and block pool, under any order of calls."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    ContextLengthExceeded,
    FingerprintMismatch,
    GeometryMismatch,
    HandoffError,
    NoRoom,
    TicketEnded,
)
from baton.hashing import hash_key
from baton.request import Geometry, SequenceSpec
from baton.sampling_params import SamplingParams
from baton.telemetry.worker_metrics import WorkerMetrics
from decode_worker.receiver import HandoffReceiver, Offer
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits, Sequence
from kvtransfer.tickets import TOMBSTONE_S, Ticket, TicketState
from worker.exchange.block_receiver import NO_TRANSPORT, BlockReceiver

GEOMETRY = Geometry(2, 1, 1, 8, "float32")
BLOCK_BYTES = 192
PARTS = ((0, 64), (64, 128))
"""(offset, length) of what a block is sent in."""
LEASE_S = 3.0


def make_receiver(blocks: int = 12, *, sequences: int = 4, context: int = 16) -> HandoffReceiver:
    pool, metrics = BlockPool(blocks), WorkerMetrics(CollectorRegistry())
    return HandoffReceiver(
        Scheduler(pool, SchedulerLimits(2, 64, sequences, context)),
        BlockReceiver(pool, metrics, block_bytes=BLOCK_BYTES, lease_s=LEASE_S),
        fingerprint="model",
        geometry=GEOMETRY,
        incarnation="decode-0:1",
    )


def make_offer(
    tokens: list[int], *, attempt: int = 0, request: str = "r", writer: str = "w", **spec: object
) -> Offer:
    sampling = SamplingParams(max_tokens=8)
    made = SequenceSpec(request, attempt, "router", tuple(tokens), len(tokens), sampling)
    return Offer("model", GEOMETRY, "decode-0:1", writer, replace(made, **spec))  # type: ignore[arg-type]


def pool_of(receiver: HandoffReceiver) -> BlockPool:
    return receiver._pool


def outcomes(receiver: HandoffReceiver, outcome: str) -> float:
    registry = receiver.blocks._metrics.registry
    return sum(
        registry.get_sample_value(
            "baton_handoffs_total", {"transport": transport, "outcome": outcome}
        )
        or 0.0
        for transport in ("shm", NO_TRANSPORT)
    )


def begin(
    receiver: HandoffReceiver, ticket: Ticket, target: int, part: tuple[int, int], now: float
) -> int | None:
    """One part of one block. Returns where it goes."""
    blocks = receiver.blocks.begin_copy(
        ticket.ticket_id, ticket.writer, "shm", [target], *part, now
    )
    return None if blocks is None else blocks[0]


def receive_all(receiver: HandoffReceiver, ticket: Ticket) -> None:
    for index in range(len(ticket.missing)):
        for part in PARTS:
            assert begin(receiver, ticket, index, part, ticket.reserved_at) is not None
            receiver.blocks.end_copy(ticket.ticket_id, "shm", part[1])


def commit(receiver: HandoffReceiver, ticket: Ticket, now: float) -> Sequence:
    """As ``DecodeRole.commit``."""
    offer, committed = receiver.commit(ticket.ticket_id, ticket.writer, now)
    sequence = Sequence(0, offer.spec, stop_ids=(), hash_key=hash_key("model"))
    sequence.token_ids.append(5)
    blocks = committed.pinned + committed.missing
    receiver._scheduler.add_computed(sequence, blocks, len(offer.spec.token_ids))
    return sequence


class Copy(NamedTuple):
    """A copy in flight."""

    ticket: Ticket
    block: int
    number: int
    offset: int


@dataclass
class Arrived:
    """What the model knows of a ticket: segments begun and segments in place."""

    begun: set[tuple[int, int]] = field(default_factory=set)
    done: set[tuple[int, int]] = field(default_factory=set)


class ReceiverMachine(RuleBasedStateMachine):
    """Writers that reserve, push, repeat themselves, abort, fall silent, and come back too late."""

    @initialize(blocks=st.integers(2, 14), sequences=st.integers(1, 5))
    def start(self, blocks: int, sequences: int) -> None:
        self.receiver = make_receiver(blocks, sequences=sequences, context=min(16, 2 * blocks))
        self.blocks = self.receiver.blocks
        self.pool = pool_of(self.receiver)
        self.scheduler = self.receiver._scheduler
        self.now = 100.0
        self.tickets: list[Ticket] = []
        self.copies: list[Copy] = []
        self.arrived: dict[Ticket, Arrived] = defaultdict(Arrived)
        self.sequences: list[Sequence] = []
        self.aborted: dict[tuple[str, int], float] = {}

    @rule(
        base=st.integers(0, 1),
        length=st.integers(1, 12),
        attempt=st.integers(0, 6),
        writer=st.sampled_from(("w", "v")),
    )
    def reserve(self, base: int, length: int, attempt: int, writer: str) -> None:
        offer = make_offer(
            [base, *range(1, 12)][:length], attempt=attempt, request=f"r{length}", writer=writer
        )
        key = (offer.spec.request_id, attempt)
        before = (self.pool.counts(), len(self.blocks.book))
        known = self.blocks.book.find(key)
        try:
            ticket = self.receiver.reserve(offer, self.now)
        except BatonError:
            assert (self.pool.counts(), len(self.blocks.book)) == before, "refused, yet kept"
            return
        since = self.now - self.aborted.get(key, -TOMBSTONE_S)
        assert since >= TOMBSTONE_S, "reserved after its abort"
        if known is not None:
            assert ticket is known
            assert ticket.writer == writer
            return
        assert len(ticket.missing) + len(ticket.pinned) == -(-length // 2)
        assert not ticket.has_expired(self.now)
        self.tickets.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), index=st.integers(0, 6), part=st.sampled_from(PARTS))
    def begin(self, data: st.DataObject, index: int, part: tuple[int, int]) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        offset, _ = part
        try:
            block = begin(self.receiver, ticket, index, part, self.now)
        except TicketEnded:
            assert not ticket.is_open
            return
        except HandoffError:
            assert index >= len(ticket.missing)
            return
        assert ticket.is_open, "a copy into blocks that were given back"
        arrived = self.arrived[ticket]
        if block is None:
            assert (index, offset) in arrived.begun
            return
        assert (index, offset) not in arrived.begun, "copied twice"
        arrived.begun.add((index, offset))
        assert block == ticket.missing[index]
        assert self.pool._references[block] == 1
        self.copies.append(Copy(ticket, block, index, offset))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), blocks=st.integers(1, 6))
    def push(self, data: st.DataObject, blocks: int) -> None:
        """Several whole blocks at once, so that tickets become complete."""
        ticket = data.draw(st.sampled_from(self.tickets))
        if not ticket.is_open:
            return
        for index in range(min(blocks, len(ticket.missing))):
            for offset, length in PARTS:
                if (index, offset) not in self.arrived[ticket].begun:
                    begin(self.receiver, ticket, index, (offset, length), self.now)
                    self.blocks.end_copy(ticket.ticket_id, "shm", length)
                    self.arrived[ticket].begun.add((index, offset))
                    self.arrived[ticket].done.add((index, offset))

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), fails=st.sampled_from((None, None, "checksum", "error")))
    def end(self, data: st.DataObject, fails: str | None) -> None:
        copy = data.draw(st.sampled_from(self.copies))
        self.copies.remove(copy)
        if fails is None:
            self.blocks.end_copy(copy.ticket.ticket_id, "shm", PARTS[0][1])
            self.arrived[copy.ticket].done.add((copy.number, copy.offset))
            return
        was_open, before = copy.ticket.is_open, outcomes(self.receiver, fails)
        error = ChecksumMismatch("damaged") if fails == "checksum" else HandoffError("broken")
        self.blocks.fail_copy(copy.ticket.ticket_id, error, self.now)
        assert copy.ticket.state is TicketState.RELEASED
        assert outcomes(self.receiver, fails) == before + was_open

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), writer=st.sampled_from(("w", "w", "v")))
    def commit(self, data: st.DataObject, writer: str) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        may = ticket.is_open and writer == ticket.writer
        wanted = {(i, offset) for i in range(len(ticket.missing)) for offset, _ in PARTS}
        if not may or self.arrived[ticket].done != wanted:
            with pytest.raises(HandoffError):
                self.receiver.commit(ticket.ticket_id, writer, self.now)
            return
        self.sequences.append(commit(self.receiver, ticket, self.now))
        assert ticket.state is TicketState.COMMITTED

    @rule(length=st.integers(1, 12), attempt=st.integers(0, 6))
    def abort(self, length: int, attempt: int) -> None:
        key = (f"r{length}", attempt)
        self.blocks.abort(key, self.now)
        self.blocks.abort(key, self.now)
        self.aborted[key] = self.now
        for ticket in self.tickets:
            assert ticket.attempt != key or not ticket.is_open

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), writer=st.sampled_from(("w", "v")))
    def renew(self, data: st.DataObject, writer: str) -> None:
        some = data.draw(st.lists(st.sampled_from(self.tickets), max_size=3, unique=True))
        before = {ticket: ticket.expires_at for ticket in some}
        ended = self.blocks.renew(writer, [ticket.ticket_id for ticket in some], self.now)
        for ticket in some:
            lives = ticket.is_open and ticket.writer == writer
            assert (ticket.ticket_id in ended) is not lives
            assert ticket.expires_at == (self.now + LEASE_S if lives else before[ticket])

    @rule(seconds=st.sampled_from((0.0, 0.5, 1.0, 2.0, 4.0)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.blocks.sweep(self.now)
        assert not any(ticket.has_expired(self.now) for ticket in self.tickets)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.scheduler.remove(sequence)

    @rule()
    def close(self) -> None:
        self.blocks.close()
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
        for copy in self.copies:
            assert copy.ticket.state is not TicketState.COMMITTED
        alive = {t for t in self.tickets if t.is_open} | copying
        assert set(self.blocks.book) == alive
        assert set(self.receiver._promised) == {t.ticket_id for t in alive - copying}

    def teardown(self) -> None:
        if not hasattr(self, "receiver"):
            return
        self.blocks.sweep(self.now + LEASE_S)
        for copy in self.copies:
            self.blocks.end_copy(copy.ticket.ticket_id, "shm", 1)
        assert not len(self.blocks.book)
        for sequence in self.sequences:
            self.scheduler.remove(sequence)
        self.pool.check()
        counts = self.pool.counts()
        assert counts.free + counts.cached == self.pool.total


TestReceiver = ReceiverMachine.TestCase
TestReceiver.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)


# One thing at a time


def test_a_handoff_from_reserve_to_commit_is_counted() -> None:
    receiver = make_receiver()
    ticket = receiver.reserve(make_offer([1, 2, 3]), 10.0)
    assert (len(ticket.pinned), len(ticket.missing)) == (0, 2)
    receive_all(receiver, ticket)
    _, committed = receiver.commit(ticket.ticket_id, "w", 10.5)
    assert committed is ticket
    assert committed.expected_bytes == 2 * BLOCK_BYTES
    registry = receiver.blocks._metrics.registry
    shm = {"transport": "shm"}
    assert registry.get_sample_value("baton_handoff_bytes_total", shm) == 2 * BLOCK_BYTES
    assert registry.get_sample_value("baton_handoff_seconds_sum", shm) == 0.5
    assert outcomes(receiver, "ok") == 1
    assert not len(receiver.blocks.book)


def test_what_is_held_is_pinned_and_not_sent_again() -> None:
    receiver = make_receiver()
    ticket = receiver.reserve(make_offer([1, 2, 3, 4, 5], attempt=0), 10.0)
    receive_all(receiver, ticket)
    sequence = commit(receiver, ticket, 10.0)
    receiver._scheduler.remove(sequence)
    again = receiver.reserve(make_offer([1, 2, 3, 4, 5], attempt=1), 11.0)
    assert again.pinned == ticket.missing[:2]
    assert len(again.missing) == 1
    other = receiver.reserve(make_offer([1, 2, 3, 4, 5], attempt=2, cache_salt=b"x"), 11.0)
    assert other.pinned == [], "another tenant's blocks"
    receiver.blocks.close()
    pool_of(receiver).check()
    assert pool_of(receiver).counts().used == 0


def test_a_wholly_held_prompt_is_committed_without_a_byte() -> None:
    receiver = make_receiver()
    for attempt in (0, 1):
        ticket = receiver.reserve(make_offer([1, 2, 3, 4], attempt=attempt), 10.0)
        receive_all(receiver, ticket)
        sequence = commit(receiver, ticket, 10.0)
        plan = receiver._scheduler.schedule()
        assert plan is not None
        assert (plan.rows[0].start, plan.rows[0].count) == (4, 1)
        assert plan.rows[0].block_table[2] not in (*ticket.pinned, *ticket.missing)
        receiver._scheduler.fail(plan)
        assert sequence.block_table == ()
    assert len(ticket.missing) == 0


def test_two_handoffs_of_one_prompt_end_in_the_same_blocks() -> None:
    """Both were reserved before either was committed."""
    receiver = make_receiver()
    tickets = [
        receiver.reserve(make_offer([1, 2, 3, 4, 5], attempt=attempt), 10.0) for attempt in (0, 1)
    ]
    for ticket in tickets:
        receive_all(receiver, ticket)
    first, second = (commit(receiver, ticket, 10.0) for ticket in tickets)
    assert first.block_table[:2] == second.block_table[:2] == (*tickets[0].missing[:2],)
    assert first.block_table[2] != second.block_table[2]
    assert pool_of(receiver).counts().used == 4
    for sequence in (first, second):
        receiver._scheduler.remove(sequence)
    pool_of(receiver).check()
    assert pool_of(receiver).counts().used == 0


def test_the_fingerprint_is_compared_before_anything_else() -> None:
    receiver = make_receiver()
    offer = make_offer([1] * 50)
    wrong = replace(offer, fingerprint="other", geometry=replace(GEOMETRY, layers=9))
    with pytest.raises(FingerprintMismatch, match=r"w serves other, decode-0:1 serves model"):
        receiver.reserve(wrong, 10.0)
    with pytest.raises(GeometryMismatch, match=r"layers=9.*layers=1"):
        receiver.reserve(replace(wrong, fingerprint="model"), 10.0)
    with pytest.raises(HandoffError, match="decode-0:0 is gone; this worker is decode-0:1"):
        receiver.reserve(replace(offer, incarnation="decode-0:0"), 10.0)
    with pytest.raises(ContextLengthExceeded, match="50 tokens leave no room"):
        receiver.reserve(offer, 10.0)
    assert pool_of(receiver).counts().used == 0


@pytest.mark.parametrize(("tokens", "max_tokens"), [(15, 8), (3, 1)])
def test_a_sequence_that_could_generate_nothing_here_is_refused(
    tokens: int, max_tokens: int
) -> None:
    """It would be committed and never end."""
    receiver = make_receiver(context=16)
    sampling = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(BatonError, match=r"(left|room) to generate"):
        receiver.reserve(make_offer([1] * tokens, sampling=sampling), 10.0)
    receiver.reserve(make_offer([1] * 14, sampling=SamplingParams(max_tokens=2)), 10.0)


def test_no_room_says_what_is_missing() -> None:
    receiver = make_receiver(blocks=4, sequences=2)
    receiver.reserve(make_offer([1] * 5, attempt=0), 10.0)
    with pytest.raises(NoRoom, match="2 blocks needed, 1 available"):
        receiver.reserve(make_offer([2] * 3, attempt=1), 10.0)
    receiver.reserve(make_offer([2], attempt=2), 10.0)
    with pytest.raises(NoRoom, match="all places of the batch"):
        receiver.reserve(make_offer([3], attempt=3), 10.0)


def test_preempted_sequences_come_before_new_tickets() -> None:
    receiver = make_receiver(blocks=4, context=8)
    sequences = []
    for number in (1, 2):
        ticket = receiver.reserve(make_offer([number] * 2, attempt=number), 10.0)
        receive_all(receiver, ticket)
        sequences.append(commit(receiver, ticket, 10.0))
    scheduler = receiver._scheduler
    assert scheduler.schedule() is not None
    scheduler._preempt(sequences[1])
    with pytest.raises(NoRoom, match="preempted sequences come first"):
        receiver.reserve(make_offer([5], attempt=5), 10.0)


def test_reserving_again_is_the_same_ticket_with_a_new_lease() -> None:
    receiver = make_receiver()
    ticket = receiver.reserve(make_offer([1, 2, 3]), 10.0)
    assert receiver.reserve(make_offer([1, 2, 3]), 12.0) is ticket
    receiver.blocks.sweep(14.9)
    assert ticket.is_open
    with pytest.raises(TicketEnded, match="already has a ticket"):
        receiver.reserve(make_offer([1, 2, 3], writer="another"), 12.0)
    assert pool_of(receiver).counts().used == 2


def test_an_abort_may_overtake_its_reserve() -> None:
    receiver = make_receiver()
    receiver.blocks.abort(("r", 0), 10.0)
    with pytest.raises(TicketEnded, match="aborted before"):
        receiver.reserve(make_offer([1, 2, 3]), 11.0)
    receiver.reserve(make_offer([1, 2, 3], attempt=1), 11.0)
