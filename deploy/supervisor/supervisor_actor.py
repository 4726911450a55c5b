"""The Ray actor of the supervisor. Ray restarts it whenever it dies.

It imports no torch: it needs no more memory than any Python process with Ray.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from functools import partial
from typing import Any

import redis
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict

from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config
from baton.host.oom_killer import inherited_oom_score, set_oom_score
from baton.host.process_end import end_process
from baton.rpc.worker_plane import WorkerPlane
from baton.store.redis_client import redis_client
from baton.store.registry import RefusedRecord, Registry, WorkerRecord
from baton.store.supervision import PoolSizes
from baton.telemetry.certificates import CertificateExpiry
from baton.telemetry.logs import Service
from baton.telemetry.metrics import SupervisorMetrics
from baton.telemetry.metrics_server import MetricsServer
from baton.telemetry.page import MetricsPage
from deploy.processes.leadership import StaleOrderError, SupervisorTerm
from deploy.processes.ports import join_host_port
from deploy.processes.process_identity import ProcessIdentity
from deploy.supervisor.autoscaling import Autoscaling, ClusterObserver, change_role
from deploy.supervisor.death_evidence import DeathEvidence
from deploy.supervisor.ray_slots import RaySlots
from deploy.supervisor.reconciler import Phase, Reconciler, split
from deploy.supervisor.status_store import StatusStore
from deploy.supervisor.supervisor import Supervisor
from deploy.workers.actor_process import RayPlace, end_with, start_log
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node import run_directory_here
from deploy.workers.ray_worker import SUPERVISOR_NAME
from deploy.workers.standby import leave_here
from deploy.workers.worker_actor import WorkerActor

_START_S = 60.0

log = logging.getLogger(__name__)


class SupervisorSettings(BaseModel):
    """The supervisor's settings, serialized as JSON. They hold the store's password."""

    model_config = ConfigDict(frozen=True)

    worker: ActorSettings
    """Settings of one worker. Those of the others differ in slot and pool only."""
    drain_s: float
    """Maximum time for a worker of a shrinking pool to finish its requests, in seconds."""
    redis_url: str
    cluster_id: str
    launcher: ProcessIdentity


class SupervisorActor:
    """The supervisor's Ray actor, which ends its own process when the supervisor has failed."""

    worker_class: type = WorkerActor

    def __init__(self, settings_json: str) -> None:
        leave_here()
        # A Ray that Baton did not start raises it.
        set_oom_score(inherited_oom_score())
        self._settings = SupervisorSettings.model_validate_json(settings_json)
        log_file = run_directory_here(self._settings.cluster_id).log(SUPERVISOR_NAME)
        start_log(self._settings.worker.config, log_file, Service.SUPERVISOR, SUPERVISOR_NAME)
        self._started: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._term: SupervisorTerm | None = None
        threading.Thread(target=self._live, name="supervisor", daemon=True).start()

    def ready(self) -> int:
        """Wait until the supervisor watches the workers, and return its process id. Raises
        TimeoutError."""
        return self._started.result(timeout=_START_S)

    def stop(self, epoch: int | None) -> None:
        """Stop the supervisor from replacing workers, because the cluster ends.

        ``epoch`` is that of the launcher's order; None if the cluster is on one machine, which has
        one launcher. Raises StaleOrderError.
        """
        if epoch is not None and self._term is not None and epoch < self._term.epoch:
            raise StaleOrderError("a newer supervisor's term has begun: another launcher leads")
        if self._loop is not None and self._supervising is not None:
            self._loop.call_soon_threadsafe(self._supervising.cancel)

    def _live(self) -> None:
        try:
            asyncio.run(self._supervise())
        except BaseException:
            log.exception("the supervisor failed")
            end_process()

    async def _supervise(self) -> None:
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        metrics = SupervisorMetrics(CollectorRegistry())
        host = RayPlace.own().host
        config = Config(**settings.worker.config)
        tls = config.tls.of("supervisor")
        expiry = CertificateExpiry(metrics.certificate_expiry, "supervisor", tls)
        named = settings.cluster_id, settings.worker.model_name
        page = MetricsPage(metrics.registry, *named, expiry.look)
        server = MetricsServer(host, page, tls, config.supervisor_metrics_ports)
        async with redis_client(settings.redis_url) as client:
            registry = Registry(client, settings.cluster_id)

            async def list_registry() -> dict[str, frozenset[tuple[str, float]]] | None:
                try:
                    records, leases = await registry.all(), await registry.leases()
                except redis.RedisError:
                    return None
                listed: dict[str, frozenset[tuple[str, float]]] = {}
                # A worker of another version lives, although this one cannot use it.
                known: dict[str, WorkerRecord | RefusedRecord] = {**registry.refused, **records}
                for incarnation in known.keys() & leases.keys():
                    slot, entry = known[incarnation].slot, (incarnation, leases[incarnation])
                    listed[slot] = listed.get(slot, frozenset()) | {entry}
                return listed

            sizes = PoolSizes(client, settings.cluster_id)
            self._term = term = SupervisorTerm(client, settings.cluster_id)
            reconciler = Reconciler(settings.drain_s, config.start_deadline_s)
            autoscaling = None
            if config.autoscaler.enabled:

                def phases() -> dict[str, Phase]:
                    return reconciler.phases(time.monotonic())

                # The observer has a separate registry, since a reader keeps what it has read.
                observer = ClusterObserver(
                    config,
                    Registry(client, settings.cluster_id),
                    TrafficStore(client, settings.cluster_id),
                    phases,
                )
                change = partial(change_role, WorkerPlane.of(tls, config.cluster_secret))
                autoscaling = Autoscaling(config, observer, phases, sizes, metrics, change)
            supervisor = Supervisor(
                {pool.name: pool.count for pool in config.pools},
                reconciler,
                RaySlots(
                    partial(settings_in, settings.worker),
                    list_registry,
                    config.advanced.registry_ttl_s,
                    term,
                    DeathEvidence(
                        run_directory_here(settings.cluster_id),
                        one_machine=settings.worker.is_on_one_machine,
                    ),
                    self.worker_class,
                    settings.worker.config_hash,
                ),
                StatusStore(client, settings.cluster_id),
                sizes,
                term,
                metrics,
                join_host_port(host, server.port),
                drain_s=settings.drain_s,
                note=str if autoscaling is None else autoscaling.note,
                decisions=tuple if autoscaling is None else autoscaling.decisions,
            )
            async with asyncio.TaskGroup() as group:
                if settings.worker.is_on_one_machine:
                    group.create_task(end_with(settings.launcher))
                self._supervising = group.create_task(_keep(supervisor, autoscaling))
                self._started.set_result(os.getpid())


