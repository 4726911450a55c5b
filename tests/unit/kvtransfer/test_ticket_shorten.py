"""A ticket that is cut to what its writer has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import HandoffError, TicketEnded
from kvtransfer.tickets import Ticket

SIZE = 64


def make(missing: int = 4) -> Ticket:
    return Ticket(
        "t",
        ("r", 0),
        "w",
        missing=list(range(10, 10 + missing)),
        pinned=[1, 2],
        block_bytes=SIZE,
        lease_s=3.0,
        now=0.0,
    )


def copy(ticket: Ticket, *targets: int, offset: int = 0, length: int = SIZE) -> None:
    assert ticket.begin_copy(targets, offset, length, 0.0) is not None
    ticket.end_copy()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 6), st.data())
def test_what_has_come_is_enough(missing: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, missing))
    ticket = make(missing)
    blocks = list(ticket.missing)
    for target in range(count):
        copy(ticket, target)
    assert ticket.is_complete == (count == missing)
    assert ticket.shorten(count) == blocks[count:]
    assert ticket.missing == blocks[:count]
    assert ticket.expected_bytes == count * SIZE
    assert ticket.is_complete
    assert ticket.awaited_bytes == 0
    ticket.commit("w")


def test_what_has_not_come_is_still_awaited() -> None:
    ticket = make(4)
    copy(ticket, 0)
    copy(ticket, 1, length=SIZE // 2)
    ticket.shorten(2)
    assert ticket.awaited_bytes == SIZE // 2
    with pytest.raises(HandoffError, match="lacks"):
        ticket.commit("w")
    copy(ticket, 1, offset=SIZE // 2, length=SIZE // 2)
    ticket.commit("w")


def test_nothing_can_be_written_behind_the_cut() -> None:
    ticket = make(4)
    ticket.shorten(2)
    with pytest.raises(HandoffError):
        ticket.begin_copy([2], 0, SIZE, 0.0)


def test_not_while_a_copy_is_in_flight() -> None:
    ticket = make(4)
    ticket.begin_copy([3], 0, SIZE, 0.0)
    with pytest.raises(HandoffError):
        ticket.shorten(2)
    assert len(ticket.missing) == 4
    ticket.end_copy()
    assert ticket.shorten(2) == [12, 13]


@pytest.mark.parametrize("count", [-1, 5])
def test_to_no_more_than_there_is(count: int) -> None:
    ticket = make(4)
    with pytest.raises(HandoffError):
        ticket.shorten(count)


def test_not_once_it_has_ended() -> None:
    ticket = make(0)
    ticket.commit("w")
    with pytest.raises(TicketEnded):
        ticket.shorten(0)
    ticket = make(4)
    ticket.release()
    with pytest.raises(TicketEnded):
        ticket.shorten(2)
