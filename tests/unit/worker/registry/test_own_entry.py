"""A worker's registry entry: what is written, and when."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import cast

import pytest

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
        self.answers = asyncio.Event()
        """Whether the registry answers; until it is set, writes wait."""
        self.answers.set()
        self.failure: Exception | None = None
        self.losses = 0
        self.entry = OwnEntry(
            cast(Registry, self),
            ttl_s=4 * HEARTBEAT_S,
            heartbeat_s=HEARTBEAT_S,
            record=lambda: cast(WorkerRecord, SimpleNamespace(incarnation=self.incarnation)),
            timed=contextlib.nullcontext,
            lost=self._lose,
        )

    def _lose(self, stood_still: bool) -> None:
        self.losses += 1

    async def put(self, record: WorkerRecord, ttl_s: float, *, renew: bool) -> bool:
        if self.failure is not None:
            raise self.failure
        if not renew:
            self.listed.add(record.incarnation)
        is_there = record.incarnation in self.listed
        self.puts.put_nowait(record.incarnation)
        await self.answers.wait()
        return is_there

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


@pytest.mark.parametrize("is_there", [True, False])
async def test_an_answer_for_an_earlier_life_says_nothing_about_this_one(is_there: bool) -> None:
    """The life may end while its last write is in flight."""
    worker = Worker()
    await worker.entry.write()
    if not is_there:
        worker.listed.clear()
    worker.answers.clear()
    writing = asyncio.create_task(worker.entry.write())
    async with asyncio.timeout(60):
        assert [await worker.puts.get() for _ in range(2)] == ["w:1", "w:1"]
        worker.incarnation = "w:2"
        worker.entry.begin()
        worker.answers.set()
        await writing
        assert not worker.entry.is_known, "only its own write registers it"
        assert worker.losses == 0
        await worker.entry.write()
    assert worker.entry.is_known
    assert "w:2" in worker.listed


@pytest.mark.parametrize("failure", [RuntimeError("odd"), UnicodeError(), OSError("no descriptor")])
async def test_no_error_on_the_way_to_the_registry_ends_the_worker(failure: Exception) -> None:
    worker = Worker()
    worker.failure = failure
    await worker.entry.write()
    assert not worker.entry.is_known
    worker.failure = None
    await worker.entry.write()
    assert worker.entry.is_known
    assert worker.losses == 0
