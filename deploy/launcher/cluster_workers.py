"""The launcher's handle of a cluster's workers: places, supervises and ends them.

The launcher places the first incarnation of each worker. The supervisor, which it places next,
replaces workers from then on. On a Ray cluster that the launcher did not start, workers may outlive
a launcher. The next one takes over the cluster's lease and its workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import redis

from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config
from baton.store.pin_store import PinStore
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.store.supervision import PoolSizes
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.launcher_lease import LauncherClaim, workers_hash_key
from deploy.processes.process_identity import ProcessIdentity
from deploy.supervisor.status_store import StatusStore
from deploy.supervisor.supervisor_actor import RaySupervisor, SupervisorActor, SupervisorSettings
from deploy.workers.actor_process import reason
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.ray_worker import RayWorker, find, find_all, is_known, place

_STOP_S = 5.0
_SUPERVISOR_START_S = 60.0
_SUPERVISOR_AGAIN_S = 10.0
_FIND_S = 3.0
_GONE_S = 30.0
_POLL_S = 0.1
_FORGET_S = 5.0

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class ClusterWorkers:
    """The workers of one cluster. Owned by the launcher's event loop."""

    def __init__(
        self,
        config: Config,
        slots: Sequence[ActorSettings],
        redis_url: str,
        cluster_id: str,
        supervisor_class: type[SupervisorActor],
        report: Callable[[str], None],
    ) -> None:
        """``slots`` has the settings of the worker of each slot, at least one. ``redis_url`` is the
        store's address.

        ``supervisor_class`` is the class of the supervisor. It also determines the class of the
        workers. ``report`` prints one line of text.
        """
        self._config = config
        self._slots = tuple(slots)
        self._redis_url = redis_url
        self._cluster_id = cluster_id
        self._supervisor_class = supervisor_class
        self._report = report
        self._calls = DaemonThread("ray calls")
        """Makes calls that block while Ray's control store is unreachable."""
        self._claim: LauncherClaim | None = None
        if config.ray_address:
            self._claim = LauncherClaim(config, redis_url, cluster_id)
        self._first: tuple[RayWorker, ...] = ()
        self._serve = False
        self._supervisor: RaySupervisor | None = None

    @property
    def names(self) -> list[str]:
        """Return the slots of the workers that the launcher starts first."""
        return [settings.slot for settings in self._slots]

    @property
    def is_claimed(self) -> bool:
        """Whether the launcher must claim the cluster in Redis. It must if workers may run on
        several machines."""
        return self._claim is not None

    async def claim(self) -> None:
        """Become the only launcher of workers on several machines.

        Workers that an earlier launcher started with another configuration are ended. Raises
        BatonError if another launcher holds the claim, and ``redis.RedisError``.
        """
        assert self._claim is not None
        if await self._claim.take():
            supervisor = await self._calls.call(RaySupervisor.find)
            if supervisor is not None:
                await self._calls.call(supervisor.kill)
            workers = await self._calls.call(find_all)
            if workers:
                self._report(f"stopping {len(workers)} workers of another configuration first")
            await asyncio.gather(*map(self._end_worker, workers))

    async def keep_claim(self) -> None:
        """Renew this launcher's claim on the cluster until cancelled. Raises BatonError when
        another launcher holds the claim."""
        assert self._claim is not None
        await self._claim.keep()

    async def start(self) -> dict[str, int]:
        """Place the first workers and wait until they serve. Returns their process ids by slot.

        If workers may run on several machines, those that already run are kept. Raises BatonError.
        """
        actor = self._supervisor_class.worker_class

        def worker(settings: ActorSettings) -> RayWorker:
            found = find(settings.slot) if self.is_claimed else None
            return found or place(settings, actor)

        self._first = await self._calls.call(lambda: tuple(map(worker, self._slots)))
        records = await together(worker.ready() for worker in self._first)
        self._serve = True
        return {record["slot"]: record["process"]["pid"] for record in records}

    async def start_supervisor(self) -> int:
        """Place the supervisor, wait until it manages the workers, and return its process id."""
        settings = SupervisorSettings(
            worker=self._slots[0],
            drain_s=self._config.drain_deadline_s,
            redis_url=self._redis_url,
            cluster_id=self._cluster_id,
            log_level=self._config.log_level,
            log_format=self._config.log_format,
            launcher=ProcessIdentity.own(),
        )
        while True:
            try:
                supervisor = await self._calls.call(
                    lambda: RaySupervisor.place(settings, self._supervisor_class)
                )
                self._supervisor = supervisor
                async with asyncio.timeout(_SUPERVISOR_START_S):
                    return await supervisor.ready()
            except Exception as error:
                self._report(f"the supervisor does not start yet: {reason(error)}")
                await asyncio.sleep(_SUPERVISOR_AGAIN_S)
            if self._supervisor is not None:
                # A control store that died may have lost the actor, which would then never start.
                # Its name would block the next one.
                await self._calls.call(self._supervisor.kill)

    async def stop_supervisor(self) -> None:
        """Make the supervisor stop replacing workers. Raises TimeoutError, or what Ray raises."""
        if self._supervisor is not None:
            await self._supervisor.stop(_STOP_S)

    async def end(self) -> None:
        """Make all workers exit in order. If they may run on several machines, then kill workers
        that have not exited."""
        workers = await self._running()
        await asyncio.gather(*(worker.stop(_STOP_S) for worker in workers), return_exceptions=True)
        if self.is_claimed:
            # Ray keeps running, and would keep the workers' processes.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_STOP_S):
                    await self._calls.call(lambda: self._kill(workers))

    async def give_up_claim(self) -> None:
        """Release this launcher's claim, so that another launcher can take over the cluster.

        Never raises Redis errors.
        """
        if self._claim is not None:
            with contextlib.suppress(redis.RedisError):
                await self._claim.give_up()
            await self._claim.close()

    async def _running(self) -> Sequence[RayWorker]:
        """Return all running workers, including those that the supervisor placed. If Ray does not
        answer, return only the workers that this launcher placed."""
        if not self._serve:
            return self._first
        try:
            async with asyncio.timeout(_FIND_S):
                return await self._calls.call(find_all)
        except Exception as error:
            log.warning("cannot list the workers: %s", reason(error))
            return self._first

    def _kill(self, workers: Sequence[RayWorker]) -> None:
        if self._supervisor is not None:
            self._supervisor.kill()
        for worker in workers:
            worker.kill()

    async def _end_worker(self, worker: RayWorker) -> None:
        with contextlib.suppress(Exception):
            await worker.stop(_STOP_S)
        await self._calls.call(worker.kill)
        async with asyncio.timeout(_GONE_S):
            while await self._calls.call(lambda: is_known(worker.slot)):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)


async def forget_cluster(url: str, cluster_id: str) -> None:
    """Delete what an ending cluster has left in an operator's own Redis. Never raises.

    While a cluster runs, its routers delete the prefix index entries of dead workers. Nothing else
    would delete the entries of the workers that end with the cluster, since entries have no TTL.
    """
    try:
        async with asyncio.timeout(_FORGET_S), redis_client(url) as client:
            registry, index = Registry(client, cluster_id), PrefixIndex(client, cluster_id)
            await client.delete(workers_hash_key(cluster_id))
            await StatusStore(client, cluster_id).clear()
            await PoolSizes(client, cluster_id).clear()
            await PinStore(client, cluster_id).clear()
            await TrafficStore(client, cluster_id).clear()
            for incarnation in await registry.dead():
                await index.collect(incarnation)
                await registry.forget(incarnation)
            if not await registry.all():
                await index.forget_generation()
    except (redis.RedisError, OSError, TimeoutError) as error:
        log.warning("cannot delete index entries in Redis: %s", error)


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines together and return their results; the first failure ends the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]
