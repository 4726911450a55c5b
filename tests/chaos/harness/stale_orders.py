"""Run in a process of its own: ``python -m tests.chaos.harness.stale_orders CLUSTER EPOCH``.

It orders all workers of a cluster to drain, and the supervisor to stop, with an epoch that is
over, as a launcher or supervisor does that stood still. It prints a ``StaleOrders`` as JSON.
Ray's address is in ``RAY_ADDRESS``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass

from deploy.processes.leadership import StaleOrderError
from deploy.supervisor.supervisor_actor import RaySupervisor
from deploy.workers.ray_worker import RayWorker, find_all, namespace

_LEARN_S = 15.0
_LOOK_S = 0.2
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class StaleOrders:
    """What came of the orders."""

    lowest: int
    """The lowest of the workers' highest epochs."""
    refused: list[str]
    """Who refused."""
    obeyed: list[str]
    """Who did not, and what happened instead."""


async def _give(cluster_id: str, epoch: int) -> StaleOrders:
    import ray  # noqa: PLC0415 - who imports this module for its class needs no Ray

    ray.init(
        address="auto",
        namespace=namespace(cluster_id),
        log_to_driver=False,
        configure_logging=False,
    )
    workers, supervisor = find_all(), RaySupervisor.find()
    highest = await asyncio.gather(*(_learned(worker, epoch) for worker in workers))
    orders = {worker.slot: worker.drain(1.0, epoch) for worker in workers}
    if supervisor is not None:
        orders["supervisor"] = supervisor.stop(_ANSWER_S, epoch)
    refused, obeyed = [], []
    for name, order in orders.items():
        instead = await _instead(order)
        if instead:
            obeyed.append(f"{name}: {instead}")
        else:
            refused.append(name)
    return StaleOrders(min(highest, default=0), refused, obeyed)


async def _learned(worker: RayWorker, epoch: int) -> int:
    """The highest epoch that a worker has seen, once that is another one than ``epoch``."""
    until = time.monotonic() + _LEARN_S
    while True:
        # From the epoch 0 a worker learns nothing.
        _, highest = await worker.ping(0.0, 0)
        if highest > epoch or time.monotonic() > until:
            return highest
        await asyncio.sleep(_LOOK_S)


async def _instead(order: Awaitable[None]) -> str:
    """What came of an order instead of the refusal; empty if it was refused."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await order
    except StaleOrderError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it obeys"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(asyncio.run(_give(sys.argv[1], int(sys.argv[2]))))) + "\n")
