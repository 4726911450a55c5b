"""What a worker process watches over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from engine.block_pool import BlockPool
from worker.process import WorkerProcess
from worker.role import WorkerContext


@pytest.mark.parametrize(
    ("runs", "moves", "loads"),
    [(False, False, False), (True, False, False), (False, True, False), (False, False, True)],
)
def test_a_leak_is_noticed_once_nothing_runs_nor_moves(
    runs: bool, moves: bool, loads: bool
) -> None:
    pool = BlockPool(4)
    context = SimpleNamespace(
        engine=SimpleNamespace(pool=pool),
        control=SimpleNamespace(scheduler=SimpleNamespace(is_idle=lambda: not runs)),
        exchange=SimpleNamespace(is_idle=lambda: not moves),
        tiers=SimpleNamespace(is_idle=not loads),
    )
    process = WorkerProcess.__new__(WorkerProcess)
    process._check_integrity(cast(WorkerContext, context))
    pool.allocate(1)
    if runs or moves or loads:
        process._check_integrity(cast(WorkerContext, context))
        return
    with pytest.raises(AssertionError, match="leaked"):
        process._check_integrity(cast(WorkerContext, context))
