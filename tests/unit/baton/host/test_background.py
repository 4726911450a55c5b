"""Background tasks end when asked to, even if they lose a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from baton.host import background
from baton.host.background import end_tasks, spawn, watch_loop


async def forgetful(losses: int) -> None:
    """Loses its first cancellations."""
    while True:
        try:
            await asyncio.sleep(10.0)
        except asyncio.CancelledError:
            losses -= 1
            if losses < 0:
                raise


async def test_lost_cancellations_are_repeated() -> None:
    tasks = [asyncio.create_task(forgetful(losses)) for losses in (0, 1, 2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await end_tasks(tasks)
    assert all(task.cancelled() for task in tasks)


async def test_what_they_raise_is_dropped_and_what_has_ended_stays() -> None:
    async def fails_at_its_end() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            raise OSError("while it cleaned up")

    async def returns() -> int:
        return 3

    ended, failing = asyncio.create_task(returns()), asyncio.create_task(fails_at_its_end())
    await asyncio.sleep(0)
    await end_tasks([ended, failing])
    await end_tasks([])
    assert ended.result() == 3
    assert isinstance(failing.exception(), OSError)


async def test_one_that_does_not_end_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "DEADLINE_S", 0.1)
    task = asyncio.create_task(forgetful(1000), name="stubborn")
    await asyncio.sleep(0)
    await end_tasks([task])
    assert "stubborn" in caplog.text
    while not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


async def test_the_death_of_a_task_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise LookupError("a bug")

    failing, cancelled = spawn(fails(), "failing"), spawn(forgetful(0), "cancelled")
    await asyncio.wait([failing])
    await end_tasks([cancelled])
    (record,) = caplog.records
    assert record.message == "task failing has died"
    assert record.exc_info is not None


BLOCKED_S = 0.05


async def told(least: float, *, blocked_s: float) -> list[float]:
    """Reports until ``least`` or more came; the loop is blocked once, in between."""
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
