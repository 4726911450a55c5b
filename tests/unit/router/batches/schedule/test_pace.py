"""Lines begin at a pace."""

from __future__ import annotations

import asyncio
import math

from router.batches.schedule.pace import Pace

DEADLINE_S = 20.0


async def test_full_speed_never_waits() -> None:
    pace = Pace(math.inf)
    assert [await pace.turn() for _ in range(3)] == [True] * 3


async def test_turns_are_spaced() -> None:
    now = 0.0
    pace = Pace(100.0, lambda: now)
    assert await pace.turn()
    waiting = asyncio.create_task(pace.turn())
    await asyncio.sleep(0.03)
    # The clock stands still.
    assert not waiting.done()
    now = 0.01
    assert await asyncio.wait_for(waiting, DEADLINE_S)


async def test_a_change_is_heard_at_once() -> None:
    pace = Pace(1e-6)
    assert await pace.turn()
    waiting = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    pace.change(math.inf)
    assert await asyncio.wait_for(waiting, DEADLINE_S)
    pace.change(1e-6)
    waiting = asyncio.create_task(pace.turn())
    await asyncio.sleep(0)
    pace.stop()
    assert not await asyncio.wait_for(waiting, DEADLINE_S)
    assert not await pace.turn()
