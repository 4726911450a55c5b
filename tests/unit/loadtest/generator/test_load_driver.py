"""The driver: when it sends, and that a server which stalls does not make it wait."""

from __future__ import annotations

import asyncio
from array import array

import numpy as np
import pytest

from loadtest.generator.load_driver import LoadDriver
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.targets.target import RunClock, Target
from loadtest.generator.workload.lengths import Lengths
from loadtest.generator.workload.prompts import PlannedRequest
from loadtest.generator.workload.traffic import DrawnLengths, planned

SOURCE = DrawnLengths(Lengths("fixed", 3), Lengths("fixed", 2), "tokens", seed=1)


class FakeTarget(Target[int]):
    """Answers when ``gate`` opens; None: at once."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.under_way = 0
        self.max_under_way = 0
        self.prepared = 0
        self._gate = gate

    def prepare(self, request: PlannedRequest) -> int:
        self.prepared += 1
        return request.number

    async def ask(
        self, request: PlannedRequest, prepared: int, due_s: float, clock: RunClock
    ) -> RequestRecord:
        assert prepared == request.number
        sent_s = clock.now()
        self.under_way += 1
        self.max_under_way = max(self.max_under_way, self.under_way)
        if self._gate is not None:
            await self._gate.wait()
        await asyncio.sleep(0)
        self.under_way -= 1
        now = clock.now()
        times = array("d", [now])
        return RequestRecord(
            request.number, due_s, sent_s, now, "ok", output_tokens=1, token_times_s=times
        )

    async def close(self) -> None:
        pass


async def test_requests_go_when_they_are_due() -> None:
    target = FakeTarget()
    driver = LoadDriver(target)
    times = np.linspace(0.0, 0.3, 200)
    records = await driver.open_loop(planned(SOURCE, times.tolist()))
    assert [
        record.due_s for record in sorted(records, key=lambda one: one.number)
    ] == times.tolist()
    # uvloop's and asyncio's timers have a resolution of a millisecond.
    assert all(record.lag_s > -0.002 for record in records)
    assert driver.counts.sent == driver.counts.ended == len(records) == 200
    assert driver.counts.outcomes["ok"] == 200


async def test_a_stall_counts_for_those_that_came_meanwhile() -> None:
    gate = asyncio.Event()
    target = FakeTarget(gate)
    driver = LoadDriver(target)
    times = [0.01 * number for number in range(20)]
    running = asyncio.create_task(driver.open_loop(planned(SOURCE, times)))
    # All are sent though none is answered.
    async with asyncio.timeout(20):
        while target.under_way < 20:
            await asyncio.sleep(0.01)
    gate.set()
    records = await running
    # Who came first has waited longest: as much longer as it came earlier.
    waits = {record.number: record.ttft_s for record in records}
    assert waits[0] > waits[10] > waits[19]
    assert waits[0] >= 0.19


async def test_requests_are_made_ahead_but_not_all_at_once() -> None:
    target = FakeTarget()
    driver = LoadDriver(target)
    endless = planned(SOURCE, [3600.0] * 100_000)
    running = asyncio.create_task(driver.open_loop(endless))
    while target.prepared < 128:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert 128 <= target.prepared <= 132
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_closed_loop_keeps_a_fixed_number_in_flight() -> None:
    target = FakeTarget()
    driver = LoadDriver(target)
    records = await driver.closed_loop(SOURCE, 3, 60.0, 40)
    assert sorted(record.number for record in records) == list(range(40))
    assert target.max_under_way == 3
    assert all(record.due_s <= record.sent_s for record in records)


async def test_a_closed_loop_ends_by_time() -> None:
    driver = LoadDriver(FakeTarget())
    records = await driver.closed_loop(SOURCE, 2, 0.05, None)
    assert records
    assert max(record.due_s for record in records) < 20
    assert driver.counts.under_way == 0


async def test_a_stopped_sender_sends_no_more_and_waits_for_copies_in_flight() -> None:
    gate = asyncio.Event()
    target = FakeTarget(gate)
    driver = LoadDriver(target)
    times = [0.0] * 5 + [3600.0] * 1000
    running = asyncio.create_task(driver.open_loop(planned(SOURCE, times)))
    async with asyncio.timeout(20):
        while target.under_way < 5:
            await asyncio.sleep(0.01)
    driver.stop()
    await asyncio.sleep(0.05)
    assert not running.done()
    gate.set()
    async with asyncio.timeout(20):
        assert len(await running) == 5
    assert driver.stopped_s is not None


async def test_a_closed_loop_is_stopped() -> None:
    driver = LoadDriver(FakeTarget())
    running = asyncio.create_task(driver.closed_loop(SOURCE, 2, 3600.0, None))
    await asyncio.sleep(0.02)
    driver.stop()
    async with asyncio.timeout(20):
        assert await running
