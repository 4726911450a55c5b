"""Files and batches of routers on several hosts: what Redis, crashes and lost data do to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from baton.errors import BatonError, RequestTooLarge, Unavailable
from router.batches.runner import SWEEP_S
from router.batches.storage.batch import Batch, BatchStatus, LineResult
from router.batches.storage.contents import FolderContents
from router.batches.storage.database import Database, LeaseLost
from router.batches.storage.quota import Quota
from router.batches.storage.store import BatchStore
from tests.support.mini_cluster import free_port
from tests.support.router.batches_runner import QUOTA, Process, running, stored_file

HOUR = 8
"""Sweeps in more than an hour."""


@pytest.fixture
async def store(redis_url: str, tmp_path: Path) -> AsyncIterator[BatchStore]:
    made = BatchStore.shared(redis_url, str(tmp_path), FolderContents(tmp_path), QUOTA)
    yield made
    await made.close()


async def claimed(store: BatchStore) -> Batch:
    """A batch with an owner and the results of two lines."""
    file = await stored_file(store, b"x")
    batch = Batch("batch_1", "acme", "", "tiny", "/v1/completions", file.id, "1h", 1, 2, {})
    await store.ask(Database.add_batch, batch)
    held = await store.ask(Database.claim, batch, "me")
    assert held is not None
    await store.add_results(held, [LineResult(2, True, '"two"'), LineResult(1, True, '"one"')])
    return held


def parts(folder: Path) -> list[Path]:
    return list(folder.glob("parts/*/*"))


async def test_parts_stay_while_their_batch_runs_and_an_hour_longer(
    store: BatchStore, tmp_path: Path
) -> None:
    """Redis may lose its last second, and with it the end of the batch."""
    held = await claimed(store)
    for number in range(HOUR):
        await store.sweep(number * SWEEP_S)
    assert len(parts(tmp_path)) == 1
    ended = await store.finish(held, BatchStatus.COMPLETED, 5)
    assert ended.output_file_id is not None
    output = await store.ask(Database.file, ended.output_file_id, "acme")
    async with store.reading(output) as rows:
        assert rows.read() == b'"one"\n"two"\n'
    await store.sweep(HOUR * SWEEP_S)
    assert len(parts(tmp_path)) == 1
    for number in range(HOUR + 1, 2 * HOUR):
        await store.sweep(number * SWEEP_S)
    assert parts(tmp_path) == []
    assert not (tmp_path / "parts" / held.id).exists()
    assert {path.name for path in (tmp_path / "files").iterdir()} == {output.id, held.input_file_id}


async def test_a_former_owner_ends_nothing_and_leaves_nothing(
    store: BatchStore, tmp_path: Path
) -> None:
    held = await claimed(store)
    now = await store.ask(Database.batch, held.id)
    other = await store.ask(Database.claim, now, "you")
    assert other is not None
    with pytest.raises(LeaseLost):
        await store.add_results(held, [LineResult(3, True, '"late"')])
    files = set((tmp_path / "files").iterdir())
    with pytest.raises(LeaseLost):
        await store.finish(held, BatchStatus.COMPLETED, 5)
    assert set((tmp_path / "files").iterdir()) == files
    await store.add_results(other, [LineResult(3, False, '"mine"')])
    ended = await store.finish(other, BatchStatus.COMPLETED, 5)
    assert (ended.completed, ended.failed) == (2, 1)
    assert ended.error_file_id is not None
    errors = await store.ask(Database.file, ended.error_file_id, "acme")
    async with store.reading(errors) as rows:
        assert rows.read() == b'"mine"\n'


async def test_a_batch_whose_part_is_gone_ends(
    store: BatchStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = await claimed(store)
    await store.add_results(held, [LineResult(3, True, '"three"')])
    first = next(path for path in parts(tmp_path) if b"one" in path.read_bytes())
    first.unlink()
    ended = await store.finish(held, BatchStatus.COMPLETED, 5)
    assert ended.output_file_id is not None
    output = await store.ask(Database.file, ended.output_file_id, "acme")
    async with store.reading(output) as rows:
        assert rows.read() == b'"three"\n'
    assert f"results of batch {held.id} are lost" in caplog.text


async def test_contents_stay_when_redis_has_lost_its_data(
    store: BatchStore, owner_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = await stored_file(store, b"x")
    await store.sweep(0.0)
    with redis.Redis.from_url(owner_url) as client:
        for key in client.keys(f"baton:{{{tmp_path}}}:*"):
            client.delete(key)
    for number in range(1, 2 * HOUR):
        await store.sweep(number * SWEEP_S)
    path = store.path(file)
    assert path is not None
    assert path.exists()
    assert "has Redis lost its data" in caplog.text
    # The operator gives them up.
    (tmp_path / "identity").unlink()
    for number in range(2 * HOUR, 4 * HOUR):
        await store.sweep(number * SWEEP_S)
    assert not path.exists()


async def test_redis_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    away = f"redis://127.0.0.1:{free_port()}"
    store = BatchStore.shared(away, "c", FolderContents(tmp_path), QUOTA)
    with pytest.raises(Unavailable) as caught:
        await store.ask(Database.beats)
    assert caught.value.retry_after
    with pytest.raises(Unavailable):
        await stored_file(store, b"x")
    assert not any((tmp_path / "incoming").iterdir())
    assert not any((tmp_path / "files").iterdir())
    await store.close()


async def test_a_batch_goes_on_when_redis_is_back(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that run meanwhile are not run again."""
    monkeypatch.setattr("router.batches.storage.store.SHARED_GATHER_S", 0.02)
    monkeypatch.setattr("router.batches.result_writer._PAUSE_S", 0.02)
    process = Process(tmp_path)
    process.use(BatchStore.shared(redis_url, str(tmp_path), FolderContents(tmp_path), QUOTA))
    add, calls = process.store.add_results, itertools.count()

    async def fails_at_times(held: Batch, results: list[LineResult]) -> None:
        number = next(calls)
        if number % 3 == 0:
            raise Unavailable("away")
        await add(held, results)
        if number % 3 == 1:
            # Redis has the results, and its answer is lost.
            raise Unavailable("away")

    monkeypatch.setattr(process.store, "add_results", fails_at_times)
    async with running(process):
        batch = await process.until(await process.begin(40), BatchStatus.COMPLETED)
        assert batch.completed == 40
        assert await process.names(batch.output_file_id) == [f"line-{n}" for n in range(40)]
    assert set(process.lines.ran.values()) == {1}


