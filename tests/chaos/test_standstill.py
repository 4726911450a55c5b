"""A whole host that stands still, and how its recovery is counted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.chaos import run as running
from tests.chaos.faults.fault import Fault
from tests.chaos.faults.faults import FAULTS
from tests.chaos.faults.kinds import Kind
from tests.chaos.faults.signal_faults import HostStopped
from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.victim import Victim
from tests.chaos.load.reference import Reference
from tests.chaos.run import Run
from tests.chaos.schedule import Round, Strike

DEADLINE_S = 60.0
LAUNCHER = """
import os, subprocess, sys
marked = os.environ | {"BATON_CLUSTER_ID": sys.argv[1]}
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], env=marked)
print(child.pid, flush=True)
sys.stdin.read()
"""
"""As the real one it does not carry the mark itself."""
ALL = Victim("cluster", 1)


class FakeUp:
    """A launcher with a child, as processes; ends them as ``UpProcess`` does."""

    def __init__(self, cluster_id: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, cluster_id],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())
        self.was_stopped_at_exit: list[bool] = []

    def __exit__(self, *_: object) -> None:
        self.was_stopped_at_exit = [is_stopped(pid) for pid in (self.process.pid, self.child)]
        self.process.send_signal(signal.SIGTERM)
        with self.process:
            self.process.wait(DEADLINE_S)


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


async def until_all(pids: Iterable[int], *, stopped: bool) -> None:
    """The signal takes a moment."""
    async with asyncio.timeout(DEADLINE_S):
        while not all(is_stopped(pid) is stopped for pid in pids):
            await asyncio.sleep(0.01)


async def test_all_of_the_host_stands_still_and_goes_on_even_where_the_run_ends_midway() -> None:
    cluster_id = f"standstill-{os.getpid()}"
    up = FakeUp(cluster_id)
    cluster = Cluster()
    cluster._cluster_id = cluster_id
    cluster._up = up  # type: ignore[assignment]
    await cluster.store.start()
    await cluster.wire.start()
    pids = [up.process.pid, up.child, *cluster.store.pids]
    try:
        fault = HostStopped(cluster, ALL)
        await fault.strike()
        await until_all(pids, stopped=True)
        await fault.heal()
        await until_all(pids, stopped=False)
        await fault.strike()
        await until_all(pids, stopped=True)
    finally:
        await cluster.__aexit__(None, None, None)
    assert up.was_stopped_at_exit == [False, False]


class Healed(Fault):
    """Notes when it was healed."""

    at = 0.0

    async def strike(self) -> None:
        pass

    async def heal(self) -> None:
        self.at = time.monotonic()


@pytest.mark.parametrize("is_standstill", [True, False])
async def test_recovery_from_a_standstill_is_counted_from_its_end(
    monkeypatch: pytest.MonkeyPatch, is_standstill: bool
) -> None:
    kind = Kind("stopped", "cluster", 0.05, 0.05, is_standstill=is_standstill)
    since: list[float] = []
    cluster: Any = SimpleNamespace(pids=dict)
    fault = Healed(cluster, ALL)

    async def find(*_: object) -> Victim:
        return ALL

    async def is_busy(*_: object) -> bool:
        return True

    async def until(_: object, begin: float, *__: object, **___: object) -> float:
        since.append(begin)
        return 0.0

    async def nothing(*_: object) -> list[str]:
        return []

    async def pause() -> None:
        pass

    monkeypatch.setitem(FAULTS, "stopped", lambda *_: fault)
    monkeypatch.setattr(running, "find_victim", find)
    monkeypatch.setattr(running, "is_busy", is_busy)
    monkeypatch.setattr(running, "leaks", nothing)
    for name in ("until_streams_run", "until_answered", "until_whole"):
        monkeypatch.setattr(running, name, until)
    load: Any = SimpleNamespace(pause=pause, resume=lambda: None)
    run = Run(cluster, 0, [kind], [], Reference({}))
    await run._round(Round((Strike(kind, 0.05, 0),)), load, None)  # type: ignore[arg-type]
    assert len(since) == 3
    assert all((begin >= fault.at) is is_standstill for begin in since)
    assert [one.kinds for one in run.reports] == [("stopped",)]
