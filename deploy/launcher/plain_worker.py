"""`baton worker`: one worker as a process of its own, placed by Kubernetes, systemd or a person.

The process registers itself, and lives as long as what has started it wants. It is the worker that
Ray places elsewhere (``deploy.workers.worker_actor``), without Ray, launcher and supervisor:

    starting ─serves→ ready ─SIGTERM, or a drain by an operator→ leaving ─nothing left→ exit 0
    starting ─fails→ exit 1;  ready ─fails→ exit 1

A second SIGTERM ends what is left. The main thread handles signals, the worker's thread does the
rest.

If a worker's ranks are in several pods, this process is the worker in the first one. In the others
it starts the ranks of its pod:

    entering ─rank 0's pod answers→ following ─rank 0 closes→ exit 0;  ─a rank fails→ exit 1
    entering ─refused, or no answer in time→ exit 1

There SIGTERM changes nothing while rank 0 serves: Kubernetes ends the pods of a group together.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import signal
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import ConfigError, WorkerFailed
from baton.host.process_end import end_process, fail
from baton.telemetry.logs import Service, log_to_stream
from deploy.launcher.kernels import compile_kernels, kernels_of, missing_kernels
from deploy.launcher.preflight import check_exposure
from deploy.models import model_store
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.progress import log_progress
from deploy.store.redis_access import store_url
from deploy.store.shared_secret import SharedSecret
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.local_ranks import LocalRanks
from deploy.workers.node import PLACES_VARIABLE, NodeShare
from deploy.workers.pod_group import Admission, Entrance, PodGroup, enter
from deploy.workers.probes import ProbeServer
from deploy.workers.ranks import OnEnded
from deploy.workers.start_progress import StartWatch
from deploy.workers.worker_actor import READY_S, WorkerThread

if TYPE_CHECKING:
    from engine.parallel.step_channel import GroupAddress

_ORDINAL = re.compile(r".*-(\d+)")
"""The names of a StatefulSet's pods end in their number."""
_OF_HOST = re.compile(r"[^A-Za-z0-9.]+")

log = logging.getLogger(__name__)


def pool_of(config: Config, role: str | None, name: str | None) -> PoolConfig:
    """Return the pool with a name, or the only one of a role. Raises ConfigError."""
    pools = [
        pool for pool in config.pools if name in (None, pool.name) and role in (None, pool.role)
    ]
    if len(pools) == 1:
        return pools[0]
    known = ", ".join(f"{pool.name} ({pool.role})" for pool in config.pools)
    wanted = " and ".join(
        f"--{option} {value}" for option, value in (("role", role), ("pool", name)) if value
    )
    many = "names several pools" if pools else "names no pool"
    raise ConfigError(f"{wanted or 'no --role or --pool'} {many}; choose one of: {known}")


def slot_here(pool: str, host: str) -> str:
    """Return the name of a pool's worker on the machine or pod named ``host``: with its number in
    its StatefulSet, or with the last part of its name."""
    numbered = _ORDINAL.fullmatch(host)
    last = numbered[1] if numbered else _OF_HOST.sub("-", host).rpartition("-")[2]
    return f"{pool}-{last or 0}"


def run_worker(
    config: Config,
    pool: PoolConfig,
    *,
    slot: str,
    host: str,
    workers_here: int,
    probe_port: int,
    group_port: int,
) -> None:
    """Run a worker of ``pool`` in this process until it has left, or its ranks in this pod.

    ``slot`` is the worker's name; empty takes ``slot_here``. ``host`` is the address at which its
    servers listen and others reach it. ``workers_here`` is the number of workers on this machine,
    which share its cores. ``probe_port`` is the port of ``/live`` and ``/ready``; 0 has none.
    ``group_port`` is the port at which pods of a worker find the one with rank 0.

    Raises BatonError if the worker cannot start.
    """
    group = PodGroup.told()
    ranks_here = group.ranks_of(pool)
    _check(config, host)
    # A pod of a group is named like the pod of its rank 0.
    named = group.leader.partition(".")[0] if group.index else platform.node()
    slot = slot or slot_here(pool.name, named)
    name = f"{slot}.pod-{group.index}" if group.index else slot
    log_to_stream(sys.stdout, config.log_level, config.log_format, Service.WORKER, name)
    os.environ.setdefault(PLACES_VARIABLE, str(workers_here * len(ranks_here)))
    settings = _settings(config, pool, slot)
    # Before torch is loaded: it reads which GPUs are visible, and the number of threads.
    ranks = LocalRanks(host, ranks_here) if pool.ranks > 1 else None
    if group.index:
        assert ranks is not None, "a group of pods has several ranks"
        _follow(settings, group, ranks, host, probe_port, group_port)
    share = NodeShare.take(settings, host)
    os.environ["OMP_NUM_THREADS"] = str(share.threads)
    entrance = Entrance(group, settings, host, group_port) if group.size > 1 else None
    if ranks is None:
        worker = WorkerThread(settings, share, "", sys.stdout.fileno())
    else:
        others = _Others(settings, ranks, entrance)
        worker = WorkerThread(settings, share, "", sys.stdout.fileno(), start_ranks=others.start)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.on_sigterm)
    probes = ProbeServer(host, probe_port, lambda: worker.is_ready) if probe_port else None
    if entrance is not None:
        log.info("%s waits for its %d other pods", slot, group.size - 1)
        entrance.wait()
    worker.begin()
    record = _until_started(worker, config.start_deadline_s)
    log.info("%s serves at %s", settings.slot, record["address"])
    worker.wait()
    if probes is not None:
        probes.stop()
    end_process(0)