@pytest.mark.usefixtures("storage")
async def test_uploads_of_several_routers_stay_within_the_quota_exactly(tmp_path: Path) -> None:
    quota = Quota(1000, 1500)
    processes = [Process(tmp_path, quota=quota) for _ in range(3)]
    stores = [process.store for process in processes]

    async def upload(store: BatchStore, tenant: str) -> int:
        try:
            file = await stored_file(store, b"x" * 90, tenant)
        except RequestTooLarge:
            return 0
        return file.size

    async def cancelled(store: BatchStore, tenant: str) -> int:
        task = asyncio.create_task(upload(store, tenant))
        await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.wait([task])
        return 0

    jobs = [
        job(store, tenant)
        for store in stores
        for tenant in ("acme", "other")
        for job in (upload, upload, upload, cancelled)
    ]
    await asyncio.gather(*jobs)
    # Two at a time are more than a quota may hold: what is left is exactly what is not stored.
    stored = {
        tenant: sum(
            file.size
            for file in await stores[0].ask(Database.files, tenant, "", "", 100, ascending=True)
        )
        for tenant in ("acme", "other")
    }
    assert 0 < sum(stored.values()) <= quota.total
    assert await stores[1].ask(Database.uploads) == {}
    total = quota.total - sum(stored.values())
    room = min(quota.of_tenant - stored["acme"], total)
    with pytest.raises(BatonError, match=f"room for {room} bytes more"):
        await stores[2].ask(Database.reserve, "u", "acme", room + 1, 0, quota)
    assert await stores[2].ask(Database.reserve, "u", "acme", room, 0, quota) == room
    for store in stores:
        await store.close()


@pytest.mark.usefixtures("storage")
async def test_results_become_files_without_a_byte_of_the_quota_lost(tmp_path: Path) -> None:
    async with running(Process(tmp_path)) as process:
        batch = await process.until(await process.begin(20), BatchStatus.COMPLETED)
        held = await process.store.ask(Database.files, "acme", "", "", 10, ascending=True)
        room = QUOTA.of_tenant - sum(file.size for file in held)
        with pytest.raises(RequestTooLarge):
            await process.store.ask(Database.reserve, "u", "acme", room + 1, 0, QUOTA)
        for file in held:
            await process.store.delete_file(file.id, "acme")
        whole = QUOTA.of_tenant
        assert await process.store.ask(Database.reserve, "u", "acme", whole, 0, QUOTA) == whole
        assert replace(batch, beat=0).result_bytes == 0
