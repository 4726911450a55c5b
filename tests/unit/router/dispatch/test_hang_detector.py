"""Workers are watched, whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

import pytest

from baton.config.cluster import Config
from baton.host.background import end_tasks
from router.dispatch import hang_detector
from router.dispatch.hang_detector import HangDetector


class Nothing:
    """Links and placement without any worker."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.watched = asyncio.Event()

    def listen(self, now: float) -> None:
        if self.failures:
            self.failures -= 1
            raise ValueError("a bug")
        self.watched.set()

    @property
    def attempts(self) -> Collection[Any]:
        return ()


async def test_whatever_goes_wrong_the_workers_are_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hang_detector, "WATCH_S", 0.001)
    nothing = Nothing(failures=3)
    parts = cast(Any, nothing)
    watching = asyncio.create_task(HangDetector(Config(), parts, parts, parts).run())
    async with asyncio.timeout(60):
        await nothing.watched.wait()
    await asyncio.sleep(0.01)
    await end_tasks([watching])
    assert caplog.text.count("ValueError: a bug") == 1, "the first of a row is logged"
    assert "the check for hung workers failed; errors in a row: 3" in caplog.text
