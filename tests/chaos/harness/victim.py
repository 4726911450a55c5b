"""The victim of a fault: a process with a stream at this moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

import httpx
import psutil

from tests.chaos.faults.kinds import Target
from tests.chaos.harness.cluster import Cluster, Worker, is_alive, series
from tests.chaos.load.call import Call
from tests.chaos.load.load import Load

_LOOK_S = 0.01
_PATIENCE_S = 90.0
_BUSY_S = 3.0


class NobodyToStrike(Exception):
    """No stream has run on any possible victim for a long time."""


@dataclass(frozen=True, slots=True)
class Victim:
    """``name`` and ``pid`` of a process; of the store or the whole cluster neither."""

    name: str
    streams: int
    """Sequences that ran on it when it was chosen, or streams of the clients."""
    pid: int = 0
    worker: Worker | None = None


async def find_victim(cluster: Cluster, load: Load, target: Target, pick: int) -> Victim:
    """Wait until a process has a stream, and return it. Raises NobodyToStrike."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            while not (found := await _candidates(cluster, load, target)):
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise NobodyToStrike(f"no stream runs on any {target}") from None
    return found[pick % len(found)]


async def is_busy(cluster: Cluster, load: Load, target: Target, victim: Victim) -> bool:
    """Whether a stream runs on the victim, now or within a few seconds."""
    until = time.monotonic() + _BUSY_S
    while time.monotonic() < until:
        if victim.name in {one.name for one in await _candidates(cluster, load, target)}:
            return True
        await asyncio.sleep(_LOOK_S)
    return False


async def _candidates(cluster: Cluster, load: Load, target: Target) -> list[Victim]:
    running = [call for call in load.calls if call.runs]
    if target == "router":
        return _routers(cluster, running)
    if target in ("store", "cluster"):
        return [Victim(target, len(running))] if running else []
    workers = [one for one in await cluster.workers() if one.role == target]
    counts = [await _sequences(cluster, worker) for worker in workers]
    return [
        Victim(worker.slot, count, worker.pid, worker)
        for worker, count in zip(workers, counts, strict=True)
        if count
    ]


async def _sequences(cluster: Cluster, worker: Worker) -> int:
    try:
        page = await cluster.page(worker.record.metrics_address)
    except httpx.HTTPError:
        return 0
    return int(series(page, "baton_sequences", state="running"))


def _routers(cluster: Cluster, running: Iterable[Call]) -> list[Victim]:
    ports = {call.own_port for call in running if call.way == "http"}
    found = []
    for name, pid in sorted(cluster.pids().items()):
        if name.startswith("router") and is_alive(pid):
            try:
                connections = psutil.Process(pid).net_connections("tcp")
            except psutil.Error:
                continue  # it has ended since
            count = sum(bool(one.raddr) and one.raddr.port in ports for one in connections)
            if count:
                found.append(Victim(name, count, pid))
    return found
