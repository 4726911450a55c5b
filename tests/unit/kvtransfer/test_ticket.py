"""One ticket: its states, its lease, its segments."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import HandoffError, TicketEnded
from kvtransfer.ticket import SEGMENT_BYTES, Ticket, TicketState, segments_of
from kvtransfer.ticket_book import MOST_TOMBSTONES, TOMBSTONE_S, TicketBook


def make_ticket(
    *, missing: int = 2, block_bytes: int = 2 * SEGMENT_BYTES + 8, attempt: int = 0
) -> Ticket:
    return Ticket(
        f"t{attempt}",
        ("request", attempt),
        "writer",
        missing=list(range(100, 100 + missing)),
        pinned=[1],
        block_bytes=block_bytes,
        lease_s=3.0,
        now=10.0,
    )


def receive_all(ticket: Ticket) -> None:
    for index in range(len(ticket.missing)):
        for offset, length in segments_of(ticket.block_bytes):
            assert ticket.begin_copy(index, offset, length, 11.0) == ticket.missing[index]
            ticket.end_copy()


@given(st.integers(1, 40 * SEGMENT_BYTES))
@settings(deadline=None, derandomize=True)
def test_segments_cover_a_block_once(block_bytes: int) -> None:
    segments = segments_of(block_bytes)
    end = 0
    for offset, length in segments:
        assert offset == end
        assert 0 < length <= SEGMENT_BYTES
        end = offset + length
    assert end == block_bytes


def state_of(ticket: Ticket) -> TicketState:
    """Read anew: a type checker takes an attribute for what it was compared with last."""
    return ticket.state


def test_from_reserved_to_committed() -> None:
    ticket = make_ticket()
    assert state_of(ticket) is TicketState.RESERVED
    assert not ticket.is_complete
    with pytest.raises(HandoffError, match="lacks 6 segments"):
        ticket.commit("writer")
    receive_all(ticket)
    assert state_of(ticket) is TicketState.RECEIVING
    ticket.commit("writer")
    assert state_of(ticket) is TicketState.COMMITTED
    assert not ticket.release()
    assert ticket.expected_bytes == 2 * ticket.block_bytes


def test_nothing_missing_is_complete_at_once() -> None:
    ticket = make_ticket(missing=0)
    assert ticket.is_complete
    ticket.commit("writer")


def test_a_copy_under_way_is_no_arrival() -> None:
    ticket = make_ticket(missing=1, block_bytes=8)
    assert ticket.begin_copy(0, 0, 8, 11.0) == 100
    with pytest.raises(HandoffError, match="lacks 1 segments"):
        ticket.commit("writer")
    ticket.end_copy()
    ticket.commit("writer")


def test_only_its_writer_commits() -> None:
    ticket = make_ticket()
    receive_all(ticket)
    with pytest.raises(TicketEnded, match="not open for another"):
        ticket.commit("another")
    ticket.commit("writer")
    with pytest.raises(TicketEnded):
        ticket.commit("writer")


def test_a_duplicate_is_not_copied_again() -> None:
    ticket = make_ticket(missing=1, block_bytes=8)
    assert ticket.begin_copy(0, 0, 8, 11.0) == 100
    assert ticket.begin_copy(0, 0, 8, 11.0) is None
    assert ticket.copies == 1
    ticket.end_copy()
    assert ticket.begin_copy(0, 0, 8, 11.0) is None
    assert ticket.is_complete


@pytest.mark.parametrize(
    ("index", "offset", "length"),
    [(2, 0, SEGMENT_BYTES), (-1, 0, SEGMENT_BYTES), (0, 1, SEGMENT_BYTES), (0, 0, 7), (0, 0, 0)],
)
def test_a_segment_that_cannot_be_is_refused(index: int, offset: int, length: int) -> None:
    ticket = make_ticket()
    with pytest.raises(HandoffError, match="has no segment"):
        ticket.begin_copy(index, offset, length, 11.0)
    assert ticket.copies == 0


def test_a_released_ticket_gives_no_block_and_is_quarantined_while_one_copies() -> None:
    ticket = make_ticket()
    ticket.begin_copy(0, 0, SEGMENT_BYTES, 11.0)
    assert ticket.release()
    assert not ticket.release()
    assert ticket.is_quarantined
    with pytest.raises(TicketEnded, match="has ended: released"):
        ticket.begin_copy(1, 0, SEGMENT_BYTES, 11.0)
    with pytest.raises(TicketEnded):
        ticket.commit("writer")
    ticket.end_copy()
    assert not ticket.is_quarantined


def test_the_lease_is_renewed_by_heartbeats_and_data_alone() -> None:
    ticket = make_ticket()
    assert not ticket.has_expired(12.9)
    assert ticket.has_expired(13.0)
    ticket.renew(12.0)
    assert not ticket.has_expired(14.9)
    ticket.begin_copy(0, 0, SEGMENT_BYTES, 14.0)
    assert not ticket.has_expired(16.9)
    assert ticket.has_expired(17.0)
    ticket.release()
    ticket.renew(17.0)
    assert ticket.expires_at == 17.0
    assert not ticket.has_expired(99.0)


def test_the_book_finds_tickets_until_they_are_dropped() -> None:
    book = TicketBook()
    ticket, other = make_ticket(attempt=0), make_ticket(attempt=1)
    book.add(ticket)
    book.add(other)
    assert len(book) == 2
    assert set(book) == {ticket, other}
    assert book.get("t0") is ticket
    assert book.find(("request", 1)) is other
    book.drop(ticket)
    book.drop(ticket)
    assert book.find(("request", 0)) is None
    with pytest.raises(TicketEnded, match="unknown here"):
        book.get("t0")
    assert book.expired(12.0) == []
    assert book.expired(13.0) == [other]


def test_a_tombstone_outlives_retries_and_no_more() -> None:
    book = TicketBook()
    book.bury(("early", 0), 0.0)
    book.bury(("late", 0), 10.0)
    book.bury(("early", 0), 20.0)
    book.sweep(10.0 + TOMBSTONE_S)
    book.check_alive(("late", 0))
    with pytest.raises(TicketEnded, match="aborted before"):
        book.check_alive(("early", 0))
    book.check_alive(("early", 1))
    book.sweep(20.0 + TOMBSTONE_S)
    book.check_alive(("early", 0))


def test_tombstones_are_bounded_and_the_oldest_go_first() -> None:
    book = TicketBook()
    for number in range(MOST_TOMBSTONES + 1):
        book.bury(("request", number), float(number))
    book.check_alive(("request", 0))
    with pytest.raises(TicketEnded):
        book.check_alive(("request", 1))
    with pytest.raises(TicketEnded):
        book.add(make_ticket(attempt=1))
