"""Batches that wait for their hours, and those that are in a hurry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.config.daily_hours import DailyHours
from router.batches.batch_planner import BatchPlanner
from router.batches.line import Line
from router.batches.schedule.plan import SpeedState
from router.batches.storage.batch import Batch, BatchStatus
from router.batches.storage.database import Database
from tests.support.router.batches_runner import DEADLINE_S, Lines, Process, at_once, running

NOON_S = 12 * 3600
AFTERNOON = DailyHours.parse("12:00-18:00", "UTC")
"""Process.now is a quarter past midnight."""

pytestmark = pytest.mark.usefixtures("storage")


async def slowly(line: Line) -> bool:
    await asyncio.sleep(0.01)
    return True


async def knows_its_speed(process: Process) -> None:
    """Batches have had 1,000 tokens a second."""
    await process.until(await process.begin(1), BatchStatus.COMPLETED)
    await process.store.ask(Database.learn_speed, "tiny", 1000.0)


async def given_back(process: Process, batch: Batch) -> Batch:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            now = await process.store.ask(Database.batch, batch.id)
            if now.status is BatchStatus.IN_PROGRESS and not now.owner and now.completed:
                return now
            await asyncio.sleep(0.005)


async def test_a_batch_waits_for_its_hours(tmp_path: Path) -> None:
    process = Process(tmp_path, Lines(slowly), most=2, hours=AFTERNOON)
    async with running(process):
        await knows_its_speed(process)
        batch = await process.begin(60, completion_window="24h", expires_at=1000 + 86_400)
        held = await given_back(process, batch)
        # Its first lines have shown how long it takes.
        assert 8 <= held.completed < 60
        assert process.lines.running == 0
        planner = BatchPlanner(process.store, "tiny", AFTERNOON, {}, lambda: process.now)
        schedule = (await planner.plan())[batch.id]
        assert schedule.state is SpeedState.WAITING
        assert schedule.starts_at == NOON_S
        await asyncio.sleep(0.1)
        assert (await process.store.ask(Database.batch, batch.id)).completed == held.completed
        process.now = NOON_S
        ended = await process.until(batch, BatchStatus.COMPLETED)
        assert (ended.completed, ended.failed) == (60, 0)
        # Each line has run once.
        assert sum(process.lines.ran.values()) == 61


async def test_a_window_without_hours_is_kept(tmp_path: Path) -> None:
    process = Process(tmp_path, hours=AFTERNOON)
    async with running(process):
        await knows_its_speed(process)
        batch = await process.begin(60, completion_window="1s", expires_at=1001)
        assert (await process.until(batch, BatchStatus.COMPLETED)).completed == 60


async def test_a_waiting_batch_can_be_cancelled_and_expires(tmp_path: Path) -> None:
    process = Process(tmp_path, Lines(slowly), most=2, hours=AFTERNOON)
    async with running(process):
        await knows_its_speed(process)
        first, second = [
            await process.begin(60, completion_window="24h", expires_at=1000 + 86_400)
            for _ in range(2)
        ]
        await given_back(process, first)
        await given_back(process, second)
        await process.store.ask(Database.cancel, first.id, "acme", 1005)
        assert (await process.until(first, BatchStatus.CANCELLED)).completed < 60
        process.now = 1000 + 86_400
        ended = await process.until(second, BatchStatus.EXPIRED)
        assert ended.completed + ended.failed == 60


async def test_a_batch_in_a_hurry_takes_the_place_of_another(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def wait(line: Line) -> bool:
        await gate.wait()
        return True

    async with running(Process(tmp_path, Lines(wait), most=1)) as process:
        long = [await process.begin(3, expires_at=90_000 + n) for n in range(4)]
        for batch in long:
            await process.until(batch, BatchStatus.IN_PROGRESS)
        soon = await process.begin(3, expires_at=2000)
        await process.until(soon, BatchStatus.IN_PROGRESS)
        gate.set()
        process.lines.script = at_once
        for batch in [soon, *long]:
            assert (await process.until(batch, BatchStatus.COMPLETED)).completed == 3
        # The one that made room has lost no line.
        assert sum(process.lines.ran.values()) == 15
