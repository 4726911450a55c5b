"""Which reserve is served first where there is no room."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from baton.errors import HandoffError, NoRoom, TicketEnded
from baton.request import Geometry, SequenceSpec
from baton.sampling_params import SamplingParams
from decode_worker.receiver import Offer, ReserveQueue
from kvtransfer.tickets import Ticket

Asked = asyncio.Future[Ticket]


def offer(name: str, preemptions: int = 0) -> Offer:
    spec = SequenceSpec(name, 0, "router", (1,), 1, SamplingParams(), preemptions=preemptions)
    return Offer("model", Geometry(2, 1, 1, 8, "float32"), "d:1", "w", spec)


class Worker:
    """Has room for a number of sequences."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.served: list[str] = []
        self.looks = 0
        self.queue = ReserveQueue(self.reserve, max_waiting=4)

    def reserve(self, offer: Offer) -> Ticket:
        self.looks += 1
        name = offer.spec.request_id
        if name == "wrong":
            raise HandoffError("it is wrong")
        if not self.room:
            raise NoRoom("full")
        self.room -= 1
        self.served.append(name)
        return cast(Ticket, name)

    def ask(self, name: str, preemptions: int = 0) -> Asked:
        return self.queue.add(offer(name, preemptions))


async def test_preempted_sequences_come_first_and_each_in_its_order() -> None:
    worker = Worker()
    worker.ask("a"), worker.ask("b")
    worker.ask("old", 1), worker.ask("older", 2)
    worker.room = 4
    worker.queue.serve()
    assert worker.served == ["old", "older", "a", "b"]
    assert not len(worker.queue)


async def test_a_look_at_a_queue_is_a_look_at_its_head() -> None:
    worker = Worker()
    for name in ("a", "b", "c"):
        worker.ask(name)
    worker.looks = 0
    worker.queue.serve()
    assert worker.looks == 1


async def test_a_refusal_is_for_one_alone() -> None:
    worker = Worker()
    first, wrong, last = worker.ask("a"), worker.ask("wrong"), worker.ask("b")
    worker.room = 2
    worker.queue.serve()
    assert isinstance(wrong.exception(), HandoffError)
    assert first.done()
    assert last.done()
    assert worker.served == ["a", "b"]


async def test_a_full_queue_takes_no_more() -> None:
    worker = Worker()
    for name in ("a", "b", "c", "d"):
        worker.ask(name)
    with pytest.raises(NoRoom, match="4 other handoffs wait") as caught:
        worker.ask("e")
    assert caught.value.retry_after


async def test_reserves_that_leave_or_are_over_are_not_served() -> None:
    worker = Worker()
    left, aborted, gone, last = (worker.ask(name) for name in ("a", "b", "c", "d"))
    left.cancel()
    worker.queue.end(("b", 0), TicketEnded("aborted"))
    gone.cancel()
    worker.room = 4
    worker.queue.serve()
    assert isinstance(aborted.exception(), TicketEnded)
    assert worker.served == ["d"]
    assert last.done()
    assert worker.queue.answered == 1


async def test_closing_answers_all() -> None:
    worker = Worker()
    asked = [worker.ask("a"), worker.ask("b", 1)]
    worker.queue.close(TicketEnded("stopping"))
    assert all(isinstance(each.exception(), TicketEnded) for each in asked)
    assert not len(worker.queue)
