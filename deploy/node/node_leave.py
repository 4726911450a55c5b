"""The workers of this node leave: Ray places no others here, and each gets SIGTERM.

A worker that gets it takes nothing more, and ends once what it runs has ended or moved, within the
``drain_deadline_s`` of its cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection

from baton.errors import BatonError
from deploy.processes.run_directory import PREFIX, RunDirectory, parent_directory
from deploy.ray.ray_node import refuse_work
from deploy.workers.actor_process import end_other
from deploy.workers.node_roll import NodeRoll, NodeWorker

ENDING_S = 20.0
"""How much later than its drain's deadline a worker may end."""
_POLL_S = 0.1


def node_rolls() -> list[NodeRoll]:
    """Of all nodes that this user's workers are on here: in a container there is one."""
    rolls = []
    for path in parent_directory().glob(f"{PREFIX}*/"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                rolls.append(NodeRoll(RunDirectory(path).workers))
    return rolls


def workers_by_cluster(rolls: Collection[NodeRoll]) -> dict[str, list[str]]:
    """The slots of the workers that live, by the id of their cluster."""
    found: dict[str, list[str]] = {}
    for worker in (worker for roll in rolls for worker in roll.living()):
        found.setdefault(worker.cluster or "unknown", []).append(worker.slot)
    return {cluster: sorted(slots) for cluster, slots in sorted(found.items())}


async def leave(
    rolls: Collection[NodeRoll], tell: Callable[[str], None], deadline_s: float | None = None
) -> bool:
    """Returns once no worker is left; whether all left by themselves.

    ``deadline_s``: after so many seconds those that are left are ended; None waits for as long as
    their clusters let them.
    """
    began = time.monotonic()
    asked: set[NodeWorker] = set()
    refused: set[str] = set()
    longest_s = 0.0
    while True:
        workers = [worker for roll in rolls for worker in roll.living()]
        if not workers:
            return True
        # Also those that came while Ray did not know yet.
        for worker in workers:
            if worker in asked:
                continue
            longest_s = max(longest_s, worker.drain_s)
            if worker.node not in refused:
                refused.add(worker.node)
                await _refuse(worker, longest_s + ENDING_S, tell)
            asked.add(worker)
            tell(f"{worker.slot} is told to leave")
            with contextlib.suppress(OSError):
                worker.process.send(signal.SIGTERM)
        allowed_s = longest_s + ENDING_S if deadline_s is None else deadline_s
        if time.monotonic() - began > allowed_s:
            for worker in workers:
                tell(f"{worker.slot} has not left within {allowed_s:.0f} s, and is ended")
                end_other(worker.process)
            return False
        await asyncio.sleep(_POLL_S)


async def _refuse(worker: NodeWorker, for_s: float, tell: Callable[[str], None]) -> None:
    if not worker.node:
        return
    try:
        await asyncio.to_thread(refuse_work, worker.gcs, worker.node, for_s)
    except BatonError as error:
        # What comes after them is told to leave as well.
        tell(error.message)
