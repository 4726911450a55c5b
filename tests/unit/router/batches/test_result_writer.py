"""Results of a batch that are stored together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from baton.errors import Unavailable
from router.batches import result_writer
from router.batches.result_writer import MAX_GATHERED, ResultWriter
from router.batches.storage.batch import Batch, LineResult
from router.batches.storage.database import LeaseLost, NoSpace
from router.batches.storage.store import BatchStore

BATCH = Batch("batch_1", "acme", "", "tiny", "/v1/completions", "file-1", "1h", 1, 2, {})


class Store:
    """Stores results, or raises what a test says."""

    def __init__(self, gather_s: float, room: int = 1000, errors: Sequence[Exception] = ()) -> None:
        self.gather_s = gather_s
        self.room = room
        self.errors = list(errors)
        self.stored: list[list[int]] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def add_results(self, held: Batch, results: Sequence[LineResult]) -> None:
        await self.goes_on.wait()
        if self.errors:
            raise self.errors.pop(0)
        if sum(map(len, self.stored)) + len(results) > self.room:
            raise NoSpace(held.id)
        self.stored.append([one.number for one in results])


class Written:
    def __init__(self, store: Store) -> None:
        self.counted: list[int] = []
        self.writer = ResultWriter(
            cast(BatchStore, store), BATCH, lambda one: self.counted.append(one.number)
        )

    async def add(self, numbers: Sequence[int]) -> None:
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                await self.writer.add(LineResult(number, True, "{}"), group)


async def test_without_gathering_each_result_is_stored_before_its_line_ends() -> None:
    store = Store(0.0)
    await Written(store).add([1, 2, 3])
    assert store.stored == [[1], [2], [3]]


async def test_results_of_a_while_are_stored_together() -> None:
    store = Store(0.01)
    written = Written(store)
    await written.add([1, 2, 3])
    assert store.stored == [[1, 2, 3]]
    assert written.counted == [1, 2, 3]
    await written.add([4])
    assert store.stored == [[1, 2, 3], [4]]


async def test_enough_results_are_stored_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(3600.0)
    written = Written(store)
    async with asyncio.TaskGroup() as group:
        for number in range(MAX_GATHERED):
            await written.writer.add(LineResult(number, True, "{}"), group)
        assert store.stored == [list(range(MAX_GATHERED))]
        monkeypatch.setattr(result_writer, "MAX_GATHERED_BYTES", 5)
        for number in (1, 2):
            await written.writer.add(LineResult(number, True, "{}"), group)
        assert store.stored[1:] == [[1, 2]]
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


async def test_results_that_fit_are_stored_when_room_ends() -> None:
    store = Store(0.01, room=5)
    written = Written(store)
    with pytest.raises(ExceptionGroup) as caught:
        await written.add(range(8))
    assert isinstance(caught.value.exceptions[0], NoSpace)
    assert sorted(written.counted) == [0, 1, 2, 3, 4]


async def test_a_store_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_writer, "_PAUSE_S", 0.0)
    store = Store(0.01, errors=[Unavailable("away")] * 3)
    written = Written(store)
    await written.add([1, 2])
    assert store.stored == [[1, 2]]
    monkeypatch.setattr(result_writer, "PATIENCE_S", 0.0)
    store = Store(0.01, errors=[Unavailable("away")] * 3)
    with pytest.raises(ExceptionGroup) as caught:
        await Written(store).add([1, 2])
    assert isinstance(caught.value.exceptions[0], Unavailable)


async def test_what_has_ended_is_stored_when_the_batch_is_stopped() -> None:
    store = Store(3600.0)
    store.goes_on.clear()
    written = Written(store)

    async def run() -> None:
        try:
            await written.add([1, 2])
        except asyncio.CancelledError:
            await written.writer.end()
            raise

    task = asyncio.create_task(run())
    for _ in range(5):
        await asyncio.sleep(0)
    for _ in range(3):
        # It is cancelled again and again until it ends.
        task.cancel()
        await asyncio.sleep(0)
    store.goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.stored == [[1, 2]]


async def test_a_former_owner_stops_at_once() -> None:
    store = Store(0.01, errors=[LeaseLost("batch_1")])
    with pytest.raises(ExceptionGroup) as caught:
        await Written(store).add([1])
    assert isinstance(caught.value.exceptions[0], LeaseLost)
    assert store.stored == []
