"""A router's outbox: nothing is lost, nothing goes twice, one stream reads."""

from __future__ import annotations

import asyncio

import pytest

from baton.request import TokenOutput
from decode_worker.outbox import Outbox


def output(index: int) -> TokenOutput:
    return TokenOutput("r", 0, index, (index,))


async def test_one_message_a_step() -> None:
    outbox = Outbox(0.0)
    outbox.open()
    await outbox.wait(1.0)
    assert outbox.take() == []
    outbox.put(output(0))
    outbox.put(output(1))
    waiting = asyncio.create_task(outbox.wait(300.0))
    await asyncio.sleep(0)
    assert not waiting.done(), "woken before the step was over"
    outbox.flush()
    await waiting
    assert outbox.take() == [output(0), output(1)]
    assert outbox.take() == []


async def test_a_slow_reader_finds_several_steps_in_one_message() -> None:
    outbox = Outbox(0.0)
    for step in range(3):
        outbox.put(output(step))
        outbox.flush()
    await outbox.wait(1.0)
    assert outbox.take() == [output(0), output(1), output(2)]


async def test_waiting_ends_at_its_deadline() -> None:
    outbox = Outbox(0.0)
    async with asyncio.timeout(60):
        await outbox.wait(0.001)
    outbox.flush()
    async with asyncio.timeout(60):
        await outbox.wait(0.001)
    assert outbox.take() == []


async def test_one_that_hurries_has_a_message_of_nothing() -> None:
    outbox = Outbox(0.0)
    waiting = asyncio.create_task(outbox.wait(300.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.hurry()
    async with asyncio.timeout(60):
        await waiting
    assert outbox.take() == []


async def test_a_new_stream_takes_the_place_of_the_old_one() -> None:
    outbox = Outbox(0.0)
    old = outbox.open()
    await outbox.wait(1.0)
    outbox.take()
    waiting = asyncio.create_task(outbox.wait(300.0))
    await asyncio.sleep(0)
    new = outbox.open()
    await waiting
    assert not outbox.is_current(old)
    assert outbox.is_current(new)
    outbox.put(output(0))
    outbox.close(old, 3.0)
    assert outbox.unread_for(9.0) == 0.0, "the old stream's end is not the router's"
    assert outbox.take() == [output(0)]


async def test_it_knows_for_how_long_nobody_has_read() -> None:
    outbox = Outbox(2.0)
    assert outbox.unread_for(5.0) == 3.0
    reader = outbox.open()
    assert outbox.unread_for(5.0) == 0.0
    outbox.close(reader, 6.0)
    assert outbox.unread_for(8.0) == 2.0
    outbox.put(output(0))
    assert outbox.take() == [output(0)], "what was put before is kept for the next stream"


@pytest.mark.parametrize("ticks", range(5))
async def test_a_stream_that_is_cancelled_while_it_wakes_is_cancelled(ticks: int) -> None:
    outbox = Outbox(0.0)
    waiting = asyncio.create_task(outbox.wait(300.0))
    for _ in range(5):
        await asyncio.sleep(0)
    outbox.put(output(0))
    outbox.flush()
    for _ in range(ticks):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
