"""Files that expire: hidden at once, deleted when no batch needs them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import InvalidRequest, NotFound
from router.batches.batch_planner import BatchPlanner
from router.batches.runner import SWEEP_S, BatchRunner
from router.batches.service import check_expiry
from router.batches.slots import LineSlots
from router.batches.storage.batch import Batch, BatchStatus
from router.batches.storage.database import Database
from router.batches.storage.store import BatchStore
from tests.support.router import batches_runner
from tests.support.router.batches_runner import (
    DEADLINE_S,
    QUOTA,
    Process,
    path_of,
    running,
    stored_file,
)

pytestmark = pytest.mark.usefixtures("storage")

TENANT = "acme"


class Clock:
    """Unix seconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def stored(folder: Path, clock: Clock) -> AsyncIterator[BatchStore]:
    store = batches_runner.make_store(folder, QUOTA, clock)
    try:
        yield store
    finally:
        await store.close()


def batch_of(file_id: str) -> Batch:
    return Batch(
        f"batch_{file_id}", TENANT, "", "tiny", "/v1/completions", file_id, "1h", 1000, 4600, {}
    )


async def test_an_expired_file_is_hidden_and_then_deleted(tmp_path: Path) -> None:
    clock = Clock()
    async with stored(tmp_path, clock) as store:
        short = await stored_file(store, b"x", TENANT, "a", 3600)
        long = await stored_file(store, b"y", TENANT, "b")
        assert (short.expires_at, long.expires_at) == (4600, 1000 + 30 * 86400)
        assert await store.ask(Database.file, short.id, TENANT, 4599) == short
        for now, seen in ((4599, {short.id, long.id}), (4600, {long.id})):
            files = await store.ask(Database.files, TENANT, "", "", 10, ascending=True, now=now)
            assert {file.id for file in files} == seen
        with pytest.raises(NotFound):
            await store.ask(Database.file, short.id, TENANT, 4600)
        with pytest.raises(NotFound):
            await store.ask(Database.add_batch, replace(batch_of(short.id), created_at=4600))
        await store.collect()
        assert path_of(store, short).exists()
        clock.now = 4600.0
        await store.collect()
        assert not path_of(store, short).exists()
        assert path_of(store, long).exists()
        assert await store.ask(Database.content_ids) == {long.id}


async def test_what_a_batch_needs_stays_until_it_has_ended(tmp_path: Path) -> None:
    clock = Clock()
    async with stored(tmp_path, clock) as store:
        file = await stored_file(store, b"x", TENANT, "a", 3600)
        await store.ask(Database.add_batch, batch_of(file.id))
        clock.now = 5000.0
        await store.collect()
        assert path_of(store, file).exists()
        held = await store.ask(Database.batch, f"batch_{file.id}")
        await store.finish(held, BatchStatus.EXPIRED, 5000)
        await store.collect()
        assert not path_of(store, file).exists()


async def test_results_expire_as_the_batch_says(tmp_path: Path) -> None:
    process = Process(tmp_path)
    async with running(process):
        made = await process.begin(1, output_expires_s=7200)
        ended = await process.until(made, BatchStatus.COMPLETED)
        assert ended.output_expires_s == 7200
        assert ended.output_file_id is not None
        output = await process.store.ask(Database.file, ended.output_file_id, TENANT)
        assert output.expires_at == output.created_at + 7200


async def test_the_runner_collects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batches.runner.COLLECT_S", 0.0)
    process = Process(tmp_path)
    clock = Clock()
    process.store = batches_runner.make_store(tmp_path, QUOTA, clock)
    process.runner = BatchRunner(
        process.store,
        process.lines.run,
        "tiny",
        process.metrics,
        planner=BatchPlanner(process.store, "tiny", None, {}, clock),
        slots=LineSlots(1, {}),
        has_key=lambda batch: True,
        max_in_flight=1,
        max_line_bytes=1000,
        poll_s=0.01,
        unix_clock=clock,
    )
    file = await stored_file(process.store, b"x", TENANT, "a", 3600)
    async with running(process):
        clock.now = 5000.0
        async with asyncio.timeout(DEADLINE_S):
            while path_of(process.store, file).exists():
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("seconds", [-1, 0, 3599, 30 * 86400 + 1])
def test_expiries_are_bounded(seconds: int) -> None:
    check_expiry(None, "x")
    check_expiry(3600, "x")
    with pytest.raises(InvalidRequest) as caught:
        check_expiry(seconds, "x")
    assert caught.value.param == "x"


async def test_what_a_crash_has_left_is_known_by_standing_still_and_not_by_its_date(
    tmp_path: Path,
) -> None:
    async with stored(tmp_path, Clock()) as store:
        kept = await stored_file(store, b"x", TENANT, "a")
        left, written = (tmp_path / "incoming" / name for name in ("left", "written"))
        for path in (left, written):
            path.write_bytes(b"y")
            os.utime(path, (0, 0))  # as if the wall clock had been set forward since
        await store.sweep(0.0)
        written.write_bytes(b"yy")
        for number in range(1, 6):
            await store.sweep(number * SWEEP_S)
        assert left.exists()
        written.write_bytes(b"yyy")
        for number in range(6, 9):
            await store.sweep(number * SWEEP_S)
        assert not left.exists()
        assert written.exists()
        assert path_of(store, kept).exists()
