"""The receiving side of transfers that this worker has asked for itself."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from baton.errors import TicketEnded
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.scheduling.block_pool import BlockPool
from kvtransfer.tickets import Purpose, Ticket
from worker.exchange.block_receiver import NO_TRANSPORT, BlockReceiver

SIZE = 64
ATTEMPT = ("pull:1", 0)


@pytest.fixture
def receiver() -> BlockReceiver:
    """Twelve free blocks."""
    metrics = WorkerMetrics(CollectorRegistry())
    return BlockReceiver(BlockPool(12), metrics, block_bytes=SIZE, lease_s=3.0)


def promise(receiver: BlockReceiver, missing: int = 4) -> Ticket:
    return receiver.promise(ATTEMPT, "w", missing=missing, pinned=[], now=0.0, purpose=Purpose.PULL)


def receive(receiver: BlockReceiver, ticket: Ticket, count: int) -> None:
    targets = range(count)
    assert receiver.begin_copy(ticket.ticket_id, "w", "shm", targets, 0, SIZE, 0.0) is not None
    receiver.end_copy(ticket.ticket_id, "shm", count * SIZE)


def value(receiver: BlockReceiver, name: str, **labels: str) -> float:
    return receiver._metrics.registry.get_sample_value(f"baton_{name}", labels) or 0.0


def test_what_the_writer_did_not_have_is_given_back(receiver: BlockReceiver) -> None:
    ticket = promise(receiver)
    receive(receiver, ticket, 3)
    receiver.shorten(ticket.ticket_id, 3)
    assert receiver.pool.counts().used == 3
    assert len(receiver.commit(ticket.ticket_id, "w", 1.0).missing) == 3
    assert value(receiver, "pulls_total", transport="shm", outcome="ok") == 1
    assert value(receiver, "pulled_blocks_total", transport="shm") == 3
    receiver.abort(ATTEMPT, 1.0, "error")
    assert receiver.pool.counts().used == 3, "what was committed is its owner's"
    receiver.pool.release(ticket.missing)
    receiver.pool.check()


def test_a_pull_does_not_count_as_a_handoff(receiver: BlockReceiver) -> None:
    ticket = promise(receiver)
    receive(receiver, ticket, 4)
    receiver.commit(ticket.ticket_id, "w", 1.0)
    assert value(receiver, "handoffs_total", transport="shm", outcome="ok") == 0
    assert value(receiver, "handoff_seconds_count", transport="shm") == 0


@pytest.mark.parametrize("outcome", ["empty", "deadline", "error"])
def test_each_end_is_counted_once_by_its_name(receiver: BlockReceiver, outcome: str) -> None:
    promise(receiver)
    receiver.abort(ATTEMPT, 1.0, outcome)
    receiver.abort(ATTEMPT, 1.0, outcome)
    assert value(receiver, "pulls_total", transport=NO_TRANSPORT, outcome=outcome) == 1
    assert receiver.pool.counts().free == 12


def test_one_that_expired_is_counted_as_that(receiver: BlockReceiver) -> None:
    ticket = promise(receiver)
    receive(receiver, ticket, 2)
    receiver.sweep(5.0)
    with pytest.raises(TicketEnded):
        receiver.shorten(ticket.ticket_id, 2)
    receiver.abort(ATTEMPT, 5.0, "error")
    assert value(receiver, "pulls_total", transport="shm", outcome="expired") == 1
    assert value(receiver, "pulls_total", transport="shm", outcome="error") == 0
    assert receiver.pool.counts().free == 12
