"""The Ray actor that houses the supervisor. Ray starts it again whenever it dies.

It imports no torch: a Python process with Ray in it is all that it costs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import redis
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict

from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config
from baton.host.process_end import end_process
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.store.supervision import PoolSizes
from baton.telemetry.metrics import SupervisorMetrics
from baton.telemetry.metrics_server import MetricsServer
from deploy.processes.ports import join_host_port
from deploy.processes.process_identity import ProcessIdentity
from deploy.supervisor.autoscaling import Autoscaling, ClusterObserver, change_role
from deploy.supervisor.ray_slots import RaySlots
from deploy.supervisor.reconciler import split
from deploy.supervisor.status_store import StatusStore
from deploy.supervisor.supervisor import Supervisor
from deploy.workers.actor_process import RayPlace, end_with, log_to
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node import run_directory_here
from deploy.workers.ray_worker import SUPERVISOR_NAME
from deploy.workers.standby import leave_here
from deploy.workers.worker_actor import WorkerActor

_START_S = 60.0

log = logging.getLogger(__name__)


class SupervisorSettings(BaseModel):
    """What the launcher tells it; it travels as JSON and holds the store's password."""

    model_config = ConfigDict(frozen=True)

    workers: tuple[ActorSettings, ...]
    """One of each slot with which the cluster came up; further ones are made like them."""
    drain_s: float
    """How long a worker of a pool that shrinks may take to end what it runs."""
    redis_url: str
    cluster_id: str
    log_level: str
    log_format: str
    launcher: ProcessIdentity


class SupervisorActor:
    """Lives in a Ray worker process, and ends that process when the supervisor has failed."""

    worker_class: type = WorkerActor

    def __init__(self, settings_json: str) -> None:
        leave_here()
        self._settings = SupervisorSettings.model_validate_json(settings_json)
        log_file = run_directory_here(self._settings.cluster_id).log(SUPERVISOR_NAME)
        log_to(str(log_file), self._settings.log_level, self._settings.log_format)
        self._started: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeping: asyncio.Task[None] | None = None
        threading.Thread(target=self._live, name="supervisor", daemon=True).start()

    def ready(self) -> int:
        """Its process id, once it keeps the workers. Raises TimeoutError."""
        return self._started.result(timeout=_START_S)

    def stop(self) -> None:
        """Keep nobody any more: the cluster ends."""
        if self._loop is not None and self._keeping is not None:
            self._loop.call_soon_threadsafe(self._keeping.cancel)

    def _live(self) -> None:
        try:
            asyncio.run(self._supervise())
        except BaseException:
            log.exception("the supervisor has failed")
            end_process()

    async def _supervise(self) -> None:
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        metrics = SupervisorMetrics(CollectorRegistry())
        host = RayPlace.own().host
        config = Config(**settings.workers[0].config)
        tls = config.tls.of("supervisor")
        server = MetricsServer(host, metrics.registry, tls)
        async with redis_client(settings.redis_url) as client:
            registry = Registry(client, settings.cluster_id)

            async def roll() -> dict[str, frozenset[tuple[str, float]]] | None:
                try:
                    records, leases = await registry.all(), await registry.leases()
                except redis.RedisError:
                    return None
                listed: dict[str, frozenset[tuple[str, float]]] = {}
                for incarnation in records.keys() & leases.keys():
                    slot, entry = records[incarnation].slot, (incarnation, leases[incarnation])
                    listed[slot] = listed.get(slot, frozenset()) | {entry}
                return listed

            slots = SlotSettings(settings.workers)
            sizes = PoolSizes(client, settings.cluster_id)
            supervisor = Supervisor(
                slots.pools,
                RaySlots(slots.of, roll, config.advanced.registry_ttl_s, self.worker_class),
                StatusStore(client, settings.cluster_id),
                sizes,
                metrics,
                join_host_port(host, server.port),
                drain_s=settings.drain_s,
            )
            autoscaling = None
            if config.autoscaler.enabled:
                # With a registry of its own: a reader keeps what it has read.
                look = ClusterObserver(
                    config,
                    Registry(client, settings.cluster_id),
                    TrafficStore(client, settings.cluster_id),
                    supervisor.phases,
                )
                autoscaling = Autoscaling(
                    config, look, supervisor.phases, sizes, metrics, partial(change_role, tls=tls)
                )
                supervisor.note = autoscaling.note
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    end_with(settings.launcher, settings.redis_url, settings.cluster_id)
                )
                self._keeping = group.create_task(_keep(supervisor, autoscaling))
                self._started.set_result(os.getpid())


async def _keep(supervisor: Supervisor, autoscaling: Autoscaling | None) -> None:
    """Until it is cancelled: workers in their slots, and the slots as the traffic asks."""
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        if autoscaling is not None:
            group.create_task(autoscaling.run())


class RaySupervisor:
    """The launcher's hold on it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    def place(
        cls, settings: SupervisorSettings, actor_class: type = SupervisorActor
    ) -> RaySupervisor:
        """Have Ray start it, and start it again whenever it dies; the one that is there, if one is.

        Blocks while Ray's control store is away.
        """
        import ray  # noqa: PLC0415
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

        actor: Any = ray.remote(actor_class).options(
            name=SUPERVISOR_NAME,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            # Beside the launcher, as long as that is there.
            scheduling_strategy=NodeAffinitySchedulingStrategy(RayPlace.own().node, soft=True),
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=2,
        )
        return cls(actor.remote(settings.model_dump_json()))

    @classmethod
    def find(cls) -> RaySupervisor | None:
        """The one that is there. Blocks while Ray's control store is away."""
        import ray  # noqa: PLC0415

        try:
            return cls(ray.get_actor(SUPERVISOR_NAME))
        except ValueError:
            return None

    async def ready(self) -> int:
        """Its process id, once it keeps the workers. Raises what Ray raises."""
        return int(await asyncio.wrap_future(self._handle.ready.remote().future()))

    def kill(self) -> None:
        """End it for good; idempotent. Blocks while Ray's control store is away."""
        import ray  # noqa: PLC0415

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._handle)

    async def stop(self, deadline_s: float) -> None:
        """Have it keep nobody any more. Raises TimeoutError, or what Ray raises."""
        async with asyncio.timeout(deadline_s):
            await asyncio.wrap_future(self._handle.stop.remote().future())


class SlotSettings:
    """Pure."""

    def __init__(self, first: Sequence[ActorSettings]) -> None:
        """``first``: of the slots that the cluster came up with, at least one of each pool."""
        self._first = {settings.slot: settings for settings in first}
        self.pools = Counter(settings.pool for settings in first)
        """How many of each pool."""

    def of(self, slot: str) -> ActorSettings:
        """Raises KeyError for one of an unknown pool."""
        known = self._first.get(slot)
        return self._further(slot) if known is None else known

    def _further(self, slot: str) -> ActorSettings:
        pool, _ = split(slot)
        return self._first[f"{pool}-0"].model_copy(update={"slot": slot})
