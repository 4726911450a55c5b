"""When a control store that does not answer is ended."""

from __future__ import annotations

import asyncio

import pytest

from baton.host.background import end_tasks
from deploy.ray import gcs_process
from deploy.ray.gcs_process import GcsProcess, GcsWatch, RemoteGcsWatch


class Gcs(GcsProcess):
    """Process 7, until it is killed: then 8, which answers."""

    def __init__(self) -> None:
        self.kills: list[int] = []

    @property
    def pid(self) -> int:
        return 8 if self.kills else 7

    def kill(self) -> None:
        self.kills.append(self.pid)

    async def ask(self, timeout_s: float) -> None:
        if self.pid == 7:
            raise ConnectionError("no answer")


async def test_a_silent_one_is_ended_once_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_process, "_EACH_S", 0.001)
    gcs, lines = Gcs(), list[str]()
    watching = asyncio.create_task(GcsWatch(gcs, gcs.ask, lines.append, max_s=0.05).run())
    async with asyncio.timeout(60):
        while not gcs.kills:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.2)
    await end_tasks([watching])
    assert gcs.kills == [7]
    assert len(lines) == 1
    assert lines[0].startswith("gcs has not answered")


async def test_another_worker_is_logged_when_silent_and_when_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gcs_process, "_EACH_S", 0.001)
    gcs, lines = Gcs(), list[str]()
    watching = asyncio.create_task(RemoteGcsWatch(gcs.ask, lines.append, max_s=0.05).run())
    async with asyncio.timeout(60):
        while not lines:
            await asyncio.sleep(0.001)
        gcs.kill()
        while len(lines) < 2:
            await asyncio.sleep(0.001)
    await end_tasks([watching])
    assert "does not answer" in lines[0]
    assert lines[1:] == ["Ray's control store is back"]
