"""`baton join` and `baton leave`: make this machine a node of a Ray cluster that runs workers.

    joining → serving ─SIGTERM→ leaving (workers drain) → ended
    joining, serving ─SIGINT, or its node manager dies→ ended
    leaving ─another signal→ ended

When the node leaves, Ray places no more workers here, and each worker gets SIGTERM. Such a worker
accepts no new requests, and ends when its requests have ended or moved, within the
``drain_deadline_s`` of its cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Mapping

from baton.errors import BatonError
from baton.telemetry.logs import Service
from deploy.launcher.guardian import Guardian, sweep
from deploy.launcher.part_watch import PartWatch
from deploy.processes.foreground import StopSignals, first_leaf, own_log_file
from deploy.processes.progress import Progress
from deploy.processes.run_directory import PREFIX, ClusterMark, RunDirectory, parent_directory
from deploy.processes.run_history import start_run
from deploy.ray.joined_ray import RayNode, refuse_work
from deploy.workers.actor_process import end_other
from deploy.workers.node import PLACES_VARIABLE, NodeWorker, NodeWorkers
from deploy.workers.ranks import WORKER_RESOURCE

ENDING_S = 20.0
"""Time after the drain's deadline within which a worker may end, in seconds."""
_POLL_S = 0.1

log = logging.getLogger(__name__)


