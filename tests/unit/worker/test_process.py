"""What a worker process watches over."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from baton.errors import WorkerFailed
from engine.block_pool import BlockPool
from engine.parallel.ranks import LeadRank
from worker.process import WorkerProcess
from worker.role import WorkerContext
from worker.settings import WorkerSettings


def watching(pool: BlockPool, **busy: bool) -> tuple[WorkerProcess, WorkerContext]:
    """A process that looks after a pool alone; ``busy``: runs, moves, loads."""
    context = SimpleNamespace(
        engine=SimpleNamespace(pool=pool),
        control=SimpleNamespace(scheduler=SimpleNamespace(is_idle=lambda: not busy.get("runs"))),
        exchange=SimpleNamespace(is_idle=lambda: not busy.get("moves")),
        tiers=SimpleNamespace(is_idle=not busy.get("loads")),
    )
    process = WorkerProcess.__new__(WorkerProcess)
    process._next_check_at = 0.0
    return process, cast(WorkerContext, context)


@pytest.mark.parametrize("busy", [None, "runs", "moves", "loads"])
def test_a_leak_is_noticed_once_nothing_runs_nor_moves(busy: str | None) -> None:
    pool = BlockPool(4)
    process, context = watching(pool, **({busy: True} if busy else {}))
    process._check_integrity(context)
    pool.allocate(1)
    process._next_check_at = 0.0
    if busy:
        process._check_integrity(context)
        return
    with pytest.raises(AssertionError, match="leaked"):
        process._check_integrity(context)


def test_looking_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    looks: list[float] = []

    class LargePool(BlockPool):
        def check(self) -> None:
            looks.append(now[0])
            now[0] += 0.3

    monkeypatch.setattr("worker.process.time", SimpleNamespace(monotonic=lambda: now[0]))
    process, context = watching(LargePool(4))
    for _ in range(60):
        process._check_integrity(context)
        now[0] += 1.0
    assert looks == pytest.approx([1000.0, 1030.3])


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
async def test_a_lost_rank_ends_a_worker_on_gpus_at_once(device: str) -> None:
    """On the thread that has noticed. On CPUs it stops in order: ``run`` raises why."""
    reasons: list[str] = []
    process = WorkerProcess.__new__(WorkerProcess)
    process._fail, process._tasks, process._stopped = reasons.append, [], asyncio.Event()
    process.settings = cast(WorkerSettings, SimpleNamespace(slot="decode-0"))
    lost: Future[str] = Future()
    process._mind_ranks(cast(LeadRank, SimpleNamespace(lost=lost)), torch.device(device))
    assert not reasons
    lost.set_result("rank 1 has ended\nand more")
    if device == "cpu":
        with pytest.raises(WorkerFailed, match="rank 1 has ended"):
            await process.run()
        assert not reasons
    else:
        assert reasons == ["worker decode-0 ends: rank 1 has ended"]
