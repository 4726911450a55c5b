"""An engine that stands still for as long as a test likes, while its worker's event loop beats."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.scheduling.plan import StepPlan, StepResult
from tests.support.mini_cluster import DEADLINE_S, MiniCluster


@contextmanager
def standing_engine(
    cluster: MiniCluster, slot: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The engine thread of a worker waits in its next step, until this ends."""
    context = cluster.workers[slot].context
    assert context is not None
    runner, goes_on = context.engine.runner, threading.Event()
    run = runner.run

    def wait_and_run(plan: StepPlan) -> StepResult:
        assert goes_on.wait(DEADLINE_S)
        return run(plan)

    monkeypatch.setattr(runner, "run", wait_and_run)
    try:
        yield
    finally:
        goes_on.set()
