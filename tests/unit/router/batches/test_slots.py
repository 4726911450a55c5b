"""Which lines run first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from router.batches.slots import BatchHeld, LineSlots
from router.batches.storage.batch import Batch

URL = "/v1/completions"


def batch_of(name: str, tenant: str = "acme", expires_at: int = 5000) -> Batch:
    return Batch(name, tenant, "", "tiny", URL, "file", "1h", 1000, expires_at, {})


class Runs:
    """Lines that hold a slot until they are let go, one after the other."""

    def __init__(self, slots: LineSlots) -> None:
        self.slots = slots
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.gate = asyncio.Semaphore(0)

    async def begin(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self.tasks.append(asyncio.create_task(self._run(batch)))
            await asyncio.sleep(0)

    async def _run(self, batch: Batch) -> None:
        async with self.slots.slot(batch):
            self.order.append(batch.id)
            await self.gate.acquire()

    async def end(self) -> None:
        for _ in self.tasks:
            self.gate.release()
            await asyncio.sleep(0.001)
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_the_earliest_deadline_comes_first() -> None:
    runs = Runs(LineSlots(1, {}))
    late, soon = batch_of("late", expires_at=9000), batch_of("soon", expires_at=2000)
    await runs.begin([late, late, late, soon, soon])
    await runs.end()
    assert runs.order == ["late", "soon", "soon", "late", "late"]


async def test_tenants_share_slots_by_weight() -> None:
    runs = Runs(LineSlots(3, {"heavy": 2.0}))
    light, heavy = batch_of("light", "light", 1), batch_of("heavy", "heavy", 9000)
    await runs.begin([*[light] * 9, *[heavy] * 6])
    # All slots are taken; of the next ones two in three go to the heavier tenant.
    await runs.end()
    assert runs.order[:3] == ["light"] * 3
    assert runs.order[3:12].count("heavy") == 6


async def test_a_held_batch_leaves_the_queue() -> None:
    slots = LineSlots(1, {})
    runs = Runs(slots)
    one, other = batch_of("one"), batch_of("other")
    await runs.begin([one, one, other])
    slots.hold("one")
    await asyncio.sleep(0)
    with pytest.raises(BatchHeld):
        await runs.tasks[1]
    with pytest.raises(BatchHeld):
        async with slots.slot(one):
            pass
    await runs.end()
    # The line that ran has ended, and the other batch had its turn.
    assert runs.order == ["one", "other"]
    slots.resume("one")
    async with slots.slot(one):
        pass


async def test_a_cancelled_line_gives_its_place_to_the_next() -> None:
    slots = LineSlots(1, {})
    runs = Runs(slots)
    await runs.begin([batch_of("a"), batch_of("b"), batch_of("c")])
    # The place of the first comes to the second in the moment in which that one is cancelled.
    runs.gate.release()
    runs.tasks[0].cancel()
    runs.tasks[1].cancel()
    await runs.end()
    assert runs.order == ["a", "c"]
