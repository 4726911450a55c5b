"""The echo worker's records in the registry."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
import redis

from baton.host.background import end_tasks
from baton.store.registry import Registry, WorkerRecord
from loadtest.router import echo_worker

DEADLINE_S = 20.0


class Away:
    """A registry whose Redis does not answer for a while."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.listed: list[str] = []
        self.changed = asyncio.Event()

    async def put(self, record: WorkerRecord, ttl_s: float) -> None:
        if self.times:
            self.times -= 1
            raise redis.TimeoutError("timed out")
        self.listed.append(record.role)
        self.changed.set()


async def test_records_are_renewed_after_redis_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo_worker, "_HEARTBEAT_S", 0.01)
    registry, records = Away(3), echo_worker._records("127.0.0.1:1", 512)
    task = asyncio.create_task(echo_worker._renew(cast(Registry, registry), records))
    try:
        async with asyncio.timeout(DEADLINE_S):
            while len(registry.listed) < 2:
                await registry.changed.wait()
                registry.changed.clear()
        assert registry.listed[:2] == ["prefill", "decode"]
    finally:
        await end_tasks([task])
