"""Workers as Ray actors: placed, found by the name of their slot, called, and ended.

Each cluster has a Ray namespace for these names.

The actors are detached: they outlive the launcher or supervisor that placed them. Ray restarts none
of them; the supervisor replaces them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

from baton.errors import WorkerFailed
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.process_identity import Whereabouts
from deploy.ray_internals import is_unplaced
from deploy.workers.actor_process import end_other, is_failure, reason
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.ranks import (
    WORKER_RESOURCE,
    in_place,
    remove_places,
    request_places,
)
from deploy.workers.worker_actor import PingReply, WorkerActor

SUPERVISOR_NAME = "supervisor"
# Calls of ready, ping and stop must not wait for one another.
_CONCURRENT_CALLS = 8
_END_S = 20.0


class RayWorker:
    """One incarnation of a worker, on any node."""

    def __init__(self, slot: str, handle: Any) -> None:
        self.slot = slot
        self._handle = handle

    def waits_for_node(self) -> bool:
        """Return whether Ray has found no node with room for the worker yet. Blocks while Ray's
        control store is unreachable. Raises what Ray raises."""
        return is_unplaced(self._handle)

    async def ready(self) -> dict[str, Any] | int:
        """Return the worker's registry record and its location, as ``WorkerThread.record`` does; or
        its progress (``StartProgress.count``) if it still starts a moment after Ray has placed it.

        Raises WorkerFailed with the reason if the worker failed. Raises what Ray raises if that is
        unknown, because Ray failed.
        """
        try:
            answer = cast(dict[str, Any], await result(self._handle.ready.remote()))
            return int(answer["progress"]) if "progress" in answer else answer
        except Exception as error:
            if not is_failure(error):
                raise
            raise WorkerFailed(f"worker {self.slot}: {reason(error)}") from error

    async def shared_hash(self, deadline_s: float) -> str:
        """Return the hash of what the worker must agree in with others of its cluster, even if it
        does not serve yet. Raises TimeoutError, or what Ray raises."""
        async with asyncio.timeout(deadline_s):
            return str(await result(self._handle.shared_hash.remote()))

    async def ping(self, unlisted_s: float, epoch: int) -> tuple[PingReply, int]:
        """Ping the worker's process. Return its answer, and the highest epoch that it has seen.

        ``unlisted_s`` is how long the registry has listed other workers but not this one. ``epoch``
        is that of the supervisor. Raises what Ray raises.
        """
        reply, highest = await result(self._handle.ping.remote(unlisted_s, epoch))
        return PingReply(reply), int(highest)

    async def drain(self, deadline_s: float, epoch: int) -> None:
        """Make the worker reject new requests and exit by itself. ``epoch`` is that of the order.
        Raises what Ray raises."""
        await result(self._handle.drain.remote(deadline_s, epoch))

    async def stop(self, deadline_s: float, epoch: int | None) -> None:
        """Make the worker exit in order, within ``deadline_s`` seconds. ``epoch`` is that of the
        order; None in a cluster on one machine.

        Raises TimeoutError, or what Ray raises when the worker refuses or has ended.
        """
        async with asyncio.timeout(deadline_s):
            await result(self._handle.stop.remote(epoch))

    def kill(self) -> None:
        """End the worker's process. Blocks while Ray's control store is unreachable."""
        import ray  # noqa: PLC0415

        ray.kill(self._handle)


def place(settings: ActorSettings, actor_class: type = WorkerActor) -> RayWorker:
    """Make Ray start a worker. Blocks while Ray's control store is unreachable.

    A worker of several ranks gets a placement group for all of them. Rank 0 then starts the other
    ranks. Raises ValueError if a worker runs in the slot.
    """
    import ray  # noqa: PLC0415

    pool = settings.own_pool()
    strategy: dict[str, Any] = {}
    if pool.ranks > 1:
        # The places that a dead worker has left are removed. Without places a running one ends,
        # however Ray came to say that the slot is free.
        if is_known(settings.slot):
            raise ValueError(f"a worker runs in {settings.slot}")
        remove_places(settings.slot)
        places, group = request_places(settings)
        settings = settings.model_copy(update={"places": places})
        strategy["scheduling_strategy"] = in_place(group, 0)
    asked = dict(pool.resources)
    actor: Any = ray.remote(actor_class).options(
        name=settings.slot,
        lifetime="detached",
        num_cpus=asked.pop("CPU", 0),
        num_gpus=asked.pop("GPU", 0),
        resources={WORKER_RESOURCE: 1, **asked},
        max_restarts=0,
        max_concurrency=_CONCURRENT_CALLS,
        **strategy,
    )
    return RayWorker(settings.slot, actor.remote(settings.model_dump_json()))


def namespace(cluster_id: str) -> str:
    """Return the Ray namespace of a cluster's actors. It keeps their names apart from those of
    other programs in the same Ray cluster."""
    return f"baton-{cluster_id}"


async def end_at(whereabouts: Whereabouts, submit: DaemonThread) -> None:
    """Run a Ray task on the node of a process to end that process. This also ends a process that is
    stopped (SIGSTOP).

    ``submit`` makes the call, which blocks while Ray's control store is unreachable. Raises
    TimeoutError, or what Ray raises.
    """
    import ray  # noqa: PLC0415
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    there = NodeAffinitySchedulingStrategy(whereabouts.node, soft=False)
    task: Any = ray.remote(end_other).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    async with asyncio.timeout(_END_S):
        await result(await submit.call(lambda: task.remote(whereabouts.process)))


def find(slot: str) -> RayWorker | None:
    """Return the running worker of a slot. Blocks while Ray's control store is unreachable."""
    import ray  # noqa: PLC0415

    try:
        return RayWorker(slot, ray.get_actor(slot))
    except ValueError:
        return None


def is_known(slot: str) -> bool:
    """Return whether Ray's control store knows a worker in a slot. Blocks while the control store
    is unreachable.

    The control store is queried, since this process's own view of actors may be old.
    """
    from ray.util import list_named_actors  # noqa: PLC0415

    return slot in list_named_actors()


def find_all() -> list[RayWorker]:
    """Return all running workers, in any slot. Blocks while Ray's control store is unreachable."""
    from ray.util import list_named_actors  # noqa: PLC0415

    found = (find(name) for name in list_named_actors() if name != SUPERVISOR_NAME)
    return [worker for worker in found if worker is not None]


def result(reference: Any) -> Awaitable[Any]:
    """Return an awaitable that gives the value of a Ray object reference."""
    return asyncio.wrap_future(reference.future())