def node_workers() -> list[NodeWorkers]:
    """Return the worker lists of all nodes of this user on this machine; a container has one."""
    nodes = []
    for path in parent_directory().glob(f"{PREFIX}*/"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                nodes.append(NodeWorkers(RunDirectory(path).workers))
    return nodes


def workers_by_cluster(nodes: Collection[NodeWorkers]) -> dict[str, list[str]]:
    """Return the slots of the running workers, by the id of their cluster."""
    found: dict[str, list[str]] = {}
    for worker in (worker for node in nodes for worker in node.running()):
        found.setdefault(worker.cluster or "unknown", []).append(worker.slot)
    return {cluster: sorted(slots) for cluster, slots in sorted(found.items())}


async def leave(
    nodes: Collection[NodeWorkers], tell: Callable[[str], None], deadline_s: float | None = None
) -> bool:
    """Make all workers on the nodes leave, and wait for them. Returns whether all left without
    being killed.

    Workers that remain after ``deadline_s`` seconds are killed. None means the deadline in each
    cluster's configuration.
    """
    began = time.monotonic()
    asked: set[NodeWorker] = set()
    refused: set[str] = set()
    longest_s = 0.0
    while True:
        workers = [worker for node in nodes for worker in node.running()]
        if not workers:
            return True
        # This includes workers that were placed before Ray knew that the node leaves.
        for worker in workers:
            if worker in asked:
                continue
            longest_s = max(longest_s, worker.drain_s)
            if worker.node not in refused:
                refused.add(worker.node)
                await _refuse(worker, longest_s + ENDING_S, tell)
            asked.add(worker)
            tell(f"{worker.slot} is draining")
            with contextlib.suppress(OSError):
                worker.process.send(signal.SIGTERM)
        allowed_s = longest_s + ENDING_S if deadline_s is None else deadline_s
        if time.monotonic() - began > allowed_s:
            for worker in workers:
                tell(f"{worker.slot} has not left within {allowed_s:.0f} s, and is killed")
                end_other(worker.process)
            return False
        await asyncio.sleep(_POLL_S)


async def _refuse(worker: NodeWorker, for_s: float, tell: Callable[[str], None]) -> None:
    if not worker.node:
        return
    try:
        await asyncio.to_thread(refuse_work, worker.gcs, worker.node, for_s)
    except BatonError as error:
        # Workers that Ray still places here must leave as well.
        tell(error.message)


def run_node(
    address: str,
    places: int,
    cpus: int,
    gpus: int,
    resources: Mapping[str, float],
    port: int,
    progress: Progress,
) -> int:
    """Run this machine as a node of a Ray cluster until SIGINT, SIGTERM or SIGHUP, or a failure.
    Returns the exit code: 0, or 1."""

    async def run() -> int:
        return await NodeAgent(address, places, cpus, gpus, resources, port, progress).run()

    return asyncio.run(run())


class NodeAgent:
    """One session of this machine as a node of a Ray cluster. Owned by one event loop."""

    def __init__(
        self,
        address: str,
        places: int,
        cpus: int,
        gpus: int,
        resources: Mapping[str, float],
        port: int,
        progress: Progress,
    ) -> None:
        """``resources`` are Ray resources that the node offers in addition to ``places``. ``port``
        is the port of the node manager; 0 takes any."""
        self._address = address
        self._places = places
        self._cpus, self._gpus = cpus, gpus
        self._port = port
        self._resources = {WORKER_RESOURCE: float(places), **resources}
        self._progress = progress
        self._signals = StopSignals()

    async def run(self) -> int:
        """Join the Ray cluster, run its workers until a signal, and leave; returns the exit
        code."""
        name = f"node-{secrets.token_hex(6)}"
        try:
            run = start_run(name, "")
        except BatonError as error:
            self._progress.line(f"error: {error.message}", "red")
            return 1
        mark = ClusterMark(name, run.path)
        os.environ.update({**mark.variables, PLACES_VARIABLE: str(self._places)})
        to_stdout = self._progress.is_logged
        log_file = None if to_stdout else own_log_file(run, "node", "text", Service.NODE, "node")
        guardian, node = Guardian(mark, run), RayNode(self._address, mark, to_stdout=to_stdout)
        failure = await self._serve(guardian, node, run)
        if failure is not None:
            self._progress.line(f"error: {failure}", "red")
        elif self._signals.drains:
            await self._leave(NodeWorkers(run.workers))
        self._progress.line("ending ...")
        await node.stop()
        spare = {os.getpid(), guardian.pid} if guardian.started else {os.getpid()}
        await asyncio.to_thread(sweep, mark, spare)
        await guardian.release()
        if log_file is not None:
            log_file.close()
        if run.keep_logs() and failure is not None:
            self._progress.line(f"logs are kept in {run.logs}")
        return 0 if failure is None else 1

    async def _serve(self, guardian: Guardian, node: RayNode, run: RunDirectory) -> str | None:
        """Stay in the Ray cluster until a signal. Returns the error that ended the session, or
        None."""
        stopped = asyncio.create_task(self._signals.stop.wait())
        works = asyncio.create_task(self._work(guardian, node, run))
        await asyncio.wait({stopped, works}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not works.done():
            works.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await works
            return None
        error = first_leaf(works.exception())
        log.error("stopping this node", exc_info=error)
        return error.message if isinstance(error, BatonError) else repr(error)

    async def _work(self, guardian: Guardian, node: RayNode, run: RunDirectory) -> None:
        """Join the Ray cluster and stay. Raises BatonError when the node is lost."""
        await guardian.start()
        with self._progress.step(f"joining Ray at {self._address}"):
            await node.start(self._resources, self._cpus, self._gpus, self._port)
        # Ray has replaced our handlers.
        self._signals.take()
        watch = PartWatch(lambda text: self._progress.line(text, "yellow"), lambda name, pid: None)
        workers = "worker" if self._places == 1 else "workers"
        self._progress.line(
            f"ready: {node.host} has room for {self._places} {workers}", "bold green"
        )
        if not self._progress.is_logged:
            self._progress.line(f"  logs     {run.logs}")
        self._progress.line(
            "  Ctrl-C stops everything that runs here; SIGTERM lets workers drain first."
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.keep("guardian", guardian))
            raise BatonError(f"{await node.lost()} has died: this node has left the cluster")

    async def _leave(self, roll: NodeWorkers) -> None:
        self._progress.line("leaving ...")
        leaving = asyncio.create_task(leave([roll], self._progress.line))
        hurry = asyncio.create_task(self._signals.hurry.wait())
        await asyncio.wait({leaving, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, hurry):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await leaving
