"""Shared by the tests of runner and by other tests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from baton.config.daily_hours import DailyHours
from baton.telemetry.metrics import RouterMetrics
from router.batches.batch_planner import BatchPlanner
from router.batches.line import Line
from router.batches.runner import BatchRunner
from router.batches.slots import LineSlots
from router.batches.storage.batch import Batch, BatchStatus, LineResult, StoredFile
from router.batches.storage.database import Database
from router.batches.storage.quota import Quota
from router.batches.storage.store import BatchStore

DEADLINE_S = 20.0


ENDPOINT = "/v1/completions"
QUOTA = Quota(1 << 20, 1 << 20)


Script = Callable[[Line], Awaitable[bool]]

make_store = BatchStore.local
"""Makes the stores of processes; tests put another one here."""


async def at_once(line: Line) -> bool:
    return True


@dataclass
class Lines:
    """Runs lines as a script says; remembers which."""

    script: Script = at_once
    ran: Counter[str] = field(default_factory=Counter)
    running: int = 0
    most: int = 0

    async def run(self, batch: Batch, line: Line) -> LineResult:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            ok = await self.script(line)
        finally:
            self.running -= 1
        self.ran[line.custom_id] += 1
        return LineResult(line.number, ok, json.dumps({"custom_id": line.custom_id}), 3, 1, 2)


@dataclass
class Process:
    """A router process' part of batches."""

    folder: Path
    lines: Lines = field(default_factory=Lines)
    now: float = 1000.0
    model: str = "tiny"
    most: int = 8
    quota: Quota = QUOTA
    keys: set[str] = field(default_factory=lambda: {""})
    """The ids of keys that are not revoked."""
    lease_s: float = 60.0
    """For tests that are not about it: on a busy machine a beat comes late."""
    hours: DailyHours | None = None

    def __post_init__(self) -> None:
        self.use(make_store(self.folder, self.quota))

    def use(self, store: BatchStore) -> None:
        """Take this store instead."""
        self.store = store
        self.metrics = RouterMetrics(CollectorRegistry())
        self.runner = BatchRunner(
            self.store,
            self.lines.run,
            self.model,
            self.metrics,
            planner=BatchPlanner(self.store, self.model, self.hours, {}, lambda: self.now),
            slots=LineSlots(self.most, {}),
            has_key=lambda batch: batch.key_id in self.keys,
            max_in_flight=self.most,
            max_line_bytes=10_000,
            poll_s=0.01,
            lease_s=self.lease_s,
            unix_clock=lambda: self.now,
        )

    async def begin(self, count: int, tenant: str = "acme", **changes: Any) -> Batch:
        """Upload a file and make a batch of it."""
        content = b"".join(text(f"line-{number}") for number in range(count))
        file = await stored_file(self.store, content, tenant)
        batch = Batch(
            f"batch_{file.id}", tenant, "", "tiny", ENDPOINT, file.id, "1h", 1000, 4600, {}
        )
        batch = replace(batch, **changes)
        await self.store.ask(Database.add_batch, batch)
        return batch

    async def until(self, batch: Batch, *statuses: BatchStatus) -> Batch:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                now = await self.store.ask(Database.batch, batch.id)
                if now.status in statuses:
                    return now
                await asyncio.sleep(0.005)

    async def names(self, file_id: str | None) -> list[str]:
        """The custom ids of a file's lines."""
        if file_id is None:
            return []
        file = await self.store.ask(Database.file, file_id, "acme")
        async with self.store.reading(file) as rows:
            return [json.loads(row)["custom_id"] for row in rows]


def path_of(store: BatchStore, file: StoredFile) -> Path:
    """The path of a file's contents in a folder."""
    path = store.path(file)
    assert path is not None
    return path


async def stored_file(
    store: BatchStore,
    content: bytes,
    tenant: str = "acme",
    filename: str = "in.jsonl",
    expires_s: int | None = None,
) -> StoredFile:
    """Upload a batch's input."""
    async with store.incoming(tenant) as incoming:
        await incoming.write(content)
        return await incoming.keep(filename, "batch", expires_s)


def text(name: str) -> bytes:
    body = {"model": "tiny", "prompt": "x"}
    line = {"custom_id": name, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(line).encode() + b"\n"


@asynccontextmanager
async def running(process: Process) -> AsyncIterator[Process]:
    await process.runner.start()
    try:
        yield process
    finally:
        await process.runner.close()
        await process.store.close()
