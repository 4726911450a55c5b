"""How the launcher's children are started again."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import BatonError
from baton.host.background import end_tasks
from deploy.launcher import part_watch
from deploy.launcher.part_watch import PartWatch


class Mayfly:
    """Ends as soon as it is started, if it can be started at all."""

    def __init__(self) -> None:
        self.starts = 0
        self.failure: Exception | None = None

    @property
    def pid(self) -> int:
        return self.starts

    async def start(self) -> None:
        self.starts += 1
        if self.failure is not None:
            raise self.failure

    async def wait(self) -> str:
        return f"end {self.starts}"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_watch, "_LONGEST_PAUSE_S", 0.001)


@pytest.mark.parametrize("failure", [None, PermissionError("not now"), BatonError("no")])
async def test_some_parts_are_started_again_for_ever_and_that_is_said_once(
    failure: Exception | None,
) -> None:
    lines: list[str] = []
    pids: dict[str, int] = {}
    part = Mayfly()
    part.failure = failure
    watch = PartWatch(lines.append, pids.__setitem__)
    keeping = asyncio.create_task(watch.keep_at_it("gcs", part))
    async with asyncio.timeout(60):
        while part.starts < 20:
            await asyncio.sleep(0.001)
    assert not keeping.done()
    assert lines == ["gcs ended (end 0); it is started again, until it stays"]
    assert bool(pids) is (failure is None)
    await end_tasks([keeping])
