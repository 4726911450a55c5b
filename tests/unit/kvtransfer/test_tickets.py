"""One ticket: its states, its lease, the bytes that it awaits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import HandoffError, TicketEnded
from kvtransfer.tickets import MAX_TOMBSTONES, TOMBSTONE_S, Ticket, TicketBook, TicketState

BLOCK_BYTES = 192
HALF = BLOCK_BYTES // 2


def make_ticket(*, missing: int = 2, attempt: int = 0) -> Ticket:
    return Ticket(
        f"t{attempt}",
        ("request", attempt),
        "writer",
        missing=list(range(100, 100 + missing)),
        pinned=[1],
        block_bytes=BLOCK_BYTES,
        lease_s=3.0,
        now=10.0,
    )


def receive_all(ticket: Ticket) -> None:
    targets = range(len(ticket.missing))
    for offset in (0, HALF):
        assert ticket.begin_copy(targets, offset, HALF, 11.0) == tuple(ticket.missing)
        ticket.end_copy()


def state_of(ticket: Ticket) -> TicketState:
    """Read again: a type checker takes an attribute for what it was compared with last."""
    return ticket.state


def test_from_reserved_to_committed() -> None:
    ticket = make_ticket()
    assert state_of(ticket) is TicketState.RESERVED
    assert not ticket.is_complete
    with pytest.raises(HandoffError, match="lacks 384 bytes"):
        ticket.commit("writer")
    receive_all(ticket)
    assert state_of(ticket) is TicketState.RECEIVING
    ticket.commit("writer")
    assert state_of(ticket) is TicketState.COMMITTED
    assert not ticket.release()
    assert ticket.expected_bytes == 2 * BLOCK_BYTES


def test_nothing_missing_is_complete_at_once() -> None:
    ticket = make_ticket(missing=0)
    assert ticket.is_complete
    ticket.commit("writer")


def test_a_copy_in_flight_has_not_arrived() -> None:
    ticket = make_ticket(missing=1)
    assert ticket.begin_copy([0], 0, BLOCK_BYTES, 11.0) == (100,)
    assert ticket.awaited_bytes == 0
    with pytest.raises(HandoffError, match="1 copies have not ended"):
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


def test_targets_are_given_in_the_order_in_which_they_were_named() -> None:
    assert make_ticket(missing=4).begin_copy([3, 0, 2], 0, 8, 11.0) == (103, 100, 102)


def test_a_duplicate_is_not_copied_again() -> None:
    ticket = make_ticket(missing=1)
    assert ticket.begin_copy([0], 0, BLOCK_BYTES, 11.0) == (100,)
    assert ticket.begin_copy([0], 0, BLOCK_BYTES, 11.0) is None
    assert ticket.begin_copy([0], 64, 64, 11.0) is None
    assert ticket.copies == 1
    ticket.end_copy()
    assert ticket.begin_copy([0], 0, BLOCK_BYTES, 11.0) is None
    assert ticket.is_complete


def test_what_came_in_part_is_neither_copied_nor_taken_for_a_duplicate() -> None:
    ticket = make_ticket()
    assert ticket.begin_copy([0], 64, 64, 11.0) == (100,)
    for targets, offset, length in (([0], 0, 128), ([0], 64, 128), ([0], 0, BLOCK_BYTES)):
        with pytest.raises(HandoffError, match="parts of a block overlap"):
            ticket.begin_copy(targets, offset, length, 11.0)
    with pytest.raises(HandoffError, match="some of a batch's bytes arrived twice"):
        ticket.begin_copy([0, 1], 64, 64, 11.0)
    assert (ticket.copies, ticket.awaited_bytes) == (1, 2 * BLOCK_BYTES - 64)


@pytest.mark.parametrize(
    ("targets", "offset", "length"),
    [
        ([2], 0, HALF),
        ([-1], 0, HALF),
        ([0, 2], 0, HALF),
        ([0, 0], 0, HALF),
        ([], 0, HALF),
        ([0], -1, HALF),
        ([0], 0, 0),
        ([0], HALF, -1),
        ([0], HALF + 1, HALF),
        ([0], BLOCK_BYTES, 1),
    ],
)
def test_parts_that_cannot_be_are_refused(targets: list[int], offset: int, length: int) -> None:
    ticket = make_ticket()
    with pytest.raises(HandoffError, match=f"has no {length} bytes at {offset}"):
        ticket.begin_copy(targets, offset, length, 11.0)
    assert (ticket.copies, ticket.awaited_bytes) == (0, 2 * BLOCK_BYTES)
    assert state_of(ticket) is TicketState.RESERVED


Copy = tuple[list[int], int, int]
COPIES = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
    st.integers(0, 11),
    st.integers(1, 12),
)


@given(st.lists(COPIES, max_size=30))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_every_byte_is_copied_once_however_it_is_cut(copies: list[Copy]) -> None:
    ticket = Ticket(
        "t", ("r", 0), "w", missing=[7, 8, 9], pinned=[], block_bytes=12, lease_s=3.0, now=0.0
    )
    seen: set[tuple[int, int]] = set()
    for targets, offset, length in copies:
        wanted = {(t, at) for t in targets for at in range(offset, offset + length)}
        try:
            blocks = ticket.begin_copy(targets, offset, length, 1.0)
        except HandoffError:
            assert offset + length > 12 or 0 < len(wanted & seen) < len(wanted)
            continue
        if blocks is None:
            assert wanted <= seen
            continue
        assert not wanted & seen, "copied twice"
        assert blocks == tuple(7 + target for target in targets)
        seen |= wanted
        ticket.end_copy()
    assert ticket.awaited_bytes == 36 - len(seen)
    assert ticket.is_complete is (len(seen) == 36)


def test_a_released_ticket_gives_no_block_and_is_quarantined_while_one_copies() -> None:
    ticket = make_ticket()
    ticket.begin_copy([0], 0, HALF, 11.0)
    assert ticket.release()
    assert not ticket.release()
    assert ticket.is_quarantined
    with pytest.raises(TicketEnded, match="has ended: released"):
        ticket.begin_copy([1], 0, HALF, 11.0)
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
    ticket.begin_copy([0], 0, HALF, 14.0)
    assert not ticket.has_expired(16.9)
    assert ticket.has_expired(17.0)
    ticket.release()
    ticket.renew(17.0)
    assert ticket.expires_at == 17.0
    assert not ticket.has_expired(99.0)


def test_a_commit_that_waits_holds_the_lease() -> None:
    ticket = make_ticket()
    with pytest.raises(TicketEnded, match="not open for another"):
        ticket.hold("another")
    for _ in range(2):
        ticket.hold("writer")
    ticket.let_go(20.0)
    assert not ticket.has_expired(99.0), "another commit waits"
    ticket.let_go(99.0)
    assert not ticket.has_expired(101.9)
    assert ticket.has_expired(102.0)
    ticket.release()
    with pytest.raises(TicketEnded):
        ticket.hold("writer")


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
    for number in range(MAX_TOMBSTONES + 1):
        book.bury(("request", number), float(number))
    book.check_alive(("request", 0))
    with pytest.raises(TicketEnded):
        book.check_alive(("request", 1))
    with pytest.raises(TicketEnded):
        book.add(make_ticket(attempt=1))
