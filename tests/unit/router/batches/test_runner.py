"""Batches from their claim to their files, with lines that do what the test says."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.errors import Unavailable
from router.batches.line import Line
from router.batches.storage.batch import Batch, BatchStatus, LineResult
from router.batches.storage.database import Database
from router.batches.storage.quota import Quota
from tests.support.router.batches_runner import (
    DEADLINE_S,
    Lines,
    Process,
    at_once,
    path_of,
    running,
    text,
)

pytestmark = pytest.mark.usefixtures("storage")


async def test_a_batch_from_its_start_to_its_files(tmp_path: Path) -> None:
    async def odd_lines_fail(line: Line) -> bool:
        # Later lines end first: the files are in the order of the lines all the same.
        await asyncio.sleep(0.02 - line.number * 1e-3)
        return line.number % 2 == 0

    async with running(Process(tmp_path, Lines(odd_lines_fail))) as process:
        batch = await process.until(await process.begin(10), BatchStatus.COMPLETED)
        assert (batch.total, batch.completed, batch.failed) == (10, 5, 5)
        assert (batch.prompt_tokens, batch.cached_tokens, batch.completion_tokens) == (30, 10, 20)
        assert batch.in_progress_at == batch.finalizing_at == batch.completed_at == 1000
        assert await process.names(batch.output_file_id) == [f"line-{n}" for n in range(1, 10, 2)]
        assert await process.names(batch.error_file_id) == [f"line-{n}" for n in range(0, 10, 2)]
        assert set(process.lines.ran.values()) == {1}
        assert await process.store.ask(Database.done_lines, batch.id) == set()
        sample = process.metrics.registry.get_sample_value
        assert sample("baton_batch_lines_total", {"outcome": "ok"}) == 5
        assert sample("baton_batch_lines_in_flight") == 0


@pytest.mark.parametrize("storage", ["local"], indirect=True)
async def test_nothing_is_written_before_the_first_file(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with running(Process(folder)):
        await asyncio.sleep(0.05)
        assert not folder.exists()


async def test_a_file_without_errors_is_not_made(tmp_path: Path) -> None:
    async with running(Process(tmp_path)) as process:
        batch = await process.until(await process.begin(3), BatchStatus.COMPLETED)
        assert batch.error_file_id is None
        assert len(await process.names(batch.output_file_id)) == 3


async def test_a_batch_hands_on_a_bounded_number_of_lines_at_a_time(tmp_path: Path) -> None:
    async def slow(line: Line) -> bool:
        await asyncio.sleep(0.002)
        return True

    async with running(Process(tmp_path, Lines(slow), most=3)) as process:
        await process.until(await process.begin(20), BatchStatus.COMPLETED)
        assert process.lines.most == 3


async def test_a_batch_whose_key_is_revoked_ends(tmp_path: Path) -> None:
    began = asyncio.Event()

    async def first_line_ends(line: Line) -> bool:
        if line.number > 1:
            began.set()
            await asyncio.sleep(DEADLINE_S)
        return True

    process = Process(tmp_path, Lines(first_line_ends), most=2, keys={"ann", "bob"})
    async with running(process):
        batch = await process.begin(5, key_id="ann")
        other = await process.begin(1, key_id="bob")
        await process.until(other, BatchStatus.COMPLETED)
        async with asyncio.timeout(DEADLINE_S):
            await began.wait()
        process.keys.remove("ann")
        ended = await process.until(batch, BatchStatus.FAILED)
        assert [fault.code for fault in ended.faults] == ["key_revoked"]
        assert await process.names(ended.output_file_id) == ["line-0"]
        # One that was made before, and never begun, ends too.
        waiting = await process.until(await process.begin(1, key_id="ann"), BatchStatus.FAILED)
        assert [fault.code for fault in waiting.faults] == ["key_revoked"]


async def test_a_batch_whose_results_find_no_room_ends_with_those_that_did(
    tmp_path: Path,
) -> None:
    quota = Quota(10 * len(text("line-0")) + 100, 10_000)
    async with running(Process(tmp_path, most=1, quota=quota)) as process:
        batch = await process.until(await process.begin(10), BatchStatus.FAILED)
        assert [fault.code for fault in batch.faults] == ["no_space"]
        names = await process.names(batch.output_file_id)
        assert 0 < len(names) < 10
        assert names == [f"line-{number}" for number in range(len(names))]
        other = await process.until(await process.begin(2, tenant="other"), BatchStatus.COMPLETED)
        assert other.completed == 2


async def test_a_file_at_fault_fails_its_batch(tmp_path: Path) -> None:
    async with running(Process(tmp_path)) as process:
        batch = await process.begin(2, endpoint="/v1/chat/completions")
        batch = await process.until(batch, BatchStatus.FAILED)
        assert [(fault.line, fault.code) for fault in batch.faults] == [
            (1, "mismatched_endpoint"),
            (2, "mismatched_endpoint"),
        ]
        assert batch.failed_at == 1000
        assert not process.lines.ran


async def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def first_five(line: Line) -> bool:
        if line.number > 5:
            await gate.wait()
        return True

    first = Process(tmp_path, Lines(first_five))
    async with running(first):
        batch = await first.begin(12)
        async with asyncio.timeout(DEADLINE_S):
            while len(await first.store.ask(Database.done_lines, batch.id)) < 5:
                await asyncio.sleep(0.005)
    assert first.lines.running == 0
    async with running(Process(tmp_path)) as second:
        batch = await second.until(batch, BatchStatus.COMPLETED)
        assert batch.completed == 12
        assert sorted(await second.names(batch.output_file_id)) == sorted(
            f"line-{n}" for n in range(12)
        )
        assert sum(second.lines.ran.values()) == 7


async def test_a_dead_process_loses_its_batch(tmp_path: Path) -> None:
    """Its beat stands still; another one takes over, and it writes nothing any more."""
    gate = asyncio.Event()

    async def stuck(line: Line) -> bool:
        await gate.wait()
        return False

    dead = Process(tmp_path, Lines(stuck))
    async with running(dead):
        batch = await dead.begin(4)
        async with asyncio.timeout(DEADLINE_S):
            while dead.lines.running < 4:
                await asyncio.sleep(0.005)
        assert dead.runner._follow is not None
        dead.runner._follow.cancel()
        async with running(Process(tmp_path, lease_s=0.3)) as alive:
            seen = await alive.store.ask(Database.batch, batch.id)
            assert seen.owner == dead.runner.owner
            batch = await alive.until(batch, BatchStatus.COMPLETED)
        gate.set()
        async with asyncio.timeout(DEADLINE_S):
            while not dead.runner._runs[batch.id].task.done():
                await asyncio.sleep(0.005)
        assert sum(dead.lines.ran.values()) > 0
        now = await dead.store.ask(Database.batch, batch.id)
    # What the dead one's lines said counts for nothing.
    assert now == batch
    assert (batch.completed, batch.failed) == (4, 0)


async def test_a_batch_runs_in_one_process_at_a_time(tmp_path: Path) -> None:
    async def slow(line: Line) -> bool:
        await asyncio.sleep(0.02)
        return True

    one, other = Process(tmp_path, Lines(slow)), Process(tmp_path, Lines(slow))
    async with running(one), running(other):
        batches = [await one.begin(12) for _ in range(4)]
        for batch in batches:
            await one.until(batch, BatchStatus.COMPLETED)
    assert sum((one.lines.ran + other.lines.ran).values()) == 48


async def test_a_cancelled_batch_keeps_its_results(tmp_path: Path) -> None:
    async def first_two(line: Line) -> bool:
        if line.number > 2:
            await asyncio.Event().wait()
        return True

    async with running(Process(tmp_path, Lines(first_two))) as process:
        batch = await process.begin(6)
        async with asyncio.timeout(DEADLINE_S):
            while (await process.store.ask(Database.batch, batch.id)).completed < 2:
                await asyncio.sleep(0.005)
        await process.store.ask(Database.cancel, batch.id, "acme", 1005)
        batch = await process.until(batch, BatchStatus.CANCELLED)
        assert (batch.cancelling_at, batch.cancelled_at) == (1005, 1000)
        assert await process.names(batch.output_file_id) == ["line-0", "line-1"]
        assert process.lines.running == 0
        # Its slots are free again.
        process.lines.script = at_once
        await process.until(await process.begin(20), BatchStatus.COMPLETED)


async def test_a_window_that_ends(tmp_path: Path) -> None:
    async def first(line: Line) -> bool:
        if line.number > 1:
            await asyncio.Event().wait()
        return True

    async with running(Process(tmp_path, Lines(first))) as process:
        batch = await process.begin(3)
        async with asyncio.timeout(DEADLINE_S):
            while process.lines.running < 2 or not process.lines.ran:
                await asyncio.sleep(0.005)
        process.now = 4600.0
        batch = await process.until(batch, BatchStatus.EXPIRED)
        assert (batch.completed, batch.failed, batch.expired_at) == (1, 2, 4600)
        assert batch.error_file_id is not None
        path = path_of(
            process.store, await process.store.ask(Database.file, batch.error_file_id, "acme")
        )
        records = [json.loads(row) for row in path.read_text().splitlines()]
        assert [record["error"]["code"] for record in records] == ["batch_expired"] * 2
        assert [record["response"] for record in records] == [None, None]


async def test_batches_of_another_model_are_left_alone_until_they_expire(tmp_path: Path) -> None:
    async with running(Process(tmp_path, model="other")) as process:
        batch = await process.begin(2)
        await asyncio.sleep(0.05)
        assert (await process.store.ask(Database.batch, batch.id)).owner == ""
        process.now = 5000.0
        assert (await process.until(batch, BatchStatus.EXPIRED)).failed_at is None


async def test_a_tenant_with_many_batches_leaves_room(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def wait(line: Line) -> bool:
        await gate.wait()
        return True

    async with running(Process(tmp_path, Lines(wait), most=100)) as process:
        many = [await process.begin(1) for _ in range(9)]
        late = await process.begin(1, tenant="other")
        await process.until(late, BatchStatus.IN_PROGRESS)
        now = [await process.store.ask(Database.batch, batch.id) for batch in many]
        assert sum(batch.status is BatchStatus.IN_PROGRESS for batch in now) == 4
        gate.set()
        for batch in [*many, late]:
            await process.until(batch, BatchStatus.COMPLETED)


async def test_a_line_that_raises_gets_an_error_and_the_other_lines_go_on(
    tmp_path: Path,
) -> None:
    begun: Counter[str] = Counter()

    async def one_has_a_bug(line: Line) -> bool:
        begun[line.custom_id] += 1
        if line.custom_id == "line-3":
            raise KeyError("what the prompt says")
        if line.custom_id == "line-4":
            raise Unavailable("no worker is ready")
        await asyncio.sleep(0.05)
        return True

    async with running(Process(tmp_path, Lines(one_has_a_bug))) as process:
        batch = await process.until(await process.begin(12), BatchStatus.COMPLETED)
        assert (batch.completed, batch.failed) == (10, 2)
        assert set(begun.values()) == {1}
        assert batch.error_file_id is not None
        file = await process.store.ask(Database.file, batch.error_file_id, "acme")
        async with process.store.reading(file) as rows:
            bug, busy = (json.loads(row) for row in rows)
        assert bug["custom_id"] == "line-3"
        assert bug["response"]["status_code"] == 500
        assert bug["response"]["body"]["error"]["message"] == "internal error: KeyError"
        assert "what the prompt says" not in json.dumps(bug)
        assert (busy["custom_id"], busy["response"]["status_code"]) == ("line-4", 503)


async def test_a_store_that_fails_does_not_lose_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.runner._REST_S", 0.05)
    async with running(Process(tmp_path)) as process:
        add_results, broken = process.store.add_results, iter([True])

        async def once(held: Batch, results: Sequence[LineResult]) -> None:
            if next(broken, False):
                raise OSError("the disk is full")
            await add_results(held, results)

        monkeypatch.setattr(process.store, "add_results", once)
        batch = await process.until(await process.begin(5), BatchStatus.COMPLETED)
        assert batch.completed == 5


async def test_a_look_that_fails_does_not_stop_all_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(Process(tmp_path)) as process:
        collect, broken = process.store.collect, iter([True])

        async def once() -> None:
            if next(broken, False):
                raise KeyError("a column of another version")
            await collect()

        monkeypatch.setattr(process.store, "collect", once)
        batch = await process.until(await process.begin(2), BatchStatus.COMPLETED)
        assert batch.completed == 2
        assert not next(broken, False), "a look failed"
