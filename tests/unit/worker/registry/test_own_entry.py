"""A worker's registry entry: what is written, and when."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import cast

from baton.host.background import end_tasks
from baton.store.registry import Registry, WorkerRecord
from worker.registry.own_entry import OwnEntry

HEARTBEAT_S = 3600.0


class Worker:
    """Lives one life after another. Stands for the registry, too."""

    def __init__(self) -> None:
        self.incarnation = "w:1"
        self.listed: set[str] = set()
        self.puts: asyncio.Queue[str] = asyncio.Queue()
        self.entry = OwnEntry(
            cast(Registry, self),
            ttl_s=4 * HEARTBEAT_S,
            heartbeat_s=HEARTBEAT_S,
            record=lambda: cast(WorkerRecord, SimpleNamespace(incarnation=self.incarnation)),
            timed=contextlib.nullcontext,
            lost=lambda stood_still: None,
        )

    async def put(self, record: WorkerRecord, ttl_s: float, *, renew: bool) -> bool:
        if not renew:
            self.listed.add(record.incarnation)
        self.puts.put_nowait(record.incarnation)
        return record.incarnation in self.listed

    async def remove(self, incarnation: str) -> None:
        self.listed.discard(incarnation)


async def test_a_life_that_was_struck_off_is_not_listed_again() -> None:
    """It may take seconds to end, and its heartbeats go on."""
    worker = Worker()
    await worker.entry.write()
    assert worker.listed == {"w:1"}
    await worker.entry.remove()
    for _ in range(3):
        await worker.entry.write()
    assert not worker.listed
    worker.incarnation = "w:2"
    worker.entry.begin()
    await worker.entry.write()
    assert worker.listed == {"w:2"}


async def test_another_life_is_written_at_once() -> None:
    worker = Worker()
    keeper = asyncio.create_task(worker.entry.keep())
    async with asyncio.timeout(60):
        assert await worker.puts.get() == "w:1"
        await worker.entry.remove()
        worker.incarnation = "w:2"
        worker.entry.begin()
        assert await worker.puts.get() == "w:2"
    await end_tasks([keeper])
