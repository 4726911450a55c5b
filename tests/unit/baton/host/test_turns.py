"""Turns are shared among tenants, and every wait ends."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import Overloaded
from baton.host.turns import FairTurns


class Work:
    """Pieces of work that hold turns until the test ends them."""

    def __init__(self, turns: FairTurns) -> None:
        self._turns = turns
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, *names: str) -> None:
        """Start work; a name's first letter is its tenant."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name))
        await settle()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settle()

    async def _run(self, name: str) -> None:
        async with self._turns.turn(name[0]):
            self.begun.append(name)
            await self.ends[name].wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_tenants_take_turns() -> None:
    work = Work(FairTurns("bodies", 2))
    await work.start("a1", "a2", "a3", "b1", "b2", "c1")
    assert work.begun == ["a1", "b1"]
    await work.end("a1")
    await work.end("b1")
    assert work.begun == ["a1", "b1", "a2", "b2"]
    await work.end("a2")
    await work.end("b2")
    assert work.begun == ["a1", "b1", "a2", "b2", "c1", "a3"]


async def test_a_tenant_leaves_a_turn_to_others() -> None:
    work = Work(FairTurns("bodies", 3))
    await work.start("a1", "a2", "a3", "a4")
    assert work.begun == ["a1", "a2"]
    await work.start("b1")
    assert work.begun == ["a1", "a2", "b1"]
    await work.end("b1")
    assert work.begun == ["a1", "a2", "b1"]
    await work.end("a1")
    assert work.begun == ["a1", "a2", "b1", "a3"]


async def test_a_tenant_that_has_too_much_waiting_is_refused() -> None:
    turns = FairTurns("bodies", 2, max_waiting=2)
    work = Work(turns)
    await work.start("a1", "a2", "a3")
    with pytest.raises(Overloaded, match="2 bodies of this tenant are already waiting") as found:
        async with turns.turn("a"):
            pass
    assert found.value.retry_after == 1.0
    await work.start("b1")
    assert work.begun == ["a1", "b1"]


async def test_a_wait_has_an_end() -> None:
    turns = FairTurns("bodies", 2, max_wait_s=0.01)
    work = Work(turns)
    await work.start("a1")
    with pytest.raises(Overloaded, match=r"took all turns for 0\.01 s"):
        async with turns.turn("a"):
            pass
    # It waits no more.
    await work.end("a1")
    await work.start("a2")
    assert work.begun == ["a1", "a2"]


async def test_cancelled_waits_take_no_turn() -> None:
    work = Work(FairTurns("bodies", 2))
    await work.start("a1", "a2", "a3")
    # Both are cancelled before they run again: the first while it waits, the second with a turn.
    work.tasks["a2"].cancel()
    work.ends["a1"].set()
    await settle()
    assert work.begun == ["a1", "a3"]
    await work.start("a4", "a5")
    work.ends["a3"].set()
    await asyncio.sleep(0)
    work.tasks["a4"].cancel()
    await settle()
    assert work.begun == ["a1", "a3", "a5"]


async def test_a_failure_gives_its_turn_back() -> None:
    turns = FairTurns("bodies", 2)
    for _ in range(5):
        with pytest.raises(ValueError, match="no"):
            async with turns.turn("a"):
                raise ValueError("no")
    work = Work(turns)
    await work.start("a1", "b1")
    assert work.begun == ["a1", "b1"]
