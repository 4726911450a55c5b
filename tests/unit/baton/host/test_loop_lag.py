"""An event loop that stands still is seen."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.host.background import end_tasks
from baton.host.loop_lag import watch_loop

BLOCKED_S = 0.05


async def told(least: float, *, blocked_s: float) -> list[float]:
    """What is told until ``least`` or more was; the loop is blocked once, in between."""
    lags: list[float] = []
    watching = asyncio.create_task(watch_loop(lags.append, 0.001))
    try:
        async with asyncio.timeout(60):
            while len(lags) < 2:
                await asyncio.sleep(0.001)
            time.sleep(blocked_s)  # noqa: ASYNC251 - this is what is to be seen
            while max(lags) < least:
                await asyncio.sleep(0.001)
    finally:
        await end_tasks([watching])
    return lags


async def test_a_loop_that_stood_still() -> None:
    lags = await told(BLOCKED_S / 2, blocked_s=BLOCKED_S)
    assert min(lags) >= 0.0


async def test_it_ends_when_it_is_cancelled() -> None:
    watching = asyncio.create_task(watch_loop(lambda _: None, 3600.0))
    await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