def _until_started(worker: WorkerThread, deadline_s: float) -> dict[str, Any]:
    """Wait until the worker serves, and return its record. Raises what prevented its start."""
    watch = StartWatch(deadline_s)
    while (record := worker.record(READY_S)) is None:
        if failed := watch.look(time.monotonic(), worker.progress()):
            raise WorkerFailed(f"the worker did not start: {failed}")
    return record


class _Others:
    """The ranks of a worker other than rank 0: those of this pod, and those of the pods that
    wait at the entrance."""

    def __init__(
        self, settings: ActorSettings, here: LocalRanks, entrance: Entrance | None
    ) -> None:
        self._settings, self._here, self._entrance = settings, here, entrance

    def start(self, settings: ActorSettings, address: GroupAddress, on_ended: OnEnded) -> None:
        """Have all of them start. See ``StartRanks``."""
        self._here.start(settings, address, on_ended)
        if self._entrance is not None:
            self._entrance.admit(Admission(settings.slot, **asdict(address)))


def _follow(
    settings: ActorSettings,
    group: PodGroup,
    ranks: LocalRanks,
    host: str,
    probe_port: int,
    group_port: int,
) -> NoReturn:
    """Run the ranks of a pod that has not rank 0, until rank 0 closes. Raises BatonError if they
    cannot start."""
    terms = 0

    def on_sigterm(number: int, frame: object) -> None:
        nonlocal terms
        terms += 1
        if not ranks.has_started:
            end_process(0)
        if terms > 1:
            ranks.kill()
        log.info("the ranks of this pod end with rank 0 of %s (SIGTERM)", settings.slot)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_sigterm)
    # Whether the whole group serves is known by the probe of rank 0's pod.
    probes = ProbeServer(host, probe_port, lambda: ranks.has_started) if probe_port else None
    log.info("pod %d of %s waits for rank 0 at %s", group.index, settings.slot, group.leader)
    found = enter(group, settings, group_port)
    settings = settings.model_copy(update={"slot": found.slot})
    address: dict[str, str | int] = {"host": found.host, "port": found.port, "token": found.token}
    try:
        ranks.follow(settings, address)
    except WorkerFailed as error:
        fail(f"pod {group.index} of {settings.slot} ends: {error.message}")
    log.info("pod %d of %s ends: rank 0 is gone", group.index, settings.slot)
    if probes is not None:
        probes.stop()
    end_process(0)


def _check(config: Config, host: str) -> None:
    if not config.redis_url:
        raise ConfigError("a worker needs --redis-url, the same as its cluster's routers")
    if not config.cluster_id:
        raise ConfigError(
            "a worker needs the cluster_id of its cluster (BATON_CLUSTER_ID, or in the file)"
        )
    check_exposure(config.model_copy(update={"routers": 0, "ray_address": ""}), worker_host=host)


def _settings(config: Config, pool: PoolConfig, slot: str) -> ActorSettings:
    try:
        of_pool = config.model_copy(update={"pools": (pool,)})
        compile_kernels(missing_kernels(kernels_of(of_pool)), log_progress)
    except ConfigError as error:
        log.warning("%s\nWithout it steps run in torch, several times slower.", error.message)
    model = model_store.resolve(config.model, log_progress, config.quantization, config.revision)
    drafter, pinned = "", {"revision": model.commit}
    if config.draft_model:
        found = model_store.resolve_drafter(
            config.drafter, config.draft_model, log_progress, config.draft_revision
        )
        drafter, pinned["draft_revision"] = str(found.path), found.commit
    url = store_url(config, "worker")
    shared = SharedSecret.of(config, url)
    # With certificates a worker needs no secret, and the store's user of workers cannot read it.
    if shared is not None and not config.tls.folder:
        pinned["cluster_secret"] = asyncio.run(shared.read())
    # What this process does not use, and must not pass on to its ranks.
    others = {"redis_router_url": "", "redis_worker_url": "", "gcs_store": "", "ray_address": ""}
    own: dict[str, Any] = {"redis_url": url, "leave_workers": False, "routers": 1}
    if pool.ranks > 1:
        # Each rank sees one GPU, its own, as if Ray had assigned it.
        alone = pool.model_copy(update={"resources": {"GPU": 1.0}})
        own["pools"] = tuple(alone if one.name == pool.name else one for one in config.pools)
    return ActorSettings(
        config=config.model_copy(update={**others, **own, **pinned}).model_dump(mode="json"),
        pool=pool.name,
        slot=slot,
        model_path=str(model.path),
        model_name=config.served_model_name or model.name,
        draft_model_path=drafter,
        redis_url=url,
        cluster_id=config.cluster_id,
        launcher=ProcessIdentity.own(),
    )