async def _keep(supervisor: Supervisor, autoscaling: Autoscaling | None) -> None:
    """Run the supervisor, and the autoscaler if there is one, until cancelled."""
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        if autoscaling is not None:
            group.create_task(autoscaling.run())


class RaySupervisor:
    """The launcher's handle of the supervisor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    def place(
        cls, settings: SupervisorSettings, actor_class: type = SupervisorActor
    ) -> RaySupervisor:
        """Make Ray start the supervisor and restart it whenever it dies, or find the running one.

        Blocks while Ray's control store is unreachable.
        """
        import ray  # noqa: PLC0415
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

        actor: Any = ray.remote(actor_class).options(
            name=SUPERVISOR_NAME,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            # The supervisor runs on the launcher's node, as long as that node exists.
            scheduling_strategy=NodeAffinitySchedulingStrategy(RayPlace.own().node, soft=True),
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=2,
        )
        return cls(actor.remote(settings.model_dump_json()))

    @classmethod
    def find(cls) -> RaySupervisor | None:
        """Return the running supervisor, if any.

        Blocks while Ray's control store is unreachable.
        """
        import ray  # noqa: PLC0415

        try:
            return cls(ray.get_actor(SUPERVISOR_NAME))
        except ValueError:
            return None

    async def ready(self) -> int:
        """Wait until the supervisor watches the workers, and return its process id. Raises what Ray
        raises."""
        return int(await asyncio.wrap_future(self._handle.ready.remote().future()))

    def kill(self) -> None:
        """End the supervisor for good: Ray does not restart it. Idempotent. Blocks while Ray's
        control store is unreachable."""
        import ray  # noqa: PLC0415

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._handle)

    async def stop(self, deadline_s: float, epoch: int | None) -> None:
        """Make the supervisor stop replacing workers. ``epoch`` is that of the order; None in a
        cluster on one machine. Raises TimeoutError, or what Ray raises."""
        async with asyncio.timeout(deadline_s):
            await asyncio.wrap_future(self._handle.stop.remote(epoch).future())


def settings_in(worker: ActorSettings, slot: str) -> ActorSettings:
    """Return the settings of the worker in a slot, from those of another worker."""
    return worker.model_copy(update={"pool": split(slot)[0], "slot": slot})
